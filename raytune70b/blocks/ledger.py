"""The ledger: which blocks every optimizer step of the committed lineage consumed, and the proof that none is missing.

A segment is a Parquet file with one row a step, written beside each checkpoint before the checkpoint is published. It
names its parent segment, and its own name ends with the xxh3 of its bytes; a checkpoint's cursor names its newest
segment. So the newest checkpoint leads through a chain of hashes back to step 1, and segments of steps that were
replayed after a failure hang on no chain. Rows cost about 8 bytes a block.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from raytune70b.blocks.order import Order
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
    meta = {"parent": parent or ""}
    table = pa.Table.from_pylist([asdict(e) for e in entries], schema=FIELDS.with_metadata(meta))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    content = sink.getvalue().to_pybytes()
    name = f"steps-{entries[0].step:08d}-{entries[-1].step:08d}-{xxhash.xxh3_64_hexdigest(content)}.parquet"
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


def lineage(folder: Folder, head: str | None) -> tuple[pa.Table, list[str]]:
    """(every committed step from 1 to the head, the segments' names). Raises ValueError or OSError where the chain is broken."""
    tables, names = [FIELDS.empty_table()], []
    while head is not None:
        names.append(head)
        table, head = read_segment(folder, head)
        tables.append(table.cast(FIELDS))
    return pa.concat_tables(reversed(tables)), names[::-1]


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


def verify(folder: Folder, head: str | None, order: Order) -> Proof:
    """Compares the committed lineage with the order: no gap, no repeat, no block but the right one at every step."""
    faults: list[str] = []
    try:
        table, names = lineage(folder, head)
    except (ValueError, OSError) as error:
        return Proof(0, 0, 0, 0, 0, {}, [], [f"the ledger's chain is broken: {error}"])
    steps = table.column("step").to_pylist()
    if steps != list(range(1, len(steps) + 1)):
        wrong = next(n for n, step in enumerate(steps, 1) if n != step)
        faults.append(f"step {wrong} is missing or repeated: the ledger has {steps[wrong - 1]} in its place")
    ids = table.column("block_ids").combine_chunks()
    seen: list[np.ndarray] = [ids[n].values.to_numpy() for n in range(len(ids))]
    for (number, expected), got in zip(order.step_ids(0, len(seen)), seen, strict=False):
        if not np.array_equal(expected, got):
            faults.append(f"step {number + 1}: consumed blocks {got[:8]}, the order says {expected[:8]}")
    faults += _epoch_faults(seen, order)
    worlds, counts = np.unique(table.column("world_size").to_numpy(), return_counts=True)
    skipped = [s for s, bad in zip(steps, table.column("skipped").to_pylist(), strict=True) if bad]
    return Proof(len(steps), sum(map(len, seen)), -(-len(steps) // order.steps_per_epoch), len(names), len(folder.names()) - len(names),
                 {int(w): int(c) for w, c in zip(worlds, counts, strict=True)}, skipped, faults)  # fmt: skip


def _epoch_faults(seen: list[np.ndarray], order: Order) -> list[str]:
    """Whole epochs hold each block exactly once; the last, perhaps unfinished one holds none twice."""
    faults = []
    for epoch, start in enumerate(range(0, len(seen), order.steps_per_epoch)):
        part = seen[start : start + order.steps_per_epoch]
        ids = np.concatenate(part)
        if len(np.unique(ids)) != len(ids):
            faults.append(f"epoch {epoch + 1}: {len(ids) - len(np.unique(ids))} blocks were trained more than once")
        if len(part) == order.steps_per_epoch and len(np.unique(ids)) != order.blocks:
            faults.append(f"epoch {epoch + 1}: {order.blocks - len(np.unique(ids))} of {order.blocks} blocks were not trained")
    return faults
