"""The driver is killed, or told to stop in the middle of a validation; the tracking database is locked; a checkpoint rots between launches."""

from __future__ import annotations

import signal
import sqlite3

import pytest

from raytune70b.training.checkpoint import folder_name, newest, whole_checkpoints
from tests.faults.conftest import ZERO3, check_undisturbed


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["fsdp", ZERO3])
def test_a_run_goes_on_after_its_driver_was_killed_and_stopped(fleet, start, data, reference, sharding):
    fleet.size(1)
    fleet.misbehave(pace=0.05)
    run = start("cluster.workers=[1,2]", f"model.sharding={sharding}")
    checkpoints = run.folder / "checkpoints"
    run.until_steps(5)
    with sqlite3.connect(run.folder.local.parent / "mlflow.db", timeout=60) as database:
        database.execute("BEGIN EXCLUSIVE")  # tracking stands still, training does not
        run.until_steps(25)
        database.rollback()
    run.process.kill()
    run.process.wait()

    whole = list(whole_checkpoints(checkpoints))
    rotten = next((checkpoints / folder_name(whole[-1])).local.glob("*.distcp"))
    content = bytearray(rotten.read_bytes())
    content[len(content) // 2] ^= 1
    rotten.write_bytes(content)
    run = start("cluster.workers=[1,2]", f"model.sharding={sharding}")
    run.until_steps(1)
    assert run.records("group_ready")[-1]["resumed_step"] == whole[-2]
    assert any(f"step {whole[-1]} is not used" in r["text"] and "checksum" in r["text"] for r in run.records("warning"))
    assert "checksum" in run.text()

    fleet.misbehave(pace=0.05, validation_pace=3)
    run.until(is_validating)
    run.process.send_signal(signal.SIGTERM)  # goodfire-ai/spd#677: in the middle of a validation
    assert run.end() == 75
    step = run.records("step")[-1]["step"]
    assert newest(checkpoints).step == step and step % 40 == 0
    assert not [r for r in run.records("validation") if r["step"] == step], "it was interrupted"

    fleet.misbehave()
    run = start("cluster.workers=[1,2]", f"model.sharding={sharding}")
    assert run.end() == 0
    assert [r for r in run.records("validation") if r["step"] == step], "and is made up for"
    check_undisturbed(run, data, reference)


def is_validating(records) -> bool:
    """A validation is due after the newest step, and has not been made."""
    step = [r for r in records if r["kind"] == "step"][-1]["step"]
    return step % 40 == 0 and step not in [r["step"] for r in records if r["kind"] == "validation"]
