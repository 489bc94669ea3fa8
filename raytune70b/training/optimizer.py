"""AdamW in the formats that fit: fp32, bf16 or 8-bit states, on the device or in host memory.

torch's fused AdamW runs where weights and states are fp32. Everything else is `CompactAdamW`: its arithmetic is fp32, only what
rests between two steps is small. Its states are plain sharded tensors cut along the first dimension like the parameters, and
neither a quantisation block nor a rounding decision depends on where the cut lies, so a checkpoint continues on any number of
workers. (Quantised states of torchao and bitsandbytes block the flat shard, and random rounding draws from the worker's
generator: both change with world_size.)

Cost beside fused AdamW: about 20 element-wise passes over a worker's shard a step, and fp32 temporaries of the largest shard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raytune70b.config import UserError
from raytune70b.model.shard import local_rows
from raytune70b.model.zero3 import whole_shape
from raytune70b.schema import Config

STATES = {"adamw": "fp32", "adamw_bf16": "bf16", "adamw_8bit": "8bit"}
BLOCKS = (256, 128, 64)
"""Elements that share a scale in 8-bit states: the first that divides a row; where none does, states stay fp32."""


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """The optimizer of `train.optimizer`; the loop sets each group's `lr` before every step. Raises UserError."""
    train = config.train
    groups = parameter_groups(model, train.weight_decay)
    if not groups:
        raise UserError("model: nothing is trained; set model.method or model.lora.targets")
    betas = (train.beta1, train.beta2)
    in_fp32 = all(p.dtype == torch.float32 for group in groups for p in group["params"])
    offload = config.model.offload == "optimizer"
    if config.model.sharding == "zero3" or (train.optimizer == "adamw" and in_fp32 and not offload):
        return torch.optim.AdamW(groups, lr=train.learning_rate, betas=betas, eps=train.eps, fused=True)
    return CompactAdamW(groups, train.learning_rate, betas, train.eps, STATES[train.optimizer], in_host_memory=offload)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trained parameters in two groups: matrices with weight decay, vectors (norms, biases) without."""
    trained = {p: is_vector(module, key, p) for module in model.modules() for key, p in module.named_parameters(recurse=False) if p.requires_grad}
    groups = [
        {"params": [p for p in trained if not trained[p]], "weight_decay": weight_decay},
        {"params": [p for p in trained if trained[p]], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def is_vector(module: nn.Module, key: str, parameter: Tensor) -> bool:
    """Whether a module's own parameter is a norm or a bias; those of several heads or experts may be stacked to a matrix."""
    return len(whole_shape(parameter)) <= 1 or "bias" in key or "Norm" in type(module).__name__


class CompactAdamW(torch.optim.Optimizer):
    """AdamW whose states rest in `states`: fp32, bf16 or 8bit (bf16 and 8bit keep vectors in fp32).

    bf16 weights and bf16 second moments are rounded stochastically, or small updates would be lost. In 8 bits the root of
    the second moment is stored: it spans half the decades, so no moment meets a second moment that was rounded to zero.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, states: str, in_host_memory: bool = False):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.in_host_memory = in_host_memory
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"step": torch.zeros((), dtype=torch.float32)}
                for name in ("exp_avg", "exp_avg_sq"):
                    self._create(p, name, states if p.ndim > 1 else "fp32")

    def _create(self, p: Tensor, name: str, form: str) -> None:
        block = next((b for b in BLOCKS if _row_size(p) % b == 0), 0) if form == "8bit" else 0
        state = self.state[p]
        if block:
            state[name] = self._zeros(p, tuple(p.shape), torch.uint8)
            state[f"{name}_scale"] = self._zeros(p, (p.shape[0], _row_size(p) // block), torch.float32)
            _local(state[name]).fill_(ZERO_CODE[name])
        else:
            state[name] = self._zeros(p, tuple(p.shape), torch.bfloat16 if form == "bf16" else torch.float32)

    def _zeros(self, p: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros whose rows are cut and placed like the parameter's."""
        rows = _local(p)
        at = torch.device("cpu") if self.in_host_memory else rows.device
        zeros = torch.zeros((len(rows), *shape[1:]) if shape else (), dtype=dtype, device=at, pin_memory=at.type == "cpu" and rows.is_cuda)
        if not isinstance(p, DTensor):
            return zeros
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(zeros, p.device_mesh, p.placements, run_check=False, shape=torch.Size(shape), stride=stride)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        if closure is not None:
            raise NotImplementedError("CompactAdamW takes no closure")
        number = 0
        for group in self.param_groups:
            for p in group["params"]:
                number += 1
                if p.grad is not None:
                    self._update(p, group, number)

    def _update(self, p: Tensor, group: dict[str, Any], number: int) -> None:
        state, (beta1, beta2), lr = self.state[p], group["betas"], group["lr"]
        state["step"] += 1
        step = int(state["step"])
        rows, first = local_rows(p) if isinstance(p, DTensor) else (p, 0)
        gradient = _local(p.grad).float()
        mean = self._read(p, "exp_avg").lerp_(gradient, 1 - beta1)
        square = self._read(p, "exp_avg_sq").mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        del gradient
        noise = Noise(first * _row_size(p), step, number)
        denominator = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        weight = rows.float() if rows.dtype != torch.float32 else rows
        weight.mul_(1 - lr * group["weight_decay"]).addcdiv_(mean, denominator, value=-lr / (1 - beta1**step))
        del denominator
        if weight is not rows:
            noise.round_into(rows, weight, salt=1)
        self._write(p, "exp_avg", mean, None)
        self._write(p, "exp_avg_sq", square, noise)

    def _read(self, p: Tensor, name: str) -> Tensor:
        """A moment in fp32 on the parameter's device, free to be changed."""
        stored, at = _local(self.state[p][name]), _local(p).device
        if stored.dtype != torch.uint8:
            there = stored.to(at)  # what crosses PCIe crosses as small as it rests
            return there.to(torch.float32, copy=there is stored)
        value = dequantise(stored.to(at), _local(self.state[p][f"{name}_scale"]).to(at), name)
        return value.square_() if name == "exp_avg_sq" else value

    def _write(self, p: Tensor, name: str, value: Tensor, noise: Noise | None) -> None:
        stored = _local(self.state[p][name])
        if stored.dtype == torch.uint8:
            scale = _local(self.state[p][f"{name}_scale"])
            codes, scales = quantise(value.sqrt_() if name == "exp_avg_sq" else value, scale.shape[1], name)
            stored.copy_(codes)
            scale.copy_(scales)
        elif stored.dtype == torch.bfloat16 and noise is not None:
            noise.round_into(stored, value, salt=2)
        else:
            _put(stored, value)


