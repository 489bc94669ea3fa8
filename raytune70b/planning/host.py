"""Host memory of one worker: its process, the checkpoint's copy, and what `model.offload` keeps there, tensor by tensor.

torch's allocator of pinned memory gives a tensor the next power of two. Its option `pinned_max_round_threshold_mb` would spare that, but
is not set: a block that it did not round is given again to any tensor of the same power of two, a larger one too (torch 2.13,
CachingHostAllocator.h, get_free_block). So what is pinned is planned as it is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from raytune70b.planning import memory
from raytune70b.planning.parameters import Tensor
from raytune70b.planning.workload import Workload

PROCESS = 4e9
"""Python, torch, CUDA's and NCCL's host memory, and blocks that are read ahead."""


def host_bytes(workload: Workload) -> float:
    """Bytes of one worker. The checkpoint's copy is pinned where it lies, without rounding."""
    states = memory.resting_bytes(workload)["optimizer states"]
    return PROCESS + workload.trained_shard * float(workload.weight_bytes) + states + offloaded_bytes(workload)


def pinned(size: float) -> float:
    """What a pinned tensor of this size takes."""
    return 2.0 ** math.ceil(math.log2(size)) if size > 0 else 0.0


def offloaded_bytes(workload: Workload) -> float:
    """What `model.offload` moves to host memory.

    FSDP2 pins parameters and gradients, and `CompactAdamW` the states that it sends to a GPU; states of parameters in host memory are
    plain memory.
    """
    if workload.offload == "none":
        return 0.0
    if workload.sharding == "zero3":
        return zero3_bytes(workload)
    if workload.offload == "optimizer":
        return sum(pinned(size) for t in workload.trained for size in memory.state_sizes(workload, t))
    elements = [workload.held(t.shape) for t in workload.trained]
    trained = sum(pinned(n * workload.weight_bytes) + pinned(n * workload.gradient_bytes) for n in elements)
    return trained + frozen_pinned(workload) + memory.resting_bytes(workload)["optimizer states"]


def frozen_pinned(workload: Workload) -> float:
    """The frozen base of an adapter run in pinned memory."""
    if workload.method == "full":
        return 0.0
    return sum(pinned(workload.held(t.shape) * size) for t in workload.model.tensors for size in memory.frozen_element_sizes(workload, t))


def zero3_bytes(workload: Workload) -> float:
    """DeepSpeed's masters and states in plain memory, and pinned: all gradients as one tensor, those of each sub-group once more for the
    step, and with `params` the weights, flat for each of the optimizer's groups; the pieces that became them stay with the allocator."""
    resting = memory.resting_bytes(workload)
    plain = workload.trained_shard * float(workload.weight_bytes) + resting["optimizer states"]
    gradients = pinned(resting["gradients"]) + sum(pinned(4.0 * n) for n in sub_groups(workload))
    if workload.offload != "params":
        return plain + gradients
    flat = sum(pinned(sum(group) * workload.compute_bytes) for group in optimizer_groups(workload))
    pieces = sum(pinned(workload.held(t.shape) * workload.compute_bytes) for t in workload.trained)
    return plain + gradients + flat + pieces + frozen_pinned(workload)


def optimizer_groups(workload: Workload) -> list[list[int]]:
    """Elements held of each tensor in the optimizer's groups: with weight decay, and vectors without."""

    def held(tensors: Iterable[Tensor]) -> list[int]:
        return [workload.held(t.shape) for t in tensors]

    groups = [held(t for t in workload.trained if len(t.shape) > 1), held(t for t in workload.trained if len(t.shape) <= 1)]
    return [group for group in groups if group]


def sub_groups(workload: Workload) -> Iterator[int]:
    """Elements of DeepSpeed's sub-groups: whole tensors of one of the optimizer's groups, until they are enough."""
    for group in optimizer_groups(workload):
        size = 0
        for held in group:
            size += held
            if size >= memory.ZERO3_SUB_GROUP:
                yield size
                size = 0
        if size:
            yield size
