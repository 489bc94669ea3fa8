"""Ray Data carries the blocks: a Datasource whose read tasks yield, step by step, one equal Arrow block for each worker.

With `preserve_order`, `streaming_split(W, equal=False)` and a target block size just under the real one, Ray deals these
blocks strictly round robin, so worker k receives exactly `share(step's ids, k)`. That is how Ray 2.60 behaves and no
documented promise: the worker compares the ids of every step with the order (`BlockStream`), and Ray is pinned.

A read task covers the steps that begin in a few windows, and reads each row group of those windows once; a step that
straddles two tasks' windows costs a second read of the later window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raytune70b.blocks.batch import Arrays, decode, fillers
from raytune70b.blocks.manifest import DataError, Manifest
from raytune70b.blocks.order import Ids, Order, rounds, share
from raytune70b.storage import Folder, retried

ARRAYS = ("input_ids", "labels", "position_ids")


class OrderError(RuntimeError):
    """The stream delivered other blocks than the order says."""


@dataclass(frozen=True)
class Reader:
    """Reads blocks by id from one split of a data set. Picklable."""

    folder: Folder
    manifest: Manifest
    split: str

    def rows(self, ids: Ids) -> Arrays:
        """The arrays of these blocks, in this order. Each row group concerned is read once."""
        firsts, places = self._layout()
        group_of = np.searchsorted(firsts, ids, side="right") - 1
        arrays = {name: np.empty((len(ids), self.manifest.seq_len), np.int32) for name in ARRAYS}
        for group in np.unique(group_of):
            here = np.flatnonzero(group_of == group)
            table = self._row_group(*places[group]).take(pa.array(ids[here] - firsts[group]))
            if not np.array_equal(table.column("block_id").to_numpy(), ids[here]):
                raise DataError(f"{self.folder.uri}/{places[group][0]}: row group {group} holds other blocks than the manifest says; run jobs/prepare.py again")
            for name, values in decode(table, self.manifest.seq_len).items():
                arrays[name][here] = values
        return arrays

    def _layout(self) -> tuple[Ids, list[tuple[str, int]]]:
        """First block id and (file, row group inside it) of every row group."""
        files = self.manifest.splits[self.split]
        sizes = [rows for f in files for rows in f.row_groups]
        places = [(f.name, g) for f in files for g in range(len(f.row_groups))]
        return np.concatenate(([0], np.cumsum(sizes[:-1], dtype=np.int64))), places

    def _row_group(self, name: str, group: int) -> pa.Table:
        def read() -> pa.Table:
            with self.folder.open(name) as source:
                return pq.ParquetFile(source, page_checksum_verification=True).read_row_group(group)

        try:
            return retried(read)
        except OSError as error:
            raise DataError(f"{self.folder.uri}/{name}: row group {group} cannot be read ({error}); run jobs/prepare.py again") from error


def row_groups(manifest: Manifest, split: str) -> tuple[int, ...]:
    """Rows of every row group of a split, in file order."""
    return tuple(rows for f in manifest.splits[split] for rows in f.row_groups)


@dataclass(frozen=True)
class Feed:
    """What every worker of a group is fed: the optimizer steps [first_step, total_steps) for `world_size` workers."""

    reader: Reader
    order: Order
    micro_batch_size: int
    total_steps: int

    def block(self, step: int, ids: Ids, rank: int, world_size: int, rows: Arrays) -> pa.Table:
        """A worker's rows of one step; columns step, block_id and the arrays, fillers where ids run out."""
        turns = rounds(self.order.global_batch_size, self.micro_batch_size, world_size)
        own = share(ids, rank, world_size, self.micro_batch_size, turns)
        arrays = fillers(len(own), self.reader.manifest.seq_len)
        real = own >= 0
        where = {int(block): n for n, block in enumerate(ids)}
        picked = [where[int(block)] for block in own[real]]
        columns: dict[str, Any] = {"step": pa.array(np.full(len(own), step)), "block_id": pa.array(own)}
        for name in ARRAYS:
            arrays[name][real] = rows[name][picked]
            columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(arrays[name].reshape(-1)), self.reader.manifest.seq_len)
        return pa.table(columns)

    def block_bytes(self, world_size: int) -> int:
        """Bytes of one worker's block of a step."""
        rows = rounds(self.order.global_batch_size, self.micro_batch_size, world_size) * self.micro_batch_size
        return rows * (len(ARRAYS) * 4 * self.reader.manifest.seq_len + 16)

    def read(self, first: int, stop: int, world_size: int) -> Iterator[pa.Table]:
        """The blocks of the steps [first, stop), rank 0 to W - 1 within each step."""
        steps = list(self.order.step_ids(first, stop))
        rows = self.reader.rows(np.concatenate([ids for _, ids in steps]))
        offset = 0
        for step, ids in steps:
            part = {name: values[offset : offset + len(ids)] for name, values in rows.items()}
            offset += len(ids)
            for rank in range(world_size):
                yield self.block(step, ids, rank, world_size, part)

    def tasks(self, first_step: int) -> list[tuple[int, int]]:
        """Ranges of steps, one a read task: about a window of blocks each, never across an epoch's end."""
        a_window = self.order.window * max(self.order.row_groups, default=1)
        length = max(1, a_window // self.order.global_batch_size)
        per_epoch = self.order.steps_per_epoch
        cuts = {first_step, self.total_steps}
        cuts.update(range(first_step, self.total_steps, length))
        cuts.update(range(-(-first_step // per_epoch) * per_epoch, self.total_steps, per_epoch))
        edges = sorted(c for c in cuts if first_step <= c <= self.total_steps)
        return list(pairwise(edges))


def dataset(feed: Feed, first_step: int, world_size: int) -> Any:
    """The Ray Dataset of the remaining steps for this number of workers; split it with `split`."""
    import ray.data
    from ray.data import Datasource, ReadTask
    from ray.data.block import BlockMetadata

    class TokenBlocks(Datasource):
        def get_read_tasks(self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None) -> list[ReadTask]:
            rows = rounds(feed.order.global_batch_size, feed.micro_batch_size, world_size) * feed.micro_batch_size * world_size
            return [
                ReadTask(
                    partial(feed.read, start, stop, world_size),
                    BlockMetadata(num_rows=rows * (stop - start), size_bytes=feed.block_bytes(world_size) * world_size * (stop - start),
                                  input_files=None, exec_stats=None),
                )
                for start, stop in feed.tasks(first_step)
            ]  # fmt: skip

        def estimate_inmemory_data_size(self) -> int:
            return feed.block_bytes(world_size) * world_size * (feed.total_steps - first_step)

    context = ray.data.DataContext.get_current()
    context.target_max_block_size = max(1, int(0.9 * feed.block_bytes(world_size)))
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    found = ray.data.read_datasource(TokenBlocks(), override_num_blocks=len(feed.tasks(first_step)))
    found.set_name("train")
    return found


class BlockStream:
    """One worker's side: its micro-batches of every step, each checked against the order."""

    def __init__(self, shard: Any, feed: Feed, first_step: int, rank: int, world_size: int):
        self._shard, self._feed, self._first, self._rank, self._world = shard, feed, first_step, rank, world_size
        self._rounds = rounds(feed.order.global_batch_size, feed.micro_batch_size, world_size)

    def __iter__(self) -> Iterator[tuple[int, Ids, list[Arrays]]]:
        """(step counted from 0, the ids of the whole global batch, this worker's micro-batches). Raises OrderError."""
        micro = self._feed.micro_batch_size
        tables = iter(self._shard.iter_batches(batch_size=self._rounds * micro, batch_format="pyarrow", prefetch_batches=2))
        for step, ids in self._feed.order.step_ids(self._first, self._feed.total_steps):
            table = next(tables, None)
            if table is None:
                raise OrderError(f"the data ended before step {step + 1} of {self._feed.total_steps}")
            self._check(table, step, ids)
            arrays = {name: _matrix(table, name) for name in ARRAYS}
            yield step, ids, [{k: v[n : n + micro] for k, v in arrays.items()} for n in range(0, len(table), micro)]

    def _check(self, table: pa.Table, step: int, ids: Ids) -> None:
        expected = share(ids, self._rank, self._world, self._feed.micro_batch_size, self._rounds)
        got, steps = table.column("block_id").to_numpy(), table.column("step").to_numpy()
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
