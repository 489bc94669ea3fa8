"""Which block is trained when: pure functions of the manifest's row counts, the seed and the number of workers.

An epoch shuffles the row groups, cuts that sequence into windows of a few row groups and shuffles the blocks inside each
window: reading stays local, and position p of an epoch is one block whatever the number of workers. Optimizer step s
takes the positions [s * G, (s + 1) * G) of its epoch, G the global batch size; the last step of an epoch takes what is
left, so each block is trained exactly once an epoch. The price: blocks further apart than a window never swap places
inside it, which a shuffle of the whole epoch would allow at one random read a block.

The shuffles sort by splitmix64 (Steele, Lea, Flood 2014) of seed, epoch and number instead of calling a random
generator, whose streams NumPy does not promise to keep between versions (NEP 19).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


def splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 finaliser, elementwise; sums wrap around."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def shuffled(ids: Ids, *keys: int) -> Ids:
    """`ids` (distinct) in an order that depends on the set of ids and on `keys` alone."""
    state = np.zeros(1, dtype=np.uint64)
    for key in keys:
        state = splitmix64(state ^ np.uint64(key))
    return ids[np.lexsort((ids, splitmix64(ids.astype(np.uint64) ^ state)))]


@dataclass(frozen=True)
class Order:
    """The order of one training set. `row_groups` holds the rows of every row group in file order."""

    row_groups: tuple[int, ...]
    seed: int
    window: int
    """Row groups in a window."""
    global_batch_size: int
    only: tuple[int, ...] | None = None
    """Numbers of the row groups to train on (`subset`); None: all."""

    @property
    def chosen(self) -> Ids:
        """The numbers of the row groups that are trained on, ascending."""
        return np.arange(len(self.row_groups), dtype=np.int64) if self.only is None else np.array(self.only, dtype=np.int64)

    @property
    def blocks(self) -> int:
        return sum(self.row_groups[g] for g in self.chosen)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.blocks // self.global_batch_size)

    @cached_property
    def first_ids(self) -> Ids:
        """The id of each row group's first block, and the number of blocks at the end."""
        return np.concatenate(([0], np.cumsum(self.row_groups, dtype=np.int64)))

    def windows(self, epoch: int) -> list[Ids]:
        """The row groups of each window of an epoch."""
        groups = shuffled(self.chosen, self.seed, epoch)
        return [groups[n : n + self.window] for n in range(0, len(groups), self.window)]

    def window_ids(self, epoch: int, groups: Ids) -> Ids:
        """The block ids of a window in training order."""
        ids = np.concatenate([np.arange(self.first_ids[g], self.first_ids[g + 1], dtype=np.int64) for g in groups])
        return shuffled(ids, self.seed, epoch, 1)

    def window_starts(self, epoch: int) -> Ids:
        """The first position of each window of an epoch, and the number of blocks at the end."""
        sizes = np.diff(self.first_ids)
        return np.concatenate(([0], np.cumsum([sizes[groups].sum() for groups in self.windows(epoch)], dtype=np.int64)))

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """The block ids at positions [start, stop) of an epoch; only the windows concerned are shuffled."""
        starts, windows = self.window_starts(epoch), self.windows(epoch)
        first = int(np.searchsorted(starts, start, side="right")) - 1
        last = int(np.searchsorted(starts, stop, side="left"))
        ids = [self.window_ids(epoch, windows[w]) for w in range(first, last)]
        return np.concatenate(ids)[start - starts[first] : stop - starts[first]] if ids else np.empty(0, np.int64)

    def step_positions(self, step: int) -> tuple[int, int, int]:
        """(epoch, first position, end position) of the optimizer step with this number, counted from 0."""
        epoch, inside = divmod(step, self.steps_per_epoch)
        start = inside * self.global_batch_size
        return epoch, start, min(start + self.global_batch_size, self.blocks)

    def step_ids(self, start: int, stop: int) -> Iterator[tuple[int, Ids]]:
        """(step, block ids) of the optimizer steps [start, stop), each window shuffled once."""
        step = start
        while step < stop:
            epoch, first, _ = self.step_positions(step)
            starts = self.window_starts(epoch)
            until = int(starts[np.searchsorted(starts, first, side="right")])  # the end of this step's window
            same = step + 1
            while same < stop and self.step_positions(same)[0] == epoch and self.step_positions(same)[1] < until:
                same += 1
            ids = self.ids(epoch, first, self.step_positions(same - 1)[2])
            for s in range(step, same):
                _, begin, end = self.step_positions(s)
                yield s, ids[begin - first : end - first]
            step = same


def rounds(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Micro-batches that every worker runs in a step."""
    return -(-(global_batch_size // micro_batch_size) // world_size)


def share(ids: Ids, rank: int, world_size: int, micro_batch_size: int, rounds: int) -> Ids:
    """A worker's part of a step, int64 [rounds * micro_batch_size]: micro-batch a goes to rank a % world_size; -1 is a filler of no weight."""
    own = np.full(rounds * micro_batch_size, -1, dtype=np.int64)
    for turn in range(rounds):
        start = (turn * world_size + rank) * micro_batch_size
        part = ids[start : start + micro_batch_size]
        own[turn * micro_batch_size : turn * micro_batch_size + len(part)] = part
    return own


def subset(row_groups: tuple[int, ...], fraction: float, seed: int) -> tuple[int, ...]:
    """Numbers of whole row groups, drawn by `seed`, that together hold at least this fraction of the blocks, as few as that takes."""
    drawn = shuffled(np.arange(len(row_groups), dtype=np.int64), seed, 2)
    held = np.cumsum([row_groups[g] for g in drawn])
    enough = int(np.searchsorted(held, fraction * held[-1] - 1e-9)) + 1
    return tuple(sorted(int(g) for g in drawn[:enough]))
