"""Evaluate and export as jobs, on a Ray cluster of this machine: the loss is the same at any number of workers and any batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from data_pipelines.files import ParquetSink
from data_pipelines.held_out import HELD_OUT, SCHEMA
from tests import distributed
from tests.export.run_folders import TEXTS, run_config, write_data, write_runs

ROOT = Path(__file__).resolve().parents[2]


def write_held_out(data) -> None:
    """Four documents and six conversations, in both languages."""
    rows = [(TEXTS[n % 2] * (n + 1), False, "en" if n % 2 == 0 else "fr", "texts.jsonl", n) for n in range(4)]
    for n in range(6):
        turns = [("user", "Who is bound?" if n % 2 == 0 else "Qui est visé ?"), ("assistant", "The Supplier." if n % 2 == 0 else "Le Prêteur.")]
        rows.append((json.dumps(turns * (1 + n % 3)), True, "en" if n % 2 == 0 else "fr", "chats.jsonl", n))
    with ParquetSink(data, HELD_OUT, SCHEMA) as sink:
        sink.write([pa.array(column) for column in zip(*rows, strict=True)])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("evaluate")
    write_held_out(write_data(root / "data"))
    distributed.run(write_runs, 2, [run_config(root, "tuned", "model.precision=fp32")])
    return root


def job(name: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "jobs" / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(root: Path) -> dict[tuple[str, str], dict]:
    values = json.loads((root / "runs/tuned/evaluation/results.json").read_text())["rows"]
    return {(r["group"], r["measure"]): r for r in values}


def test_evaluate(root):
    settings = ["cluster.address=local", "tracking.mlflow=sqlite", "evaluation.max_new_tokens=8"]
    job("evaluate", str(root / "runs/tuned"), "cluster.workers=[1,1]", *settings)
    alone, units = rows(root), set((root / "runs/tuned/evaluation/units").iterdir())
    job("evaluate", str(root / "runs/tuned"), "cluster.workers=[2,2]", "evaluation.batch_tokens=64", *settings)
    both = rows(root)
    for key, row in alone.items():
        for model in ("base", "tuned"):
            assert both[key]["values"][model]["value"] == pytest.approx(row["values"][model]["value"], rel=1e-6, abs=1e-6)
    assert {"all", "language fr", "source chats.jsonl", "task conversation, language en"} <= {group for group, _ in alone}
    page = (root / "runs/tuned/evaluation/page.html").read_text()
    assert "Qui est visé ?" in page and "<script" not in page
    answered = {p.name for p in units if json.loads(p.read_text())["answers"]}
    assert answered <= {p.name for p in (root / "runs/tuned/evaluation/units").iterdir()}, "answers are other work only where their settings changed"

    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{root}/runs/mlflow.db")
    run = client.search_runs([e.experiment_id for e in client.search_experiments()])[0]
    assert run.data.metrics["evaluation/all/loss/tuned"] == pytest.approx(both["all", "loss"]["values"]["tuned"]["value"])


@pytest.mark.slow
def test_the_default_beats_its_base_on_every_metric(tmp_path):
    """The embedded run as `make finetune` starts it, its export, and a fresh process' view of both."""
    settings = [f"run.path={tmp_path / 'runs'}", "cluster.address=local", "cluster.dashboard=false"]
    job("prepare", f"data.path={tmp_path / 'data'}")
    job("finetune", f"data.path={tmp_path / 'data'}", *settings)
    job("evaluate", str(tmp_path / "runs/default"), *settings[1:])
    values = json.loads((tmp_path / "runs/default/evaluation/results.json").read_text())["rows"]
    overall = {r["measure"]: r["change"] for r in values if r["group"] == "all"}
    assert set(overall) == {"loss", "perplexity", "exact_match", "token_f1", "rouge1", "rouge2", "rougeL", "bleu", "chrf"}
    for measure, change in overall.items():
        assert change["high"] < 0 if measure in ("loss", "perplexity") else change["low"] > 0, (measure, change)