def _put(target: Tensor, value: Tensor) -> None:
    """Copies a value into a tensor of perhaps another type; between two devices it is converted first, or the larger type would cross."""
    target.copy_(value if value.device == target.device else value.to(target.dtype))


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _row_size(p: Tensor) -> int:
    return p[:1].numel() if p.ndim > 1 and not isinstance(p, DTensor) else int(torch.Size(p.shape[1:]).numel())


class Noise:
    """Rounds fp32 to bf16 up or down with the odds that keep the mean.

    The random bits are a hash (murmur3's finaliser) of the element's place in the whole tensor, the step and the tensor:
    the same for every sharding, and nothing to save.
    """

    def __init__(self, first_element: int, step: int, number: int):
        self.first_element = first_element
        self.seed = step * 0x9E3779B1 + number * 0x85EBCA77

    def round_into(self, target: Tensor, value: Tensor, salt: int) -> None:
        """Writes fp32 `value` to bf16 `target`."""
        bits = value.contiguous().view(torch.int32)
        places = torch.arange(bits.numel(), dtype=torch.int32, device=bits.device).view(bits.shape)
        noise = _mix(places.add_(_int32(self.first_element)).bitwise_xor_(_int32(_scramble(self.seed + salt))))
        rounded = noise.bitwise_and_(0xFFFF).add_(bits).bitwise_and_(~0xFFFF)
        _put(target, rounded.view(torch.float32))


def _mix(x: Tensor) -> Tensor:
    for shift, mask, factor in ((16, 0xFFFF, 0x85EBCA6B), (13, 0x7FFFF, 0xC2B2AE35)):
        x.bitwise_xor_((x >> shift).bitwise_and_(mask))
        x.mul_(_int32(factor))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _scramble(x: int) -> int:
    x = (x ^ (x >> 31)) * 0x7FB5D329728EA185 & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 27)) & 0xFFFFFFFF


def _int32(x: int) -> int:
    """An integer as the signed 32-bit number with the same low bits."""
    return (x + 2**31) % 2**32 - 2**31


_CODES: dict[tuple[str, torch.device], Tensor] = {}
ZERO_CODE = {"exp_avg": 127, "exp_avg_sq": 0}
"""The code of 0.0 in the signed and the unsigned table."""


def _code_table(name: str, device: torch.device) -> Tensor:
    """bitsandbytes' dynamic 8-bit numbers: about seven decades, densest in relative terms near the block's maximum.

    Its signed table ends at -0.993: a block's negative maximum would shrink at every step. -1 takes the place of the smallest.
    """
    if (name, device) not in _CODES:
        from bitsandbytes.functional import create_dynamic_map

        table = create_dynamic_map(signed=name == "exp_avg")
        if name == "exp_avg":
            table[ZERO_CODE[name] - 1] = -1.0
        _CODES[name, device] = table.sort().values.to(device)
    return _CODES[name, device]


def quantise(value: Tensor, blocks: int, name: str) -> tuple[Tensor, Tensor]:
    """fp32 [rows, ...] -> uint8 codes of the same shape and one fp32 scale for each of `blocks` equal parts of a row."""
    from bitsandbytes.functional import quantize_blockwise

    if not value.numel():
        return value.to(torch.uint8), value.new_zeros(len(value), blocks)
    size = value[0].numel() // blocks
    codes, state = quantize_blockwise(value.contiguous(), code=_code_table(name, value.device), blocksize=size)
    return codes, state.absmax.view(len(value), blocks)


def dequantise(codes: Tensor, scales: Tensor, name: str) -> Tensor:
    """The inverse of `quantise`, to rounding."""
    from bitsandbytes.functional import dequantize_blockwise

    if not codes.numel():
        return codes.to(torch.float32)
    size = codes[0].numel() // scales.shape[1]
    return dequantize_blockwise(codes, absmax=scales.flatten(), code=_code_table(name, codes.device), blocksize=size)
