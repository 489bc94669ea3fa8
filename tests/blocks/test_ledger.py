import pyarrow.parquet as pq
import pytest

from raytune70b.blocks.ledger import Entry, lineage, verify, write_segment
from raytune70b.blocks.order import Order
from raytune70b.storage import Folder

ORDER = Order((6, 6, 6, 5), 3, 2, 4)


def entries(first, last, drop=None, swap=None):
    ids = {step + 1: block_ids.tolist() for step, block_ids in ORDER.step_ids(0, last)}
    if swap:
        ids[swap[0]], ids[swap[1]] = ids[swap[1]], ids[swap[0]]
    return [Entry(s, 0, ids[s], 1.0, 1.0, 10, 2, False) for s in range(first, last + 1) if s != drop]


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "ledger").make()


def chain(folder, *parts):
    head = None
    for part in parts:
        head = write_segment(folder, part, head)
    return head


def test_a_replayed_step_hangs_on_no_chain(folder):
    first = write_segment(folder, entries(1, 4), None)
    write_segment(folder, entries(5, 7), first)  # lost: the worker died before its checkpoint was published
    head = write_segment(folder, entries(5, 9), first)
    proof = verify(folder, head, ORDER)
    assert (proof.faults, proof.steps, proof.blocks, proof.segments, proof.abandoned) == ([], 9, 35, 2, 1)
    assert lineage(folder, head)[0].column("step").to_pylist() == list(range(1, 10))


@pytest.mark.parametrize(
    ("parts", "word"),
    [
        ((lambda: entries(1, 4), lambda: entries(6, 8)), "step 5 is missing"),
        ((lambda: entries(1, 4), lambda: entries(4, 8)), "step 5 is missing or repeated"),
        ((lambda: entries(1, 8, drop=3),), "step 3 is missing"),
        ((lambda: entries(1, 8, swap=(2, 3)),), "step 2: consumed blocks"),
    ],
)
def test_gaps_repeats_and_wrong_blocks_are_found(folder, parts, word):
    assert any(word in fault for fault in verify(folder, chain(folder, *[p() for p in parts]), ORDER).faults)


def test_a_block_trained_twice_is_found(folder):
    wrong = entries(1, 6)
    wrong[5].block_ids[0] = wrong[0].block_ids[0]
    assert any("more than once" in f for f in verify(folder, chain(folder, wrong), ORDER).faults)


def test_a_changed_or_missing_segment_breaks_the_chain(folder):
    head = chain(folder, entries(1, 4), entries(5, 6))
    first = next(n for n in folder.names() if n != head)
    table = pq.read_table(folder.local / first)
    pq.write_table(table.set_column(3, "loss", [[0.5] * len(table)]), folder.local / first)
    assert "does not match the digest" in verify(folder, head, ORDER).faults[0]
    folder.delete(first)
    assert "chain is broken" in verify(folder, head, ORDER).faults[0]
