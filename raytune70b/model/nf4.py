"""Linear layers whose frozen weight rests in 4 bits (NF4), made to be sharded and streamed.

The weight is two ordinary parameters cut along the output rows: packed codes (uint8, two to a byte) and one bf16 scale for 64
elements of a row, 4.25 bits a weight. No block crosses a row, so a worker quantises the rows that it reads, alone, to exactly
what one process would get, and FSDP2 gathers the packed form. (A bitsandbytes Linear4bit keeps its scales whole on every
worker; torchao's NF4 centres its scales over the tensor, so its values would change with world_size.) Kernels are
bitsandbytes'. The backward pass unpacks again instead of keeping the unpacked weight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytune70b.config import UserError

BLOCK = 64
CPU_PIECE = 2**17
"""Weights quantised at once on a CPU, where bitsandbytes compares each with all 16 codes: 64 bytes a weight while it does."""


class Nf4Linear(nn.Linear):
    """A frozen linear layer of `in_features` (a multiple of 64) in NF4; `weight` and `weight_scale` are filled by `quantise`."""

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        at = linear.weight.device
        packed = torch.empty(self.out_features, self.in_features // 2, dtype=torch.uint8, device=at)
        scale = torch.empty(self.out_features, self.in_features // BLOCK, dtype=torch.bfloat16, device=at)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = _Nf4Product.apply(x, self.weight, self.weight_scale)
        return y if self.bias is None else y + self.bias


class _Nf4Product(torch.autograd.Function):
    """x [..., in] @ unpacked weight [out, in].T; the gradient by x alone. Saves the packed weight, which FSDP2 may free and gather again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(packed, scale)
        return F.linear(x, dequantise(packed, scale, x.dtype))

    @staticmethod
    def backward(ctx: Any, by_y: Tensor) -> tuple[Tensor, None, None]:
        packed, scale = ctx.saved_tensors
        return by_y @ dequantise(packed, scale, by_y.dtype), None, None


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, in] -> uint8 [rows, in / 2] codes and bf16 [rows, in / 64] scales."""
    from bitsandbytes.functional import quantize_4bit

    packed = rows.new_empty(len(rows), rows.shape[1] // 2, dtype=torch.uint8)
    scale = rows.new_empty(len(rows), rows.shape[1] // BLOCK, dtype=torch.bfloat16)
    step = len(rows) if rows.is_cuda else max(1, CPU_PIECE // rows.shape[1])
    for first in range(0, len(rows), max(1, step)):
        part = slice(first, first + step)
        codes, state = quantize_4bit(rows[part].contiguous(), blocksize=BLOCK, quant_type="nf4")
        packed[part], scale[part] = codes.view(-1, packed.shape[1]), state.absmax.view(-1, scale.shape[1])
    return packed, scale


def dequantise(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [rows, in] in `dtype`."""
    import bitsandbytes  # noqa: F401 - registers the operator

    shape = (packed.shape[0], packed.shape[1] * 2)
    return torch.ops.bitsandbytes.dequantize_4bit(packed.view(-1, 1), scale.float().flatten(), BLOCK, "nf4", shape, dtype)


def quantise_linears(model: nn.Module, layers: list[nn.Module]) -> None:
    """Replaces every linear layer inside `layers` by an `Nf4Linear`, in place, on the meta device. Raises UserError."""
    for layer in layers:
        stacked = [name for name, p in layer.named_parameters() if p.ndim > 2]
        if stacked:
            raise UserError(f"model.method: qlora cannot quantise {stacked[0]}, a stack of experts, and without it little is saved; use lora")
        for parent in list(layer.modules()):
            for name, child in parent.named_children():
                if isinstance(child, nn.Linear):
                    _require_blocks(name, child)
                    setattr(parent, name, Nf4Linear(child))


def _require_blocks(name: str, linear: nn.Linear) -> None:
    if linear.in_features % BLOCK:
        raise UserError(f"model.method: qlora quantises {BLOCK} weights at a time; {name} has {linear.in_features} inputs, no multiple of it; use lora")
