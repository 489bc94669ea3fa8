"""The proof finds what is wrong with a run, and nothing where nothing is."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from raytune70b.blocks.ledger import Entry, write_segment
from raytune70b.blocks.order import Order
from raytune70b.blocks.stream import row_groups
from raytune70b.config import UserError
from raytune70b.storage import Folder
from raytune70b.training.checkpoint import Cursor, cursor_bytes, folder_name
from raytune70b.training.proof import prove

ROOT = Path(__file__).resolve().parents[2]
STEPS, BATCH = 8, 8


def entries(order: Order) -> list[Entry]:
    return [Entry(n + 1, order.step_positions(n)[0], ids.tolist(), 4.0 - 0.1 * n, 1.0, 100, 2 + n % 2, False) for n, ids in order.step_ids(0, STEPS)]


def publish(run: Folder, cursor: Cursor) -> Folder:
    folder = run / "checkpoints" / folder_name(cursor.step)
    folder.write("__0_0.distcp", bytes(range(200)))
    folder.write("cursor.json", cursor_bytes(cursor))
    files = {name: (folder.size(name), folder.checksum(name)) for name in ("__0_0.distcp", "cursor.json")}
    folder.write("manifest.json", json.dumps({"step": cursor.step, "world_size": 2, "files": files}).encode())
    return folder


def make_run(run: Folder, manifest, change=lambda steps: steps) -> None:
    """A run of 8 steps with checkpoints of the fourth and the last."""
    order = Order(row_groups(manifest, "train"), 17, 4, BATCH)
    steps, head = change(entries(order)), None
    for part in (steps[:4], steps[4:]):
        head = write_segment(run / "ledger", part, head)
        fingerprint = {"data.shuffle_window": 4, "train.global_batch_size": BATCH}
        publish(run, Cursor(step=part[-1].step, ledger=head, seed=17, data=manifest.digest, fingerprint=fingerprint))
    journal = [{"kind": "step", "time": 0.0, "launch": 1, "attempt": 1, "step": e.step, "loss": e.loss} for e in steps]
    run.write("journal.jsonl", b"".join(json.dumps(r).encode() + b"\n" for r in journal))


def test_a_sound_run_is_proved(blocks, tmp_path):
    data, manifest = blocks
    run = Folder(tmp_path / "runs" / "sound")
    make_run(run, manifest)
    verdict = prove(run, data)
    assert verdict.faults == [] and verdict.checkpoints == [4, 8] and verdict.journal_steps == STEPS
    assert verdict.ledger.world_sizes == {2: 4, 3: 4}
    assert verdict.lines()[-1] == "no gap, no repeat, no bad file"


CHANGES = {
    "a block trained twice": (lambda s: [*s[:5], replace(s[5], block_ids=[s[0].block_ids[0], *s[5].block_ids[1:]]), *s[6:]], "step 6: consumed blocks"),
    "two steps swapped": (lambda s: [*s[:2], replace(s[2], block_ids=s[3].block_ids), replace(s[3], block_ids=s[2].block_ids), *s[4:]], "step 3: consumed blocks"),
    "a step missing": (lambda s: [*s[:2], *s[3:]], "step 3 is missing or repeated"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_wrong_steps_are_found(name, blocks, tmp_path):
    change, words = CHANGES[name]
    data, manifest = blocks
    make_run(Folder(tmp_path), manifest, change)
    assert any(words in fault for fault in prove(Folder(tmp_path), data).faults)


def test_wrong_files_are_found(blocks, tmp_path):
    data, manifest = blocks
    run = Folder(tmp_path)
    make_run(run, manifest)
    shard = (run / "checkpoints" / folder_name(4)).local / "__0_0.distcp"
    shard.write_bytes(b"\xff" + shard.read_bytes()[1:])
    assert ["checksum" in f for f in prove(run, data).faults] == [True]
    make_run(run, manifest)
    lines = run.read("journal.jsonl").splitlines(keepends=True)
    run.write("journal.jsonl", b"".join([*lines[:2], *lines[3:6], lines[6].replace(b"3.4", b"3.5"), *lines[7:]]))
    verdict = prove(run, data)
    assert [f.split(":")[0] for f in verdict.faults] == ["step 7"]
    assert verdict.unrecorded == 1, "a driver killed before it wrote step 3 down lost nothing: the ledger holds it"
    first = next(n for n in (run / "ledger").names() if n.startswith("steps-00000001-"))
    (run / "ledger").delete(first)
    assert any("chain is broken" in f for f in prove(run, data).faults)


def test_another_data_set_proves_nothing(blocks, tmp_path):
    data, manifest = blocks
    make_run(Folder(tmp_path), replace(manifest, pad_id=1))
    with pytest.raises(UserError, match="give the run's own data set"):
        prove(Folder(tmp_path), data)


def test_the_job_says_so_by_its_exit_code(blocks, tmp_path):
    data, manifest = blocks
    runs = tmp_path / "runs"
    make_run(Folder(runs / "sound"), manifest)
    make_run(Folder(runs / "wrong"), manifest, CHANGES["a step missing"][0])

    def verify(name: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(ROOT / "jobs/verify.py"), f"run.name={name}", f"run.path={runs}", f"data.path={data.uri}"]
        return subprocess.run(command, capture_output=True, text=True)

    assert [verify(name).returncode for name in ("sound", "wrong", "none")] == [0, 1, 2]
    assert "FAULT        step 3 is missing" in verify("wrong").stdout
    assert "has no checkpoint" in verify("none").stderr
