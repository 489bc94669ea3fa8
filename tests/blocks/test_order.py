import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytune70b.blocks.order import Order, rounds, share

groups = st.lists(st.integers(1, 9), min_size=1, max_size=12).map(tuple)


@given(groups, st.integers(0, 2**62), st.integers(1, 5), st.integers(1, 20), st.integers(0, 3))
@settings(max_examples=150)
def test_every_block_once_an_epoch(row_groups, seed, window, batch, epoch):
    order = Order(row_groups, seed, window, batch)
    first = epoch * order.steps_per_epoch
    ids = np.concatenate([ids for _, ids in order.step_ids(first, first + order.steps_per_epoch)])
    assert sorted(ids) == list(range(order.blocks))


@given(groups, st.integers(0, 99), st.integers(1, 5), st.integers(1, 20), st.data())
@settings(max_examples=100)
def test_any_start_continues_the_same_sequence(row_groups, seed, window, batch, data):
    order = Order(row_groups, seed, window, batch)
    total = 3 * order.steps_per_epoch
    whole = {step: list(ids) for step, ids in order.step_ids(0, total)}
    start = data.draw(st.integers(0, total))
    assert {step: list(ids) for step, ids in order.step_ids(start, total)} == {s: whole[s] for s in range(start, total)}


@given(st.integers(1, 7), st.integers(1, 4), st.integers(1, 8), st.integers(0, 28))
@settings(max_examples=200)
def test_shares_deal_the_step_whatever_the_workers(world, micro, micros, missing):
    batch = micro * micros
    ids = np.arange(100, 100 + max(1, batch - missing), dtype=np.int64)
    turns = rounds(batch, micro, world)
    parts = [share(ids, rank, world, micro, turns) for rank in range(world)]
    assert all(len(p) == turns * micro for p in parts)
    dealt = np.concatenate(parts)
    assert sorted(dealt[dealt >= 0]) == list(ids)
    micro_batches = [parts[a % world][(a // world) * micro : (a // world + 1) * micro] for a in range(micros)]
    assert np.concatenate(micro_batches)[: len(ids)].tolist() == ids.tolist()


def test_epochs_differ_and_are_reproducible():
    order = Order((8,) * 10, 3, 2, 16)
    first, second = order.ids(0, 0, 80), order.ids(1, 0, 80)
    assert not np.array_equal(first, second)
    assert np.array_equal(first, Order((8,) * 10, 3, 2, 16).ids(0, 0, 80))
    assert not np.array_equal(first, Order((8,) * 10, 4, 2, 16).ids(0, 0, 80))


def test_the_order_never_changes_between_versions():
    """Resuming a run needs the same order for ever; a deliberate change of this test ends every open run."""
    assert Order((5, 5, 5), 17, 2, 4).ids(0, 0, 15).tolist() == [11, 10, 3, 2, 1, 4, 12, 0, 13, 14, 8, 9, 7, 6, 5]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_seeded_seed_plus_epoch_resume(world):
    """modelscope/ms-swift#10050: 10 rows, stop after 4 rows of epoch 1, resume: every row once."""
    order = Order((10,), 42, 1, 2)
    taken = [i for _, ids in order.step_ids(5, 7) for i in ids] + [i for _, ids in order.step_ids(7, 10) for i in ids]
    assert sorted(taken) == list(range(10))
