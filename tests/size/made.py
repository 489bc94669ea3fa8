"""Data sets and runs of the size that this is made for, made up: nothing is tokenised or trained."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa

from raytune70b.blocks.ledger import FIELDS, write_rows
from raytune70b.blocks.manifest import BlockFile, Manifest
from raytune70b.blocks.order import Order
from raytune70b.blocks.stream import row_groups
from raytune70b.storage import Folder
from raytune70b.training.checkpoint import Cursor
from tests.conftest import publish

BLOCKS, ROW_GROUP, FILE_BLOCKS = 30_000_000, 64, 16_384
STEPS, GLOBAL_BATCH, WINDOW = 235_000, 128, 4


def manifest(blocks: int = BLOCKS, row_group: int = ROW_GROUP, file_blocks: int = FILE_BLOCKS, seq_len: int = 4096) -> Manifest:
    """The manifest of so many training blocks in files of `file_blocks`, the last of each as short as it must be."""
    files = []
    for number, first in enumerate(range(0, blocks, file_blocks)):
        rows = min(file_blocks, blocks - first)
        groups = (row_group,) * (rows // row_group) + ((rows % row_group,) if rows % row_group else ())
        files.append(BlockFile(f"train/part-{number:06d}.parquet", groups, 3000 * rows, 4000 * rows, f"{number:032x}"))
    return Manifest(seq_len, 32_000, 0, "none", "none", {"train": tuple(files), "validation": ()})


def order(blocks: Manifest, global_batch_size: int = GLOBAL_BATCH) -> Order:
    return Order(row_groups(blocks, "train"), 17, WINDOW, global_batch_size)


def losses(steps: int) -> np.ndarray:
    return 4.0 - np.arange(steps) / steps


def ledger(folder: Folder, by: Order, steps: int, every: int = 1000) -> str:
    """The ledger of a run of so many steps with a checkpoint every so many; returns its head."""
    head, ids, told = None, (ids for _, ids in by.step_ids(0, steps)), losses(steps)
    for first in range(0, steps, every):
        part = [next(ids) for _ in range(min(every, steps - first))]
        count, edges = len(part), np.concatenate(([0], np.cumsum([len(i) for i in part])))
        step = np.arange(first + 1, first + count + 1)
        columns = [
            step, (step - 1) // by.steps_per_epoch, pa.ListArray.from_arrays(edges.astype(np.int32), np.concatenate(part)), told[first : first + count],
            np.ones(count), np.full(count, 3000), np.full(count, 16, np.int32), np.zeros(count, bool),
        ]  # fmt: skip
        head = write_rows(folder, pa.Table.from_arrays([pa.array(c) for c in columns], schema=FIELDS), head)
    assert head is not None
    return head


def run(folder: Folder, blocks: Manifest, steps: int, global_batch_size: int = GLOBAL_BATCH, journal: bool = True) -> None:
    """A finished run: ledger, a checkpoint of its last step, and the steps in its journal."""
    head = ledger(folder / "ledger", order(blocks, global_batch_size), steps)
    fingerprint = {"data.shuffle_window": WINDOW, "train.global_batch_size": global_batch_size}
    publish(folder / "checkpoints", Cursor(step=steps, ledger=head, seed=17, data=blocks.digest, fingerprint=fingerprint))
    if journal:
        records = ({"kind": "step", "time": float(n), "launch": 1, "attempt": 1, "step": n + 1, "loss": loss, "seconds_by": {"data": 0.1, "compute": 1.0}} for n, loss in enumerate(losses(steps).tolist()))
        folder.write("journal.jsonl", b"".join(json.dumps(r).encode() + b"\n" for r in records))
