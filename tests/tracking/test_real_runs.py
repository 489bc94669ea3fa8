"""The watch over real runs of jobs/finetune.py on this machine: faults, restarts with other worker counts, a budget that ends."""

import os
import signal
import time

import pytest
from mlflow import MlflowClient

from raytune70b.storage import Folder
from raytune70b.tracking.goodput import running_seconds, timeline, totals
from raytune70b.tracking.journal import lineage, read_journal
from raytune70b.training.checkpoint import newest
from tests.conftest import write_blocks
from tests.running import TINY, run_job, start_job, wait_for

pytestmark = pytest.mark.slow

PLAIN = [*TINY, "train.global_batch_size=8", "train.micro_batch_size=2", "cluster.address=local", "tracking.report=false"]


def steps_so_far(run):
    return max((r["step"] for r in read_journal(run) if r["kind"] == "step"), default=0)


@pytest.fixture
def blocks(tmp_path):
    write_blocks(Folder(tmp_path / "blocks"), {"train": [400], "validation": [8]}, seq_len=64)
    return [*PLAIN, f"data.path={tmp_path}/blocks", f"run.path={tmp_path}"]


@pytest.mark.timeout(600)
def test_a_killed_worker_and_a_restart_with_fewer_workers_are_one_mlflow_run_and_every_second_has_a_label(blocks, tmp_path):
    run, wanted = Folder(tmp_path / "r"), 160
    settings = [*blocks, "run.name=r", f"train.steps={wanted}", "train.epochs=4", "checkpoint.every=20"]
    job = start_job("finetune", *settings, "cluster.workers=[2,2]")
    try:
        wait_for(lambda: steps_so_far(run) >= 30 or job.poll() is not None, 200)
        started = next(r for r in read_journal(run) if r["kind"] == "group_start")
        os.kill(started["workers"][1]["pid"], signal.SIGKILL)
        wait_for(lambda: sum(r["kind"] == "group_ready" for r in read_journal(run)) == 2 or job.poll() is not None, 200)
        wait_for(lambda: read_journal(run)[-1]["kind"] == "step" or job.poll() is not None, 100)
        job.send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=200)
    finally:
        job.kill()
    assert job.returncode == 75, output
    code, output = run_job("finetune", *settings, "cluster.workers=[1,1]", timeout=300)
    ended = time.time()
    assert code == 0, output

    records = read_journal(run)
    assert [r["step"] for r in lineage(records, "step")] == list(range(1, wanted + 1))
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (mlflow_run,) = client.search_runs([client.get_experiment_by_name("raytune70b").experiment_id])
    assert [m.step for m in client.get_metric_history(mlflow_run.info.run_id, "train/loss")] == list(range(1, wanted + 1))
    assert mlflow_run.info.status == "FINISHED" and newest(run / "checkpoints").mlflow_run_id == mlflow_run.info.run_id

    labels = totals(timeline(records))
    end = next(r["time"] for r in reversed(records) if r["kind"] == "run_end")
    assert sum(labels.values()) == pytest.approx(end - records[0]["time"], rel=0.01) and end <= ended
    assert all(labels[label] > 0 for label in ("setup", "train", "recovery", "lost work", "not running")), labels
    assert sum(r["seconds"] for r in records if r["kind"] == "step") <= labels["train"] + labels["lost work"] + 0.5


@pytest.mark.timeout(600)
def test_a_run_that_would_exceed_its_budget_ends_before_it_with_a_checkpoint_and_is_not_started_again(blocks, tmp_path):
    run, limit_s = Folder(tmp_path / "b"), 54.0
    settings = [*blocks, "run.name=b", "train.epochs=10000", "checkpoint.every=50", f"budget.hours={limit_s / 3600}", "tracking.mlflow=null"]
    code, output = run_job("finetune", *settings, timeout=400)
    records = read_journal(run)
    steps = lineage(records, "step")
    assert code == 3 and "budget.hours" in output, output
    assert newest(run / "checkpoints").step == steps[-1]["step"] < records[0]["total_steps"]
    begin = records[0]["time"]
    if steps[0]["time"] - begin < limit_s:  # the machine was not so busy that the start alone took the budget
        saves = [r for r in records if r["kind"] == "checkpoint"]
        slack = max(s["seconds"] for s in steps) + max(r["seconds"] for r in saves)
        assert saves[-1]["time"] - begin <= limit_s + slack
        assert running_seconds(timeline(records)) > 0.5 * limit_s  # nor did it stop long before
    code, output = run_job("finetune", *settings)
    assert code == 2 and "budget.hours: earlier launches of this run have used it up" in output, output
