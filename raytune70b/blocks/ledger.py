"""The ledger: which blocks every optimizer step of the committed lineage consumed, and the proof that none is missing.

A segment is a Parquet file with one row a step, written beside each checkpoint before the checkpoint is published. It
names its parent segment, and its own name ends with the xxh3 of its bytes; a checkpoint's cursor names its newest
segment. So the newest checkpoint leads through a chain of hashes back to step 1, and segments of steps that were
replayed after a failure hang on no chain. Rows cost about 8 bytes a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from raytune70b.blocks.order import Ids, Order
from raytune70b.storage import Folder

FIELDS = pa.schema([
    ("step", pa.int64()), ("epoch", pa.int64()), ("block_ids", pa.list_(pa.int64())), ("loss", pa.float64()), ("grad_norm", pa.float64()),
    ("trained_tokens", pa.int64()), ("world_size", pa.int32()), ("skipped", pa.bool_()),
])  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One optimizer step, counted from 1."""

    step: int
    epoch: int
    block_ids: list[int]
    loss: float
    grad_norm: float
    trained_tokens: int
    world_size: int
    skipped: bool


def write_segment(folder: Folder, entries: list[Entry], parent: str | None) -> str:
    """Writes the steps since the parent segment; returns the segment's name, its digest included."""
    return write_rows(folder, pa.Table.from_pylist([asdict(e) for e in entries], schema=FIELDS), parent)


def write_rows(folder: Folder, rows: pa.Table, parent: str | None) -> str:
    """`write_segment` for rows in the layout of FIELDS."""
    sink = pa.BufferOutputStream()
    pq.write_table(rows.replace_schema_metadata({"parent": parent or ""}), sink, compression="zstd")
    content, steps = sink.getvalue().to_pybytes(), rows.column("step")
    name = f"steps-{steps[0].as_py():08d}-{steps[-1].as_py():08d}-{xxhash.xxh3_64_hexdigest(content)}.parquet"
    folder.write(name, content)
    return name


def read_segment(folder: Folder, name: str) -> tuple[pa.Table, str | None]:
    """(rows, the parent's name) of a segment. Raises ValueError unless its bytes are those its name promises."""
    content = folder.read(name)
    if not name.endswith(f"-{xxhash.xxh3_64_hexdigest(content)}.parquet"):
        raise ValueError(f"{folder.uri}/{name}: its content does not match the digest in its name")
    # In this thread: a pool that pyarrow starts for a process which ends at once may abort it ("terminate called without an active exception").
    table = pq.ParquetFile(pa.BufferReader(content)).read(use_threads=False)
    parent = (table.schema.metadata or {}).get(b"parent", b"").decode()
    return table, parent or None


def segments(folder: Folder, head: str | None) -> Iterator[tuple[str, pa.Table]]:
    """(name, rows) of every segment from the head back to step 1, one at a time. Raises ValueError or OSError where the chain is broken."""
    while head is not None:
        name = head
        table, head = read_segment(folder, name)
        yield name, table.cast(FIELDS)


def lineage(folder: Folder, head: str | None) -> tuple[pa.Table, list[str]]:
    """(every committed step from 1 to the head, the segments' names). Raises ValueError or OSError where the chain is broken."""
    found = [*segments(folder, head)][::-1]
    return pa.concat_tables([FIELDS.empty_table(), *(table for _, table in found)]), [name for name, _ in found]


@dataclass
class Proof:
    """What `verify` found; `faults` is empty when the promise held."""

    steps: int
    blocks: int
    epochs: int
    segments: int
    abandoned: int
    """Segments of replayed steps, on no chain."""
    world_sizes: dict[int, int]
    """Steps by number of workers."""
    skipped: list[int]
    faults: list[str]
    losses: dict[int, float] = field(default_factory=dict)
    """Loss by step, of those that were not skipped."""


