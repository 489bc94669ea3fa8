"""Data, run folder and checkpoints on S3, whose server refuses connections for twenty seconds."""

from __future__ import annotations

import time

import pytest
from pyarrow import fs

from raytune70b.storage import Folder
from raytune70b.training.checkpoint import saved_steps
from tests.faults import s3
from tests.faults.conftest import STEPS, check_committed

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_storage_that_refuses_for_twenty_seconds_loses_nothing(fleet, start, door, data, reference):
    runs, there = f"s3://{s3.BUCKET}/runs", Folder(f"s3://{s3.BUCKET}/data")
    fs.copy_files(str(data), there.path(), destination_filesystem=there.filesystem)
    fleet.size(1)
    fleet.misbehave(pace=0.3)
    run = start("cluster.workers=[2,2]", "tracking.mlflow=null", runs=runs, data=there.uri)
    run.until(lambda records: "checkpoint of step" in run.text())
    shut = time.time()
    door.shut(20)
    fleet.misbehave()
    assert run.end() == 0
    assert door.refused > 0
    during = [r["step"] for r in run.records("step") if shut + 1 < r["time"] < shut + 19]
    assert len(during) > 3, "training goes on"
    assert saved_steps(run.folder / "checkpoints")[-1] == STEPS
    check_committed(run.folder, there.uri, reference)
