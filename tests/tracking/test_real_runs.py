"""The watch over real runs of jobs/finetune.py on this machine: faults, resizes, restarts, a budget that ends, a tracking server that is away."""

import json
import os
import signal
import statistics
import time

import pytest
from mlflow import MlflowClient

from raytune70b.storage import Folder
from raytune70b.tracking.goodput import running_seconds, timeline, totals
from raytune70b.tracking.journal import lineage, read_journal
from raytune70b.training.checkpoint import newest
from tests.conftest import write_blocks
from tests.faults.fleet import Fleet
from tests.running import ROOT, TINY, run_job, start_job, wait_for
from tests.tracking.conftest import MlflowServer

pytestmark = pytest.mark.slow

PLAIN = [*TINY, "train.global_batch_size=8", "train.micro_batch_size=2", "cluster.address=local", "tracking.report=false"]


def steps_so_far(run):
    return max((r["step"] for r in read_journal(run) if r["kind"] == "step"), default=0)


@pytest.fixture
def blocks(tmp_path):
    write_blocks(Folder(tmp_path / "blocks"), {"train": [400], "validation": [8]}, seq_len=64)
    return [*PLAIN, f"data.path={tmp_path}/blocks", f"run.path={tmp_path}"]


@pytest.fixture
def fleet(tmp_path):
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


@pytest.mark.timeout(900)
def test_a_fault_a_resize_and_a_restart_are_one_mlflow_run_and_every_second_has_a_label(fleet, tmp_path):
    wanted, data = 160, tmp_path / "blocks"
    write_blocks(Folder(data), {"train": [400], "validation": [8]}, seq_len=64)
    settings = [*TINY, "train.global_batch_size=8", "train.micro_batch_size=2", f"train.steps={wanted}", "train.epochs=4", "checkpoint.every=20",
                "cluster.resize_check_s=2", "tracking.report=false"]  # fmt: skip
    fleet.size(1)
    fleet.misbehave(pace=0.2)
    began = time.time()
    run = fleet.start("r", tmp_path, data, tmp_path, *settings, "cluster.workers=[1,4]")
    try:
        run.until_world(2)
        run.until_steps(25)
        hurt = time.time()
        os.kill(run.workers()[1]["pid"], signal.SIGKILL)
        run.until_world(2, hurt)
        run.until_steps(5)
        joined = time.time()
        fleet.size(2)
        run.until_world(4, joined)
        run.until_steps(5)
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 75, run.text()
        fleet.misbehave()
        run = fleet.start("r", tmp_path, data, tmp_path, *settings, "cluster.workers=[1,1]")
        assert run.end() == 0, run.text()
    finally:
        run.stop()
    ended = time.time()

    records = run.records()
    assert [r["step"] for r in lineage(records, "step")] == list(range(1, wanted + 1))
    assert [r["world_size"] for r in records if r["kind"] == "group_start"] == [2, 2, 4, 1]
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (mlflow_run,) = client.search_runs([client.get_experiment_by_name("raytune70b").experiment_id])
    assert [m.step for m in client.get_metric_history(mlflow_run.info.run_id, "train/loss")] == list(range(1, wanted + 1))
    assert mlflow_run.info.status == "FINISHED" and newest(run.folder / "checkpoints").mlflow_run_id == mlflow_run.info.run_id

    labels = totals(timeline(records))
    begin, end = records[0]["time"], next(r["time"] for r in reversed(records) if r["kind"] == "run_end")
    assert began <= begin < end <= ended
    assert sum(labels.values()) == pytest.approx(end - begin, rel=0.01)
    assert all(labels[label] > 0 for label in ("setup", "train", "recovery", "lost work", "not running")), labels
    assert sum(r["seconds"] for r in records if r["kind"] == "step") <= labels["train"] + labels["lost work"] + 0.5


@pytest.mark.timeout(900)
def test_an_mlflow_server_that_is_killed_for_a_minute_gets_every_step_later_and_training_does_not_notice(blocks, tmp_path):
    (tmp_path / "faults.json").write_text(json.dumps({"pace": 0.05}))
    env = {"FAULTS_FILE": str(tmp_path / "faults.json"), "PYTHONPATH": str(ROOT / "tests/faults/injected")}
    (tmp_path / "server").mkdir()
    server, run = MlflowServer(tmp_path / "server"), Folder(tmp_path / "m")
    client = MlflowClient(f"http://127.0.0.1:{server.port}")
    settings = [*blocks, "run.name=m", "train.epochs=1000", f"tracking.mlflow=http://127.0.0.1:{server.port}", "tracking.close_timeout_s=120"]
    job = start_job("finetune", *settings, env=env)

    def delivered() -> list[int]:
        run_id = json.loads(run.read("mlflow.json"))["runs"].popitem()[1]
        return [m.step for m in client.get_metric_history(run_id, "train/loss")]

    try:
        wait_for(lambda: steps_so_far(run) >= 30 or job.poll() is not None, 300)
        wait_for(lambda: len(delivered()) >= 10, 60)
        server.stop(signal.SIGKILL)
        away = time.time()
        time.sleep(60)
        back = time.time()
        assert job.poll() is None and steps_so_far(run) > 100
        server.start()
        wait_for(lambda: len(delivered()) > steps_so_far(run) // 2 and max(delivered()) > 100, 120)
        job.send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=300)
        assert job.returncode == 75, output
        steps = [r for r in read_journal(run) if r["kind"] == "step"]
        assert sorted(delivered()) == [r["step"] for r in steps] == list(range(1, len(steps) + 1))
    finally:
        job.kill()
        server.stop(signal.SIGKILL)
    assert output.count("cannot be reached") == 1 and "lacks" not in output
    before, during = ([r["seconds"] for r in steps if a < r["time"] < b] for a, b in ((0.0, away), (away, back)))
    assert statistics.median(during) < 1.5 * statistics.median(before)


@pytest.mark.timeout(600)
def test_a_run_that_would_exceed_its_budget_ends_before_it_with_a_checkpoint_and_is_not_started_again(blocks, tmp_path):
    run, limit_s = Folder(tmp_path / "b"), 90.0
    settings = [*blocks, "run.name=b", "train.epochs=10000", "checkpoint.every=50", f"budget.hours={limit_s / 3600}", "tracking.mlflow=null"]
    code, output = run_job("finetune", *settings, timeout=400)
    records = read_journal(run)
    steps = lineage(records, "step")
    assert code == 3 and "budget.hours" in output, output
    assert newest(run / "checkpoints").step == steps[-1]["step"] < records[0]["total_steps"]
    begin, saves = records[0]["time"], [r for r in records if r["kind"] == "checkpoint"]
    slack = max(s["seconds"] for s in steps) + max(r["seconds"] for r in saves)
    assert saves[-1]["time"] - begin <= limit_s + slack
    assert running_seconds(timeline(records)) > 0.5 * limit_s  # nor did it stop long before
    code, output = run_job("finetune", *settings)
    assert code == 2 and "budget.hours: earlier launches of this run have used it up" in output, output
