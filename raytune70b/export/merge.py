"""Merges LoRA adapters into a base, in fp32, a few rows at a time, and says what rounding to 16 bits takes away.

A change smaller than half a unit in the last place of a 16-bit weight is lost when the sum is rounded, so merging in 16 bits
can undo a training run without an error (huggingface/peft#2368: 58 % of the entries unchanged). Here W + alpha / rank * B A is
summed in fp32 and rounded once; `Rounding` counts what that once costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from raytune70b.export.tensors import Source


@dataclass
class Rounding:
    """What rounding did to the adapters' change of the merged weights, summed over all of them."""

    entries: int = 0
    changed: int = 0
    """Entries that the adapters change at all."""
    lost: int = 0
    """Of those, entries that rounding puts back to the rounded base."""
    change_squares: float = 0.0
    error_squares: float = 0.0

    def add(self, base: Tensor, change: Tensor, rounded: Tensor) -> None:
        self.entries += base.numel()
        moved = change != 0
        self.changed += int(moved.sum())
        self.lost += int((moved & (rounded == base.to(rounded.dtype))).sum())
        self.change_squares += float(change.double().square().sum())
        self.error_squares += float((rounded.double() - (base.double() + change.double())).square().sum())

    @property
    def relative_error(self) -> float:
        """Norm of the rounding error over the norm of the adapters' change."""
        return (self.error_squares / self.change_squares) ** 0.5 if self.change_squares else 0.0

    @property
    def lost_share(self) -> float:
        """Share of the changed entries that are as if never trained."""
        return self.lost / self.changed if self.changed else 0.0


@dataclass(frozen=True)
class Adapter:
    """One layer's adapter: a [rank, in], b [out, rank], fp32."""

    a: Tensor
    b: Tensor
    scale: float

    def rows(self, start: int, stop: int) -> Tensor:
        """The change of the weight's rows, fp32."""
        return self.b[start:stop] @ self.a * self.scale


def merged(base: Source, adapter: Adapter, dtype: torch.dtype, rounding: Rounding, rest: Callable[[Tensor], Tensor]) -> Source:
    """The base with the adapter merged in, in `dtype`. `rest` turns rows of the file into the base as it is merged onto."""

    def pieces() -> Iterator[Tensor]:
        start = 0
        for rows in base.pieces():
            resting = rest(rows).float()
            change = adapter.rows(start, start + len(rows))
            rounded = (resting + change).to(dtype)
            rounding.add(resting, change, rounded)
            start += len(rows)
            yield rounded

    return Source(base.shape, dtype, pieces)


def cast(source: Source, dtype: torch.dtype, rest: Callable[[Tensor], Tensor] = lambda rows: rows) -> Source:
    """A source in another floating dtype; whole numbers stay as they are."""
    if not source.dtype.is_floating_point:
        return source
    return Source(source.shape, dtype, lambda: (rest(rows).to(dtype) for rows in source.pieces()))
