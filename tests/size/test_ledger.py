"""The proof of a run of 235,000 steps reads each segment once, makes each window once, and holds one segment at a time."""

import gc

import pyarrow as pa
import pytest

from raytune70b.blocks import ledger
from raytune70b.storage import Folder
from raytune70b.training.proof import prove
from tests.size import made

pytestmark = pytest.mark.size


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """The run's folder, its data and their manifest: 235,000 steps of 128 blocks, 0.6 of them in a second epoch."""
    data, run = Folder(tmp_path_factory.mktemp("data")), Folder(tmp_path_factory.mktemp("run"))
    blocks = made.manifest(made.STEPS * made.GLOBAL_BATCH * 5 // 8)
    data.write("manifest.json", blocks.to_json().encode())
    made.run(run, blocks, made.STEPS)
    return run, data, blocks


def test_a_long_run_is_proved_in_one_pass(long_run, monkeypatch):
    run, data, _ = long_run
    read, windows, alive = [], [], []

    def counted(self, epoch, number, real=ledger.Order.window_ids):
        windows.append((epoch, number))
        return real(self, epoch, number)

    def once(folder, name, real=ledger.read_segment):
        read.append(name)
        gc.collect()
        alive.append(pa.total_allocated_bytes())
        return real(folder, name)

    monkeypatch.setattr(ledger.Order, "window_ids", counted)
    monkeypatch.setattr(ledger, "read_segment", once)
    verdict = prove(run, data)
    assert verdict.faults == [] and (verdict.ledger.steps, verdict.ledger.epochs, verdict.journal_steps) == (made.STEPS, 2, made.STEPS)
    assert len(read) == len(set(read)) == verdict.ledger.segments == -(-made.STEPS // 1000)
    spans = 2 * (len(read) + 2)  # a window that two segments or epochs share is made for both
    assert len(windows) <= len(set(windows)) + spans and len(set(windows)) <= made.STEPS * made.GLOBAL_BATCH // (made.WINDOW * made.ROW_GROUP) + 2
    assert max(alive) - alive[0] < 4 * 1000 * made.GLOBAL_BATCH * 8 + 64 * made.STEPS, "a segment's ids, and some numbers a step"


def test_one_wrong_block_in_thirty_million_is_found(long_run):
    run, _, blocks = long_run
    order, head = made.order(blocks), None
    chain = [*ledger.segments(run / "ledger", prove_head(run))][::-1]
    for name, table in chain:
        if name.startswith("steps-00100001-"):
            ids = table.column("block_ids").to_pylist()
            ids[17][3] = int(next(order.step_ids(0, 1))[1][0])
            table = table.set_column(2, ledger.FIELDS.field("block_ids"), [pa.array(ids, ledger.FIELDS.field("block_ids").type)])
        head = ledger.write_rows(run / "ledger", table, head)
    proof = ledger.verify(run / "ledger", head, order)
    assert [fault.split(":")[0] for fault in proof.faults] == ["step 100018", "epoch 1", "epoch 1"]
    assert "1 blocks were trained more than once" in proof.faults[1] and "1 of" in proof.faults[2]


def prove_head(run: Folder) -> str:
    from raytune70b.training.checkpoint import newest

    cursor = newest(run / "checkpoints")
    assert cursor is not None and cursor.ledger is not None
    return cursor.ledger
