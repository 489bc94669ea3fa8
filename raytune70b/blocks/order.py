"""Which block is trained when: pure functions of the manifest's row counts, the seed and the number of workers.

An epoch shuffles the row groups, cuts that sequence into windows of a few row groups and shuffles the blocks inside each
window: reading stays local, and position p of an epoch is one block whatever the number of workers. Optimizer step s
takes the positions [s * G, (s + 1) * G) of its epoch, G the global batch size; the last step of an epoch takes what is
left, so each block is trained exactly once an epoch. The price: blocks further apart than a window never swap places
inside it, which a shuffle of the whole epoch would allow at one random read a block.

What concerns a whole epoch (`Epoch`) is made once an epoch; a step costs what its blocks cost, whatever the data set holds.

The shuffles sort by splitmix64 (Steele, Lea, Flood 2014) of seed, epoch and number instead of calling a random
generator, whose streams NumPy does not promise to keep between versions (NEP 19).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
    return ids[np.argsort(splitmix64(ids.astype(np.uint64) ^ state))]  # splitmix64 maps no two numbers to one, so there are no ties


@dataclass(frozen=True)
class Epoch:
    """Where the windows of an epoch lie: made once an epoch, in the time of one sort of the row groups."""

    groups: Ids
    """The row groups in the order of this epoch."""
    starts: Ids
    """The first position of each window, and the number of blocks at the end."""


@dataclass(frozen=True, eq=False)
class Order:
    """The order of one training set. `row_groups` holds the rows of every row group in file order (any sequence; kept as int64)."""

    row_groups: Ids
    seed: int
    window: int
    """Row groups in a window."""
    global_batch_size: int
    only: tuple[int, ...] | None = None
    """Numbers of the row groups to train on (`subset`); None: all."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "row_groups", np.asarray(self.row_groups, np.int64))

    @cached_property
    def chosen(self) -> Ids:
        """The numbers of the row groups that are trained on, ascending."""
        return np.arange(len(self.row_groups), dtype=np.int64) if self.only is None else np.array(self.only, dtype=np.int64)

    @cached_property
    def blocks(self) -> int:
        return int(self.row_groups[self.chosen].sum())

    @cached_property
    def steps_per_epoch(self) -> int:
        return -(-self.blocks // self.global_batch_size)

    @cached_property
    def window_steps(self) -> int:
        """Whole steps in the largest window, at least 1."""
        return max(1, self.window * int(self.row_groups.max(initial=1)) // self.global_batch_size)

    @cached_property
    def first_ids(self) -> Ids:
        """The id of each row group's first block, and the number of blocks at the end."""
        return starts_of(self.row_groups)

    @cached_property
    def _epochs(self) -> dict[int, Epoch]:
        return {}

    def epoch(self, number: int) -> Epoch:
        """The windows of an epoch; those of the newest two are kept, also when the order is pickled."""
        found = self._epochs.get(number)
        if found is None:
            groups = shuffled(self.chosen, self.seed, number)
            ends = starts_of(self.row_groups[groups])
            found = self._epochs[number] = Epoch(groups, np.append(ends[:-1 : self.window], ends[-1]))
            for old in [*self._epochs][:-2]:
                self._epochs.pop(old, None)
        return found

    def window_ids(self, epoch: int, number: int) -> Ids:
        """The block ids of a window in training order."""
        groups = self.epoch(epoch).groups[number * self.window : (number + 1) * self.window]
        ids = np.concatenate([np.arange(self.first_ids[g], self.first_ids[g + 1]) for g in groups])
        return shuffled(ids, self.seed, epoch, 1)

    def step_positions(self, step: int) -> tuple[int, int, int]:
        """(epoch, first position, end position) of the optimizer step with this number, counted from 0."""
        epoch, inside = divmod(step, self.steps_per_epoch)
        start = inside * self.global_batch_size
        return epoch, start, min(start + self.global_batch_size, self.blocks)

    def step_ids(self, start: int, stop: int) -> Iterator[tuple[int, Ids]]:
        """(step, block ids) of the optimizer steps [start, stop); each window is shuffled once, and none that no step touches."""
        while start < stop:
            epoch, position, _ = self.step_positions(start)
            starts, end = self.epoch(epoch).starts, min(stop, (epoch + 1) * self.steps_per_epoch)
            window = int(np.searchsorted(starts, position, side="right")) - 1
            ready = self.window_ids(epoch, window)[position - starts[window] :]
            for step in range(start, end):
                _, position, until = self.step_positions(step)
                while starts[window + 1] < until:
                    window += 1
                    ready = np.concatenate((ready, self.window_ids(epoch, window)))
                yield step, ready[: until - position]
                ready = ready[until - position :]
            start = end


def starts_of(sizes: Ids) -> Ids:
    """Where each of these stretches begins when they are laid end to end, and the end of the last."""
    return np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))


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


def subset(row_groups: ArrayLike, fraction: float, seed: int) -> tuple[int, ...]:
    """Numbers of whole row groups, drawn by `seed`, that together hold at least this fraction of the blocks, as few as that takes."""
    sizes = np.asarray(row_groups, np.int64)
    drawn = shuffled(np.arange(len(sizes), dtype=np.int64), seed, 2)
    held = np.cumsum(sizes[drawn])
    enough = int(np.searchsorted(held, fraction * held[-1] - 1e-9)) + 1
    return tuple(np.sort(drawn[:enough]).tolist())
