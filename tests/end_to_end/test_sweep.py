"""The sweep as a user runs it, on a cluster that goes on living: order, resume after a kill, divergence, and what it leaves behind."""

import itertools
import json
import math
import os
import signal

import pytest

from raytune70b.config import compose
from raytune70b.tracking.journal import parse_journal
from tests.running import TINY, run_job, start_job, wait_for

pytestmark = pytest.mark.slow

SMALL = [
    *TINY, "train.steps=24", "train.global_batch_size=4", "train.micro_batch_size=4", "train.learning_rate=0.004", "validation.max_blocks=8", "cluster.workers=[1,2]",
    "sweep.data_fraction=0.5", "sweep.low=0.001", "sweep.high=0.016", "sweep.horizon_exponent=0.32", "sweep.points=3", "sweep.extensions=1", "sweep.repeats=1", "sweep.batch_factors=[]", "sweep.warmup_factors=[]", "sweep.patience=1.0",
]  # fmt: skip
ROOM_FOR_ONE = "cluster.cpus_per_worker=4"
"""Of the cluster's six CPUs."""


def results(folder):
    return [json.loads(f.read_text()) for f in sorted((folder / "trials").glob("*.json"))]


def launches(folder):
    """How often each trial was begun."""
    return {f.parent.name: len({r["launch"] for r in parse_journal(f.read_bytes())}) for f in (folder / "runs").glob("*/journal.jsonl")}


@pytest.fixture(scope="module")
def whole(sample, tmp_path_factory):
    """An undisturbed sweep with room for one trial at a time."""
    path = tmp_path_factory.mktemp("whole")
    code, output = run_job("sweep", *SMALL, ROOM_FOR_ONE, f"data.path={sample}", f"run.path={path}", timeout=600)
    assert code == 0, output
    return path / "sweep", output


def test_with_room_for_one_trials_run_in_order_and_give_their_workers_back(whole):
    import ray

    folder, output = whole
    trials = sorted(results(folder), key=lambda r: r["begin"])
    assert len(trials) >= 5
    assert all(before["end"] <= after["begin"] + 0.5 for before, after in itertools.pairwise(trials)), output
    assert trials[0]["point"]["learning_rate"] == 0.004 and trials[0]["status"] == "finished"
    assert "stopped" in {t["status"] for t in trials}, output  # at a patience of 1 whatever falls behind is stopped
    assert all(t["curve"][-1][0] < 1 for t in trials if t["status"] == "stopped")
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
    try:
        wait_for(lambda: ray.available_resources().get("CPU") == 6.0, 30)
        assert not [g for g in ray.util.placement_group_table().values() if g["state"] == "CREATED"]
    finally:
        ray.shutdown()


def test_what_a_sweep_leaves_behind(whole):
    folder, output = whole
    best = compose([str(folder / "best.yaml")])
    answer = json.loads((folder / "answer.json").read_text())
    kept = "the run keeps its" in answer["verdict"]  # then the run keeps its own rate; else the optimum, carried to its horizon
    expected = 0.004 if kept else answer["trial_rate"] * 2**-0.32
    assert best.train.learning_rate == answer["point"]["learning_rate"] == pytest.approx(expected, rel=0.01)
    assert best.train.warmup_steps == 4  # the share of the full run's schedule, not the trial's
    assert [(folder / name).read_bytes()[:4] for name in ("rates.png", "curves.png")] == [b"\x89PNG"] * 2
    assert len((folder / "trials.csv").read_text().splitlines()) == 1 + len(results(folder))
    assert not list(folder.glob("runs/*/checkpoints"))
    assert "done" in output and "ETA" in output and answer["verdict"] in output


def test_every_trial_is_a_child_in_mlflow(whole):
    from mlflow import MlflowClient

    folder, _ = whole
    client = MlflowClient(tracking_uri=f"sqlite:///{folder.parent}/mlflow.db")
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    parents = [r for r in runs if "mlflow.parentRunId" not in r.data.tags]
    children = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == parents[0].info.run_id]
    assert len(parents) == 1 and len(children) == len(results(folder))
    ids = {(float(c.data.params["train.learning_rate"]), int(c.data.params["run.seed"])): c.info.run_id for c in children}
    for trial in results(folder):  # a stopped trial may have validated once more before it heard of it
        history = client.get_metric_history(ids[trial["point"]["learning_rate"], trial["point"]["seed"]], "validation/loss")
        assert any(m.value == pytest.approx(trial["curve"][-1][1]) for m in history)


def test_killed_in_the_middle_the_same_command_runs_what_is_missing(whole, sample, tmp_path):
    """Several trials at a time here and one after the other there: the answer is the same."""
    command = [*SMALL, f"data.path={sample}", f"run.path={tmp_path}", "sweep.max_concurrent=2", "tracking.mlflow=null"]
    folder = tmp_path / "sweep"
    process = start_job("sweep", *command)
    wait_for(lambda: len(list(folder.glob("trials/*.json"))) >= 2 or process.poll() is not None, 240)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    done = {t["point"]["learning_rate"]: t for t in results(folder)}
    assert 2 <= len(done) < len(results(whole[0]))
    code, output = run_job("sweep", *command, timeout=600)
    assert code == 0, output
    after = {(t["point"]["learning_rate"], t["point"]["seed"]): t for t in results(folder)}
    assert all(after[rate, t["point"]["seed"]] == t for rate, t in done.items())  # not run again
    assert all(launches(folder)[f.stem] == 1 for f in folder.glob("trials/*.json") if json.loads(f.read_text()) in done.values())
    mine, theirs = (json.loads((f / "answer.json").read_text()) for f in (folder, whole[0]))
    assert mine["trial_rate"] == pytest.approx(theirs["trial_rate"], rel=0.01)
    assert mine["point"] | {"learning_rate": 0} == theirs["point"] | {"learning_rate": 0}
    for other in results(whole[0]):
        same = after[other["point"]["learning_rate"], other["point"]["seed"]]
        if same["loss"] is not None and other["loss"] is not None:
            assert math.isclose(same["loss"], other["loss"], rel_tol=1e-4)  # four threads a worker there, one here


def test_other_settings_need_another_name(whole, sample):
    code, output = run_job("sweep", *SMALL, ROOM_FOR_ONE, f"data.path={sample}", f"run.path={whole[0].parent}", "train.weight_decay=0.2")
    assert code == 2 and "train.weight_decay: 0.1 -> 0.2" in output and "sweep.name" in output


def test_a_range_in_which_all_diverge_is_told(sample, tmp_path):
    arguments = [*SMALL, f"data.path={sample}", f"run.path={tmp_path}", "sweep.low=1000", "sweep.high=100000", "tracking.mlflow=null", "train.max_grad_norm=1000000"]
    code, output = run_job("sweep", *arguments, timeout=600)
    assert code == 3, output
    assert "all learning rates from 1e+03 to 1e+05 diverge" in output and "lower sweep.low" in output
    assert {t["status"] for t in results(tmp_path / "sweep")} == {"diverged"}
    assert not (tmp_path / "sweep" / "best.yaml").exists()
