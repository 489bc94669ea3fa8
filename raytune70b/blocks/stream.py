"""Ray Data carries the blocks: a Datasource whose read tasks yield, turn by turn, one equal Arrow block for each worker.

With `preserve_order`, `streaming_split(W, equal=False)` and a target block size just under the real one, Ray deals these
blocks strictly round robin, so worker k receives exactly `share(step's ids, k)` of each step. That is how Ray 2.60 behaves
and no documented promise: the worker compares the ids of every step with the order (`BlockStream`), and Ray is pinned.

A block holds a worker's rows of some steps, about `BLOCK_BYTES`, because Ray spends milliseconds on a block whatever its
size. A read task goes along its steps about a window of blocks at a time, and reads each row group concerned once; a window
that two such stretches touch is read twice. Ray makes all read tasks before the first step, so there are no more than
`READ_TASKS` of them, however long the run, and each is a range of steps: what they share, manifest and order, is put into
the object store once. So a run of 30 million blocks starts, and starts again after a fault, like one of 300,000.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raytune70b.blocks.batch import Arrays, decode, fillers
from raytune70b.blocks.manifest import DataError, Manifest
from raytune70b.blocks.order import Ids, Order, rounds, share, starts_of
from raytune70b.storage import Folder, retried

if TYPE_CHECKING:
    from ray.data import ReadTask

T = TypeVar("T")
ARRAYS = ("input_ids", "labels", "position_ids")
BLOCK_BYTES = 4 << 20
TASK_BYTES = 64 << 20
"""A read task delivers about so much or more, from at most 16 windows: tasks of one block each halve the speed."""
READ_TASKS = 256
READERS = 4
"""Read tasks at a time: the first in order feeds the workers, by some 40 M tokens/s, and the others fill their buffers meanwhile. They reserve
no CPU, or workers that hold all of a cluster's CPUs would wait for them for ever; a small cluster gets one a CPU."""
NO_STEP = -1
"""The step of rows that fill a run's last blocks, to make all blocks equal."""


class OrderError(RuntimeError):
    """The stream delivered other blocks than the order says."""


@dataclass(frozen=True)
class Reader:
    """Reads blocks by id from one split of a data set. Picklable."""

    folder: Folder
    manifest: Manifest
    split: str

    @cached_property
    def _first_ids(self) -> Ids:
        """The id of each row group's first block, and the number of blocks at the end."""
        return starts_of(row_groups(self.manifest, self.split))

    @cached_property
    def _first_groups(self) -> Ids:
        """The number of each file's first row group, and the number of row groups at the end."""
        return starts_of(np.array([len(f.row_groups) for f in self.manifest.splits[self.split]], np.int64))

    def rows(self, ids: Ids) -> Arrays:
        """The arrays of these blocks, in this order. Each row group concerned is read once."""
        group_of = np.searchsorted(self._first_ids, ids, side="right") - 1
        arrays = {name: np.empty((len(ids), self.manifest.seq_len), np.int32) for name in ARRAYS}
        for group in np.unique(group_of):
            here = np.flatnonzero(group_of == group)
            table = self._row_group(int(group)).take(pa.array(ids[here] - self._first_ids[group]))
            if not np.array_equal(table.column("block_id").to_numpy(), ids[here]):
                raise DataError(f"{self._place(int(group))} holds other blocks than the manifest says; run jobs/prepare.py again")
            for name, values in decode(table, self.manifest.seq_len).items():
                arrays[name][here] = values
        return arrays

    def _file(self, group: int) -> tuple[str, int]:
        """The file that holds a row group of the split, and the row group's number inside it."""
        file = int(np.searchsorted(self._first_groups, group, side="right")) - 1
        return self.manifest.splits[self.split][file].name, group - int(self._first_groups[file])

    def _place(self, group: int) -> str:
        name, inside = self._file(group)
        return f"{self.folder.uri}/{name}: row group {inside}"

    def _row_group(self, group: int) -> pa.Table:
        name, inside = self._file(group)

        def read() -> pa.Table:
            with self.folder.open(name) as source:
                return pq.ParquetFile(source, page_checksum_verification=True).read_row_group(inside)

        try:
            return retried(read)
        except OSError as error:
            raise DataError(f"{self._place(group)} cannot be read ({error}); run jobs/prepare.py again") from error


def row_groups(manifest: Manifest, split: str) -> Ids:
    """Rows of every row group of a split, in file order."""
    return np.fromiter(chain.from_iterable(f.row_groups for f in manifest.splits[split]), np.int64)