def verify(folder: Folder, head: str | None, order: Order) -> Proof:
    """Compares the committed lineage with the order: no gap, no repeat, no block but the right one at every step.

    The chain is walked once, from its head back. Holds one segment, a byte a block for each epoch that the segment touches, and some numbers a step.
    """
    coverage, names, kept, wrong = Coverage(order), list[str](), [FIELDS.empty_table().drop(["block_ids"])], list[list[str]]()
    try:
        for name, table in segments(folder, head):
            names.append(name)
            ids, edges = _ids(table)
            wrong.append(_wrong_blocks(table.column("step").to_numpy(), ids, edges, order))
            coverage.add(table.column("step").to_numpy(), ids, edges)
            kept.append(table.drop(["block_ids"]))
    except (ValueError, OSError) as error:
        return Proof(0, 0, 0, 0, 0, {}, [], [f"the ledger's chain is broken: {error}"])
    rows = pa.concat_tables(kept[::-1])
    steps, skipped = rows.column("step").to_numpy(), rows.column("skipped").to_numpy()
    faults = _gaps(steps) + [fault for part in wrong[::-1] for fault in part] + coverage.faults()
    worlds, counts = np.unique(rows.column("world_size").to_numpy(), return_counts=True)
    return Proof(len(steps), coverage.blocks, -(-len(steps) // order.steps_per_epoch), len(names), len(folder.names()) - len(names),
                 {int(w): int(c) for w, c in zip(worlds, counts, strict=True)}, steps[skipped].tolist(), faults,
                 dict(zip(steps[~skipped].tolist(), rows.column("loss").to_numpy()[~skipped].tolist(), strict=True)))  # fmt: skip


def _ids(table: pa.Table) -> tuple[Ids, Ids]:
    """The block ids of a segment's steps, one after the other, and where each step's begin, with the end."""
    lists = table.column("block_ids").combine_chunks()
    return lists.flatten().to_numpy(), lists.offsets.to_numpy() - lists.offsets[0].as_py()


def _gaps(steps: Ids) -> list[str]:
    """The first step that is not where it should be."""
    wrong = np.flatnonzero(steps != np.arange(1, len(steps) + 1))
    return [f"step {wrong[0] + 1} is missing or repeated: the ledger has {steps[wrong[0]]} in its place"] if len(wrong) else []


def _wrong_blocks(steps: Ids, ids: Ids, edges: Ids, order: Order) -> list[str]:
    """The steps of a segment whose blocks are not those of the order, each in its stretch of consecutive steps."""
    faults, breaks = [], np.flatnonzero(np.diff(steps) != 1) + 1
    for first, stop in pairwise([0, *breaks.tolist(), len(steps)]):
        if first == stop or steps[first] < 1:
            continue
        expected = order.step_ids(int(steps[first]) - 1, int(steps[stop - 1]))
        for row, (number, right) in zip(range(first, stop), expected, strict=True):
            got = ids[edges[row] : edges[row + 1]]
            if not np.array_equal(right, got):
                faults.append(f"step {number + 1}: consumed blocks {got[:8]}, the order says {right[:8]}")
    return faults


class Coverage:
    """Counts how often each block was trained in each epoch. Whole epochs must hold every block once; an unfinished one none twice."""

    def __init__(self, order: Order):
        self._order = order
        self.blocks = 0
        self._seen: dict[int, NDArray[np.bool_]] = {}
        self._steps, self._repeats = Counter[int](), Counter[int]()
        self._faults: dict[int, list[str]] = {}

    def add(self, steps: Ids, ids: Ids, edges: Ids) -> None:
        """Takes a segment; they come from the newest to the oldest, so an epoch that lies behind this one is complete."""
        epochs = (steps - 1) // self._order.steps_per_epoch
        for epoch in np.unique(epochs).tolist():
            own = epochs == epoch
            self._steps[epoch] += int(own.sum())
            self._mark(epoch, ids[np.repeat(own, np.diff(edges))])
        for later in [e for e in self._seen if e > epochs.min()]:
            self._close(later)
        self.blocks += len(ids)

    def _mark(self, epoch: int, ids: Ids) -> None:
        seen = self._seen.setdefault(epoch, np.zeros(self._order.first_ids[-1], bool))
        different = np.unique(ids[(ids >= 0) & (ids < len(seen))])  # others are no blocks of this data set, and none of the order
        self._repeats[epoch] += len(ids) - len(different) + int(seen[different].sum())
        seen[different] = True

    def _close(self, epoch: int) -> None:
        missing, faults = self._order.blocks - int(self._seen.pop(epoch).sum()), self._faults.setdefault(epoch, [])
        if self._repeats[epoch]:
            faults.append(f"epoch {epoch + 1}: {self._repeats[epoch]} blocks were trained more than once")
        if self._steps[epoch] == self._order.steps_per_epoch and missing:
            faults.append(f"epoch {epoch + 1}: {missing} of {self._order.blocks} blocks were not trained")

    def faults(self) -> list[str]:
        """What is wrong, by epoch; call it once, at the end."""
        for epoch in [*self._seen]:
            self._close(epoch)
        return [fault for epoch in sorted(self._faults) for fault in self._faults[epoch]]
