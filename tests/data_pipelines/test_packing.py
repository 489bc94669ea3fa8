"""Packing: no token lost, no block over-full, no label across a document's edge."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipelines.packing import Piece, best_fit_decreasing, blocks_table, document_pieces
from data_pipelines.stages import Slice, file_slices


def plain(ids: list[int]) -> Piece:
    return Piece(np.array(ids, np.int32), (1, len(ids)) if len(ids) > 1 else ())


@given(st.lists(st.integers(1, 64), max_size=80))
def test_every_piece_once_and_no_block_over_full(lengths: list[int]):
    bins = best_fit_decreasing(lengths, 64)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= 64 for b in bins)
    assert [b[0] for b in bins] == sorted(b[0] for b in bins)


def reference_best_fit(lengths: list[int], capacity: int) -> int:
    """Blocks that textbook best-fit decreasing needs, by a walk over all of them."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [r for r in rooms if r >= length]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - length)
        else:
            rooms.append(capacity - length)
    return len(rooms)


@given(st.lists(st.integers(1, 50), max_size=60))
def test_as_many_blocks_as_the_textbook(lengths: list[int]):
    assert len(best_fit_decreasing(lengths, 50)) == reference_best_fit(lengths, 50)


def test_fill_of_many_lengths():
    lengths = np.random.default_rng(0).integers(10, 2000, 5000).tolist()
    bins = best_fit_decreasing(lengths, 4096)
    assert sum(lengths) / (len(bins) * 4096) > 0.999


def test_a_piece_longer_than_a_block_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="65 tokens in blocks of 64"):
        best_fit_decreasing([3, 65], 64)


def test_no_and_one_document():
    assert best_fit_decreasing([], 8) == [] and blocks_table([], [], 8, 0).num_rows == 0
    table = blocks_table([plain([5, 6])], best_fit_decreasing([2], 8), 8, 0)
    assert table.to_pylist() == [{"block_id": 0, "input_ids": [5, 6, 0, 0, 0, 0, 0, 0], "document_ends": [2], "trained_spans": [1, 2]}]


def test_two_tokens_padded_to_eight_train_one():
    """axolotl PR 2227."""
    (row,) = blocks_table([plain([5, 6])], [[0]], 8, 0).to_pylist()
    assert sum(row["trained_spans"][1::2]) - sum(row["trained_spans"][::2]) == 1


def test_the_label_at_a_boundary_is_untrained():
    """MeetKai/functionary#265: ids 1,2,3 and 4,5,6 give 4 trained tokens, and nothing predicts 4 from 3."""
    (row,) = blocks_table([plain([1, 2, 3]), plain([4, 5, 6])], [[0, 1]], 6, 0).to_pylist()
    assert row["document_ends"] == [3, 6]
    trained = [t for a, b in zip(row["trained_spans"][::2], row["trained_spans"][1::2], strict=True) for t in range(a, b)]
    assert [row["input_ids"][t] for t in trained] == [2, 3, 5, 6]


def test_the_token_that_another_packer_loses():
    """huggingface/trl#4554: [[1,2,3,4],[5,6],[7,8,9],[10]] in width 3 loses 4."""
    documents = [[1, 2, 3, 4], [5, 6], [7, 8, 9], [10]]
    pieces = [p for d in documents for p in document_pieces(np.array(d, np.int32), 3, np.zeros(len(d), np.int8))]
    bins = best_fit_decreasing([len(p.ids) for p in pieces], 3)
    rows = blocks_table(pieces, bins, 3, 0).to_pylist()
    tokens = [t for row in rows for t in row["input_ids"][: row["document_ends"][-1]]]
    assert sorted(tokens) == list(range(1, 11))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=100), st.integers(8, 30))
def test_cut_documents_join_to_themselves(breaks: list[int], seq_len: int):
    ids = np.arange(len(breaks), dtype=np.int32)
    pieces = document_pieces(ids, seq_len, np.array(breaks, np.int8))
    assert np.array_equal(np.concatenate([p.ids for p in pieces]), ids)
    assert all(len(p.ids) <= seq_len for p in pieces) and all(len(p.ids) > 1 for p in pieces[:-1])
    assert len(breaks) == 1 or len(pieces[-1].ids) > 1
    for piece in pieces[:-1]:
        last = int(piece.ids[-1])
        if len(piece.ids) < seq_len:
            assert breaks[last] > 0 or last == len(breaks) - 3 or len(breaks) - 1 - last == 2
        assert len(piece.ids) >= seq_len // 2


@given(st.lists(st.tuples(st.text(min_size=1, max_size=3), st.integers(0, 20)), max_size=10, unique_by=lambda s: s[0]), st.integers(1, 9))
def test_files_hold_every_block_in_order(shards: list[tuple[str, int]], file_blocks: int):
    files = file_slices(shards, file_blocks)
    sizes = [sum(s.stop - s.start for s in f) for f in files]
    assert all(s == file_blocks for s in sizes[:-1]) and all(0 < s <= file_blocks for s in sizes[-1:])
    flat = [(s.key, n) for f in files for s in f for n in range(s.start, s.stop)]
    assert flat == [(key, n) for key, blocks in shards for n in range(blocks)]
    assert all(isinstance(s, Slice) for f in files for s in f)
