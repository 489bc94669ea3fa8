"""The main job as a user runs it, on a real Ray cluster."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import mlflow
import pytest
import torch

from data_pipelines import held_out
from data_pipelines.tokens import load_tokenizer
from raytune70b.blocks.ledger import verify
from raytune70b.blocks.manifest import read_manifest
from raytune70b.blocks.order import Order
from raytune70b.blocks.stream import row_groups
from raytune70b.config import compose
from raytune70b.evaluation.metrics import score
from raytune70b.export.live import live_model
from raytune70b.storage import Folder
from raytune70b.tracking.journal import read_journal
from raytune70b.training.checkpoint import folder_name, newest
from tests.running import ROOT, TINY, committed, run_job, start_job, wait_for

STEPS = 12
ASKED = ["evaluation.every=10", "evaluation.every_conversations=6", "evaluation.max_new_tokens=8"]


def arguments(sample, tmp_path, name, *more):
    return [f"data.path={sample}", f"run.path={tmp_path}", f"run.name={name}", f"train.steps={STEPS}", "checkpoint.every=5", *TINY, *more]


@pytest.fixture(scope="module")
def undisturbed(sample, tmp_path_factory):
    """A run of two workers that nothing disturbs: its folder."""
    path = tmp_path_factory.mktemp("runs")
    code, output = run_job("finetune", *arguments(sample, path, "two", *ASKED))
    assert code == 0, output
    return path / "two"


def proof(sample, run):
    manifest = read_manifest(Folder(sample))
    order = Order(row_groups(manifest, "train"), 17, 4, 16)
    return verify(Folder(run) / "ledger", newest(Folder(run) / "checkpoints").ledger, order)


def test_the_ledger_proves_the_run(sample, undisturbed):
    found = proof(sample, undisturbed)
    assert (found.faults, found.steps, found.blocks, found.world_sizes) == ([], STEPS, STEPS * 16, {2: STEPS})


@pytest.mark.parametrize("world", [1, 3])
def test_the_loss_curve_does_not_know_the_number_of_workers(sample, undisturbed, tmp_path, world):
    code, output = run_job("finetune", *arguments(sample, tmp_path, "other", f"cluster.workers=[{world},{world}]"))
    assert code == 0, output
    for ours, theirs in zip(committed(tmp_path / "other"), committed(undisturbed), strict=True):
        assert ours["block_ids"] == theirs["block_ids"]
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["trained_tokens"] == theirs["trained_tokens"]


def test_mlflow_has_one_run_with_each_step_once(undisturbed):
    client = mlflow.MlflowClient(f"sqlite:///{undisturbed.parent}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("raytune70b").experiment_id])
    assert len(runs) == 1 and runs[0].info.status == "FINISHED"
    history = client.get_metric_history(runs[0].info.run_id, "train/loss")
    assert sorted(m.step for m in history) == list(range(1, STEPS + 1))
    ours = {e["step"]: e["loss"] for e in committed(undisturbed)}
    assert {m.step: m.value for m in history} == pytest.approx(ours)
    assert runs[0].data.params["train.global_batch_size"] == "16"
    assert "config.yaml" in {a.path for a in client.list_artifacts(runs[0].info.run_id)}


def answered_by_hand(sample, run, step):
    """Metrics of the greedy answers of the model as training left it, one token at a time, without a cache."""
    data, manifest = Folder(sample), read_manifest(Folder(sample))
    tokenizer = load_tokenizer(data / "tokenizer")
    model = live_model(compose([str(run / "config.yaml")]), manifest.vocab_size, Folder(run) / "checkpoints" / folder_name(step))
    pairs, *_ = held_out.pairs(data, tokenizer, 6, 504)
    answers = []
    for pair in pairs:
        made = []
        while len(made) < 8 and (not made or made[-1] != tokenizer.eos_token_id):
            with torch.no_grad():
                made.append(int(model(torch.tensor([[*pair.prompt_ids, *made]])).logits[0, -1].argmax()))
        answers.append(tokenizer.decode(made, skip_special_tokens=True).strip())
    values = score(answers, [p.answer for p in pairs], [p.language for p in pairs]).values()
    return {name: value[0] for name, value in values.items()}, len(pairs)


def test_answers_come_while_training_goes_on(sample, undisturbed):
    records = read_journal(Folder(undisturbed))
    (asked,) = [r for r in records if r["kind"] == "evaluation"]
    expected, count = answered_by_hand(sample, undisturbed, 10)
    assert (asked["step"], asked["answers"]) == (10, count)
    assert {name: asked[name] for name in expected} == pytest.approx(expected, abs=1e-9)
    assert expected["chrf"] > 0
    assert asked["time"] > max(r["time"] for r in records if r["kind"] == "step")  # the last steps did not wait for it
    client = mlflow.MlflowClient(f"sqlite:///{undisturbed.parent}/mlflow.db")
    run = client.search_runs([client.get_experiment_by_name("raytune70b").experiment_id])[0]
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "evaluation/chrf")] == [(10, pytest.approx(expected["chrf"]))]


def test_other_settings_are_refused_and_a_finished_run_stays(sample, undisturbed):
    again = arguments(sample, undisturbed.parent, "two")
    code, output = run_job("finetune", *again, "train.learning_rate=0.1", "run.seed=5")
    assert code == 2 and "train.learning_rate: 0.003 -> 0.1" in output and "run.seed: 17 -> 5" in output
    code, output = run_job("finetune", *again, "run.resume=never")
    assert code == 2 and "run.resume: is never" in output and f"step {STEPS}" in output
    before = committed(undisturbed)
    code, output = run_job("finetune", *again)
    assert code == 0, output
    assert committed(undisturbed) == before


def test_submitted_as_a_job(head, sample, tmp_path):
    """`ray job submit --working-dir .`: a small upload, progress in the job's log, run and data set in the dashboard."""
    ray = os.path.join(os.path.dirname(sys.executable), "ray")
    job = " ".join(["python", "jobs/finetune.py", *arguments(sample, tmp_path, "submitted", "cluster.cpus_per_worker=3")])
    command = [ray, "job", "submit", f"--address={head}", "--working-dir", ".", "--", *job.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert f"step {STEPS}/{STEPS}" in log and "succeeded" in log
    assert len(committed(tmp_path / "submitted")) == STEPS
    size = re.search(r"\(([0-9.]+)MiB\)", log)
    assert size is None or float(size.group(1)) < 5
    run = next(r for r in dashboard(head, "/api/train/v2/runs/v1")["train_runs"] if r["name"] == "submitted")
    assert run["status"] == "FINISHED"
    assert any(d["dataset"].startswith("train") for d in dashboard(head, f"/api/data/datasets/{run['job_id']}")["datasets"])


def dashboard(head, path):
    token = Path.home() / ".ray" / "auth_token"
    headers = {"Authorization": f"Bearer {token.read_text().strip()}"} if token.is_file() else {}
    request = urllib.request.Request(head + path, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def test_sigkill_of_everything_and_the_same_command(sample, undisturbed, tmp_path):
    """Driver and workers die at once; the same command continues, and no later step differs."""
    command = arguments(sample, tmp_path, "killed")
    process = start_job("finetune", *command)
    wait_for(lambda: newest(Folder(tmp_path / "killed" / "checkpoints")) is not None)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    reached = newest(Folder(tmp_path / "killed" / "checkpoints")).step
    code, output = run_job("finetune", *command)
    assert code == 0, output
    if reached < STEPS:
        assert f"resume at step {reached + 1}" in output
    found = proof(sample, tmp_path / "killed")
    assert (found.faults, found.steps) == ([], STEPS)
    for ours, theirs in zip(committed(tmp_path / "killed"), committed(undisturbed), strict=True):
        assert ours["block_ids"] == theirs["block_ids"]
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
