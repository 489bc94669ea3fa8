"""The copy of a state in host memory, during which, and only then, a save stops training.

torch's stager makes the copy (pinned on a GPU) at the first save. Later saves fill it again, tensor by tensor: staging anew would find
the same buffers but takes apart and rebuilds every DTensor around them, which doubled the stall on CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from raytune70b.training.state import State, local_tensor


class HostCopy:
    """A state of one structure (names, shapes, sharding), copied to host memory as often as wanted into the same buffers."""

    def __init__(self, device_type: str):
        self._on_gpu = device_type == "cuda"
        self._stager = DefaultStager(
            StagingOptions(use_pinned_memory=self._on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=self._on_gpu)
        )
        self._copy: State | None = None

    @torch.no_grad()
    def of(self, state: State) -> State:
        """The copy, with the values that `state` has now; valid until the next call."""
        if self._copy is None or _shapes(self._copy) != _shapes(state):
            staged = self._stager.stage(state)
            assert isinstance(staged, dict)  # a future only with use_async_staging
            self._copy = staged
            return staged
        torch._foreach_copy_(list(_pieces(self._copy)), list(_pieces(state)), non_blocking=self._on_gpu)
        if self._on_gpu:
            torch.cuda.synchronize()
        return self._copy

    def close(self) -> None:
        """Lets the buffers go."""
        self._copy = None
        self._stager.close()


def _pieces(state: State) -> Iterator[Tensor]:
    """What this worker holds of every tensor, in the order of the names."""
    for _, named in sorted(state.items()):
        for _, tensor in sorted(named.items()):
            yield from getattr(tensor, "parts", None) or [local_tensor(tensor)]


def _shapes(state: State) -> list[tuple[str, str, torch.Size, list[torch.Size]]]:
    return [
        (part, name, tensor.shape, [p.shape for p in _pieces({part: {name: tensor}})])
        for part, named in sorted(state.items()) for name, tensor in sorted(named.items())
    ]  # fmt: skip