@dataclass(frozen=True)
class Feed:
    """What every worker of a group is fed: the optimizer steps [first_step, total_steps) for `world_size` workers."""

    reader: Reader
    order: Order
    micro_batch_size: int
    total_steps: int

    def share_rows(self, world_size: int) -> int:
        """Rows of one worker in a step."""
        return rounds(self.order.global_batch_size, self.micro_batch_size, world_size) * self.micro_batch_size

    def row_bytes(self) -> int:
        return len(ARRAYS) * 4 * self.reader.manifest.seq_len + 16

    def steps_per_block(self, world_size: int) -> int:
        """Steps whose rows one worker receives at once: about BLOCK_BYTES, and no more than a window's."""
        fitting = BLOCK_BYTES // (self.share_rows(world_size) * self.row_bytes())
        return max(1, min(fitting, self.order.window_steps))

    def block_bytes(self, world_size: int) -> int:
        """Bytes of every block."""
        return self.steps_per_block(world_size) * self.share_rows(world_size) * self.row_bytes()

    def block(self, steps: list[tuple[int, Ids]], first: int, rank: int, world_size: int, rows: Arrays) -> pa.Table:
        """A worker's rows of some steps, whose global batches lie in `rows` from `first` on; columns step, block_id and the arrays."""
        count, turns = self.share_rows(world_size), rounds(self.order.global_batch_size, self.micro_batch_size, world_size)
        length = self.steps_per_block(world_size) * count
        step_of, ids, places = np.full(length, NO_STEP), np.full(length, -1), np.full(length, -1)
        for start, (step, batch) in zip(range(0, length, count), steps, strict=False):
            own = share(np.arange(len(batch)), rank, world_size, self.micro_batch_size, turns)
            here = slice(start, start + count)
            step_of[here], ids[here], places[here] = step, np.where(own < 0, -1, batch[own]), np.where(own < 0, -1, own + first)
            first += len(batch)
        columns: dict[str, Any] = {"step": pa.array(step_of), "block_id": pa.array(ids)}
        for name, values in self._picked(rows, places).items():
            columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), self.reader.manifest.seq_len)
        return pa.table(columns)

    def _picked(self, rows: Arrays, places: Ids) -> Arrays:
        """The rows at these places; fillers at places below 0."""
        real = places >= 0
        if real.all():
            return {name: rows[name][places] for name in ARRAYS}
        arrays = fillers(len(places), self.reader.manifest.seq_len)
        for name in ARRAYS:
            arrays[name][real] = rows[name][places[real]]
        return arrays

    def read(self, first: int, stop: int, world_size: int) -> Iterator[pa.Table]:
        """The blocks of the steps [first, stop), rank 0 to W - 1 for each turn of `steps_per_block` steps. Holds about a window of rows."""
        of_block, at_once = self.steps_per_block(world_size), self._steps_at_once(world_size)
        for begin in range(first, stop, at_once):
            steps = list(self.order.step_ids(begin, min(begin + at_once, stop)))
            rows, offset = self.reader.rows(np.concatenate([ids for _, ids in steps])), 0
            for turn in batched(steps, of_block):
                for rank in range(world_size):
                    yield self.block(turn, offset, rank, world_size, rows)
                offset += sum(len(ids) for _, ids in turn)

    def _steps_at_once(self, world_size: int) -> int:
        """Steps whose rows are read together: about a window, in whole blocks."""
        of_block = self.steps_per_block(world_size)
        return self.order.window_steps // of_block * of_block

    def tasks(self, first_step: int, world_size: int) -> list[tuple[int, int]]:
        """Ranges of steps, one a read task; whole blocks, but for the last one's end."""
        at_once = self._steps_at_once(world_size)
        stretches = -(-(self.total_steps - first_step) // at_once)
        worth = min(16, TASK_BYTES // (at_once * self.share_rows(world_size) * world_size * self.row_bytes()))
        edges = range(first_step, self.total_steps, at_once * max(1, worth, -(-stretches // READ_TASKS)))
        return list(pairwise([*edges, self.total_steps]))


def batched(items: list[T], size: int) -> Iterator[list[T]]:
    """The items in lists of `size`, the last one shorter."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def read_tasks(shared: Any, feed: Feed, first_step: int, world_size: int) -> list[ReadTask]:
    """Ray Data's read tasks for the remaining steps. `shared` is the feed in the object store: a task carries where it lies and a range of steps."""
    from ray.data import ReadTask
    from ray.data.block import BlockMetadata

    of_block, rows_of_step, row_bytes = feed.steps_per_block(world_size), feed.share_rows(world_size) * world_size, feed.row_bytes()

    def metadata(steps: int) -> BlockMetadata:
        rows = -(-steps // of_block) * of_block * rows_of_step
        return BlockMetadata(num_rows=rows, size_bytes=rows * row_bytes, input_files=None, exec_stats=None)

    return [ReadTask(partial(read_shared, shared, start, stop, world_size), metadata(stop - start)) for start, stop in feed.tasks(first_step, world_size)]


def read_shared(shared: Any, start: int, stop: int, world_size: int) -> Iterator[pa.Table]:
    """What a read task runs."""
    yield from fetched(shared).read(start, stop, world_size)


@lru_cache(maxsize=1)
def fetched(shared: Any) -> Feed:
    """The feed out of the object store, once a process: its arrays are not copied, and it keeps what it computes for the next task."""
    import ray

    return ray.get(shared)


def dataset(feed: Feed, first_step: int, world_size: int) -> Any:
    """The Ray Dataset of the remaining steps for this number of workers; split it with `split`."""
    import ray.data
    from ray.data import Datasource

    class TokenBlocks(Datasource):
        def get_read_tasks(self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None) -> list[ReadTask]:
            return tasks

        def estimate_inmemory_data_size(self) -> int:
            return size

    feed.order.epoch(feed.order.step_positions(first_step)[0])  # so that no task has to sort the row groups
    tasks = read_tasks(ray.put(feed), feed, first_step, world_size)
    size = sum(t.metadata.size_bytes or 0 for t in tasks)
    context = ray.data.DataContext.get_current()
    context.target_max_block_size = max(1, int(0.9 * feed.block_bytes(world_size)))
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    readers = max(1, min(READERS, int(ray.cluster_resources().get("CPU", 1))))
    found = ray.data.read_datasource(TokenBlocks(), override_num_blocks=len(tasks), concurrency=readers, num_cpus=0)
    found.set_name("train")
    return found


class BlockStream:
    """One worker's side: its micro-batches of every step, each checked against the order."""

    def __init__(self, shard: Any, feed: Feed, first_step: int, rank: int, world_size: int):
        self._shard, self._feed, self._first, self._rank, self._world = shard, feed, first_step, rank, world_size
        self._rows = feed.share_rows(world_size)

    def __iter__(self) -> Iterator[tuple[int, Ids, list[Arrays]]]:
        """(step counted from 0, the ids of the whole global batch, this worker's micro-batches). Raises OrderError."""
        micro, feed = self._feed.micro_batch_size, self._feed
        parts = self._parts()
        for step, ids in feed.order.step_ids(self._first, feed.total_steps):
            part = next(parts, None)
            if part is None:
                raise OrderError(f"the data ended before step {step + 1} of {feed.total_steps}")
            self._check(part, step, ids)
            yield step, ids, [{k: part[k][n : n + micro] for k in ARRAYS} for n in range(0, self._rows, micro)]

    def _parts(self) -> Iterator[Arrays]:
        """The columns of each step's rows, as they were received."""
        for table in self._shard.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=2):
            columns = {name: _matrix(table, name) for name in ARRAYS}
            columns |= {name: table.column(name).to_numpy() for name in ("step", "block_id")}
            for start in range(0, len(table), self._rows):
                if columns["step"][start] != NO_STEP:
                    yield {name: values[start : start + self._rows] for name, values in columns.items()}

    def _check(self, part: Arrays, step: int, ids: Ids) -> None:
        expected = share(ids, self._rank, self._world, self._feed.micro_batch_size, self._rows // self._feed.micro_batch_size)
        got, steps = part["block_id"], part["step"]
        if not np.array_equal(got, expected) or (steps != step).any():
            raise OrderError(f"step {step + 1}, rank {self._rank} of {self._world}: received blocks {got[:8]} of step {steps[:1] + 1}, the order says {expected[:8]}")


def _matrix(table: pa.Table, name: str) -> NDArray[np.int32]:
    return table.column(name).combine_chunks().flatten().to_numpy().reshape(table.num_rows, -1)


def validation_batches(reader: Reader, max_blocks: int | None, micro_batch_size: int, rank: int, world_size: int) -> Iterator[Arrays]:
    """This worker's micro-batches of a split, every worker as many: micro-batch a goes to rank a % world_size, as in training.

    Read in pieces of about a thousand rows a worker, straight from the files: no Ray Data execution for each validation.
    """
    count = reader.manifest.rows(reader.split)
    ids = np.arange(min(count, max_blocks or count), dtype=np.int64)
    turns = max(1, 1024 // micro_batch_size)
    for piece in np.array_split(ids, max(1, -(-len(ids) // (turns * micro_batch_size * world_size)))):
        size = -(-len(piece) // (micro_batch_size * world_size))
        own = share(piece, rank, world_size, micro_batch_size, size)
        arrays, real = fillers(len(own), reader.manifest.seq_len), own >= 0
        for name, values in reader.rows(own[real]).items():
            arrays[name][real] = values
        for start in range(0, len(own), micro_batch_size):
            yield {name: values[start : start + micro_batch_size] for name, values in arrays.items()}
