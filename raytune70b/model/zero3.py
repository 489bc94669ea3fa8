"""DeepSpeed ZeRO-3's cut of a model: every parameter is flattened and cut into world_size equal pieces, the last of them padded.

The rest of the package thinks in rows and in whole tensors. Here a worker's piece is seen in both ways: the rows it touches, so that
weights are read and drawn as they are under FSDP2, and the boxes it consists of, so that checkpoints are those of FSDP2: the same
names and shapes in the same files, loaded by any number of workers and by either engine.

`fragment` is the one place that reads DeepSpeed's inner bookkeeping; its own functions for that copy what is offloaded.
"""

from __future__ import annotations

import math
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a tensor."""


def import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed for this device, silent, and with nothing to compile: what it builds is for other optimizers and for inference."""
    os.environ["DS_ACCELERATOR"] = device.type
    if device.type == "cuda":
        os.environ["LOCAL_RANK"] = str(device.index or 0)
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}  # or on a CPU it builds collectives in shared memory, which training never calls
    warnings.filterwarnings("ignore", "`torch.distributed.*` is deprecated", FutureWarning)
    return deepspeed


def cut(model: nn.Module, settings: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
    """Gives a model on the meta device its memory, one parameter after another, and cuts each at once; values are garbage.

    settings: DeepSpeed's configuration. dtype: of trained parameters while they compute; their fp32 masters come with the optimizer.
    """
    deepspeed = import_deepspeed(device)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            module._buffers[key] = torch.empty_like(buffer, device=device)
        for key, old in module._parameters.items():
            if old is None:
                continue
            if old not in made:
                memory = torch.empty(old.shape, dtype=dtype if old.requires_grad else old.dtype, device=device)
                new = made[old] = nn.Parameter(memory, requires_grad=old.requires_grad)
                if len(made) == 1:
                    deepspeed.zero.Init(module=nn.ParameterList([new]), config_dict_or_path=settings)
                else:
                    next(iter(made.values())).convert_to_zero_parameters([new])  # type: ignore[attr-defined]
            module._parameters[key] = made[old]  # tied weights stay tied


def is_cut(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter under ZeRO-3: it is empty between its module's passes."""
    return hasattr(tensor, "ds_tensor")


def whole_shape(tensor: Any) -> tuple[int, ...]:
    """The shape of a tensor over all workers."""
    return tuple(tensor.ds_shape) if is_cut(tensor) else tuple(tensor.shape)


def fragment(parameter: Any, state: str | None = None) -> tuple[Tensor, int]:
    """This worker's piece without its padding: live memory, 1-D, and the place of its first element in the flat tensor.

    Of a trained parameter it is the fp32 master weights, or an optimizer state (`exp_avg`); of a frozen one the weights as they rest.
    """
    size = parameter.ds_tensor.ds_numel
    first = min(dist.get_rank() * size, parameter.ds_numel)
    piece = parameter.ds_tensor
    if parameter.requires_grad:
        zero = parameter._z3_optimizer
        group, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
        flat = zero.fp32_partitioned_groups_flat[group]
        piece = (zero.optimizer.state[flat][state] if state else flat).detach()[offset : offset + size]
    return piece[: parameter.ds_numel - first], first


def touched_rows(parameter: Any) -> tuple[int, int]:
    """First row and end of the rows that this worker's piece touches."""
    values, first = fragment(parameter)
    row = math.prod(parameter.ds_shape[1:])
    return first // row, -(-(first + len(values)) // row)


def write_rows(parameter: Any, rows: Tensor, first_row: int) -> None:
    """Fills what of this worker's piece lies in some rows of the tensor."""
    values, first = fragment(parameter)
    flat, start = rows.reshape(-1), first_row * math.prod(parameter.ds_shape[1:])
    begin, end = max(first, start), min(first + len(values), start + len(flat))
    if begin < end:
        values[begin - first : end - first].copy_(flat[begin - start : end - start])


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The fewest boxes that elements [start, stop) of a tensor consist of, in their order: part of a row, whole rows, part of a row."""
    if start >= stop:
        return []
    if len(shape) < 2:
        return [((start,), (stop - start,))] if shape else [((), ())]
    row = math.prod(shape[1:])
    head, tail = -(-start // row), stop // row  # the whole rows

    def within(number: int, begin: int, end: int) -> list[Box]:
        return [((number, *offsets), (1, *sizes)) for offsets, sizes in boxes(shape[1:], begin, end)]

    if head > tail:
        return within(tail, start - tail * row, stop - tail * row)
    whole = [((head, *[0] * len(shape[1:])), (tail - head, *shape[1:]))] if tail > head else []
    return [*within(head - 1, start - (head - 1) * row, row), *whole, *within(tail, 0, stop - tail * row)]


class Piece(torch.Tensor):
    """A worker's piece of a tensor as torch.distributed.checkpoint sees it: the whole tensor's shape, and live views of the boxes here.

    It implements the protocol by which DTensor takes part (torch.distributed._checkpointable); nothing can be computed with it.
    """

    __slots__ = ("offsets", "parts")

    offsets: list[tuple[int, ...]]
    parts: list[Tensor]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], values: Tensor, first: int) -> Piece:
        """values: 1-D, elements [first, first + len(values)) of the flat tensor."""
        piece = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=values.dtype, device=values.device)
        found = boxes(shape, first, first + len(values))
        views = values.split([math.prod(sizes) for _, sizes in found]) if found else ()
        piece.offsets = [offsets for offsets, _ in found]
        piece.parts = [view.view(sizes) for view, (_, sizes) in zip(views, found, strict=True)]
        return piece

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.new_empty.default:  # how a copy in host memory begins, to which the stager then adds copies of the parts
            return cls(tuple(args[0].shape), torch.empty(0, dtype=args[0].dtype), 0)
        raise NotImplementedError(f"{func} of a piece of a ZeRO-3 tensor")

    def _chunk(self, number: int) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets[number]), self.parts[number].shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(n) for n in range(len(self.parts))]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(offsets)), WriteItemType.SHARD,
                tensor_data=TensorWriteData(self._chunk(n), TensorProperties.create_from_tensor(self.parts[n]), self.shape),
            ) for n, offsets in enumerate(self.offsets)
        ]  # fmt: skip

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.parts[self.offsets.index(tuple(index.offset or ()))]


def piece_of(parameter: Any, state: str | None = None) -> Piece:
    """A trained parameter's master weights, or one of its optimizer states, for a checkpoint."""
    return Piece(tuple(parameter.ds_shape), *fragment(parameter, state))


def as_forward(module: nn.Module, name: str, call: Any = None) -> None:
    """Makes a method of a module run as its forward pass, in which DeepSpeed gathers its weights. call: what is called in its place."""
    method, forward = getattr(module, name), module.forward

    def run(*args: Any) -> Any:
        module.forward = method  # type: ignore[method-assign]
        try:
            return (call or module)(*args)
        finally:
            module.forward = forward  # type: ignore[method-assign]

    setattr(module, name, run)
