"""Cuts long documents and packs short ones into blocks of `seq_len` tokens: pure functions of arrays.

Promises: no token is lost (`tokens in = tokens in blocks + dropped`), a document's parts stand in following blocks, and
blocks come in the order of their first document. Best-fit decreasing: the longest piece first, each into the fullest
block that still has room; a lookup is one bit operation, so a window costs about two microseconds a piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from raytune70b.blocks.manifest import block_schema


@dataclass(frozen=True)
class Piece:
    """Tokens that stand in one block together; spans are start, end, start, end, ... of the trained ones."""

    ids: np.ndarray
    spans: tuple[int, ...]

    @property
    def trained_tokens(self) -> int:
        return sum(self.spans[1::2]) - sum(self.spans[::2])


def document_pieces(ids: np.ndarray, seq_len: int, breaks: np.ndarray) -> list[Piece]:
    """A document, in pieces of at most `seq_len` tokens, every token but a piece's first one trained.

    `breaks[t]` is 2 where token t ends a section (a blank line), 1 where it ends a line, else 0: a cut falls behind the last
    section end in the second half of a block, else behind the last line end there, else where the block is full.
    """
    pieces, start = [], 0
    while start < len(ids):
        stop = min(start + seq_len, len(ids))
        if stop < len(ids):
            stop = _cut(breaks, start + seq_len // 2, stop)
            stop -= len(ids) - stop == 1  # a last token alone would be predicted by nothing
        pieces.append(Piece(ids[start:stop], (1, stop - start) if stop - start > 1 else ()))
        start = stop
    return pieces


def _cut(breaks: np.ndarray, low: int, high: int) -> int:
    window = breaks[low:high]
    for strength in (2, 1):
        found = np.flatnonzero(window >= strength)
        if len(found):
            return low + int(found[-1]) + 1
    return high


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Which pieces share a block: lists of indices, ascending, no list longer than `capacity` in sum.

    Raises ValueError for a piece longer than the capacity.
    """
    if len(lengths) and max(lengths) > capacity:
        raise ValueError(f"a piece of {max(lengths)} tokens in blocks of {capacity}")
    bins: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # room -> bins that have exactly so much
    rooms = 0  # bit r is set where with_room[r] is not empty
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    for index in order.tolist():
        length = lengths[index]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(index)
        left = room - length
        if left:
            with_room[left].append(chosen)
            rooms |= 1 << left
    return sorted((sorted(b) for b in bins), key=lambda b: b[0])


def blocks_table(pieces: Sequence[Piece], bins: list[list[int]], seq_len: int, pad_id: int, first_id: int = 0) -> pa.Table:
    """The blocks' rows, one a bin, in the layout of `raytune70b/blocks/manifest.py`."""
    ids = np.full((len(bins), seq_len), pad_id, np.int32)
    ends: list[list[int]] = []
    spans: list[list[int]] = []
    for row, members in enumerate(bins):
        position, row_ends, row_spans = 0, [], []
        for index in members:
            piece = pieces[index]
            ids[row, position : position + len(piece.ids)] = piece.ids
            row_spans += [position + s for s in piece.spans]
            position += len(piece.ids)
            row_ends.append(position)
        ends.append(row_ends)
        spans.append(row_spans)
    return pa.table(
        [
            pa.array(np.arange(first_id, first_id + len(bins))),
            pa.FixedSizeListArray.from_arrays(pa.array(ids.ravel()), seq_len),
            pa.array(ends, pa.list_(pa.int32())),
            pa.array(spans, pa.list_(pa.int32())),
        ],
        schema=block_schema(seq_len),
    )
