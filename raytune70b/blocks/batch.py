"""From rows of token blocks to arrays for a model: targets, and positions that restart at each document.

| array        | shape [rows, seq_len]         | meaning                                                        |
|--------------|-------------------------------|----------------------------------------------------------------|
| input_ids    | int32                         | tokens; padding at the end                                     |
| labels       | int32                         | the token to predict at each position; IGNORED where untrained |
| position_ids | int32                         | 0 at a document's first token; padding counts as one document  |
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

IGNORED = -100
"""torch.nn.functional.cross_entropy's ignore_index."""

Arrays = dict[str, NDArray[np.int32]]


def decode(table: pa.Table, seq_len: int) -> Arrays:
    """The arrays of rows in the layout of blocks/manifest.py, read-only where no copy was needed."""
    shape = (table.num_rows, seq_len)
    flat = table.column("input_ids").combine_chunks().flatten().to_numpy(zero_copy_only=False).astype(np.int32, copy=False)
    ends, end_rows = _values(table, "document_ends")
    spans, span_rows = _values(table, "trained_spans")
    return {
        "input_ids": flat.reshape(shape),
        "labels": _labels(flat, spans + span_rows * seq_len).reshape(shape),
        "position_ids": _positions(flat.size, seq_len, (ends + end_rows * seq_len)[ends < seq_len]).reshape(shape),
    }


def _labels(flat: NDArray, spans: NDArray) -> NDArray[np.int32]:
    """Each place's next token where that is trained. `spans`: start, end, ... in the rows laid end to end, none touching a row's first token."""
    turns = np.zeros(flat.size + 1, np.int8)
    turns[spans[::2] - 1] += 1
    turns[spans[1::2] - 1] -= 1
    labels = np.full(flat.size, IGNORED, np.int32)
    np.copyto(labels[:-1], flat[1:], where=np.cumsum(turns[: flat.size - 1], dtype=np.int8).view(bool))
    return labels


def _positions(size: int, seq_len: int, ends: NDArray) -> NDArray[np.int32]:
    """Places since the last document's start; `ends` as places in the rows laid end to end."""
    starts = np.sort(np.concatenate((np.arange(0, size, seq_len), ends)))
    return np.arange(size, dtype=np.int32) - np.repeat(starts.astype(np.int32), np.diff(np.append(starts, size)))


def fillers(rows: int, seq_len: int) -> Arrays:
    """Rows of no weight, for workers that have no micro-batch left in a step's last round."""
    return {
        "input_ids": np.zeros((rows, seq_len), np.int32),
        "labels": np.full((rows, seq_len), IGNORED, np.int32),
        "position_ids": np.tile(np.arange(seq_len, dtype=np.int32), (rows, 1)),
    }


def _values(table: pa.Table, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The values of a list column, all rows' together, and the row of each."""
    column = table.column(name).combine_chunks()
    values = column.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    return values, np.repeat(np.arange(len(column)), np.diff(column.offsets.to_numpy()))
