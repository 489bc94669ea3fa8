"""From rows of token blocks to arrays for a model: targets, and positions that restart at each document.

| array        | shape [rows, seq_len]         | meaning                                                        |
|--------------|-------------------------------|----------------------------------------------------------------|
| input_ids    | int32                         | tokens; padding at the end                                     |
| labels       | int32                         | the token to predict at each position; IGNORED where untrained |
| position_ids | int32                         | 0 at a document's first token; padding counts as one document  |
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

IGNORED = -100
"""torch.nn.functional.cross_entropy's ignore_index."""

Arrays = dict[str, NDArray[np.int32]]


def decode(table: pa.Table, seq_len: int) -> Arrays:
    """The arrays of rows in the layout of blocks/manifest.py."""
    rows = table.num_rows
    input_ids = _flat(table, "input_ids").reshape(rows, seq_len).astype(np.int32)
    labels = np.full((rows, seq_len), IGNORED, dtype=np.int32)
    position_ids = np.empty((rows, seq_len), dtype=np.int32)
    ends, spans = _lists(table, "document_ends"), _lists(table, "trained_spans")
    steps = np.arange(seq_len, dtype=np.int32)
    for row in range(rows):
        starts = np.concatenate(([0], ends[row])).astype(np.int32)
        starts = starts[starts < seq_len]
        position_ids[row] = steps - np.repeat(starts, np.diff(np.append(starts, seq_len)))
        for start, end in spans[row].reshape(-1, 2):
            labels[row, start - 1 : end - 1] = input_ids[row, start:end]
    return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}


def fillers(rows: int, seq_len: int) -> Arrays:
    """Rows of no weight, for workers that have no micro-batch left in a step's last round."""
    return {
        "input_ids": np.zeros((rows, seq_len), np.int32),
        "labels": np.full((rows, seq_len), IGNORED, np.int32),
        "position_ids": np.tile(np.arange(seq_len, dtype=np.int32), (rows, 1)),
    }


def _flat(table: pa.Table, name: str) -> NDArray:
    column = table.column(name).combine_chunks()
    return column.flatten().to_numpy(zero_copy_only=False)


def _lists(table: pa.Table, name: str) -> list[NDArray]:
    column = table.column(name).combine_chunks()
    values, offsets = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    return [values[a:b] for a, b in pairwise(offsets)]
