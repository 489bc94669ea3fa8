"""The README's first hour on a cluster: plain `ray start --head` on as many CPUs as the default has workers, and a bf16 model folder of one's own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import mlflow
import pytest
import torch
from safetensors.torch import load_file

from raytune70b.storage import Folder
from raytune70b.training.checkpoint import newest
from tests.running import ROOT, committed, run_job, start_job, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
DASHBOARD = "http://127.0.0.1:8265"
STEPS = 120
CHATTER = ("gemm_4bit_forward", "Connecting to existing Ray cluster", "Connected to Ray", "Traceback")


def ray(*arguments: str, timeout: float = 600) -> str:
    """What a command of Ray's prints; the environment is an activated one's."""
    binaries = os.path.dirname(sys.executable)
    environment = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}"}
    if arguments[0] == "job":
        environment["RAY_AUTH_MODE"] = "token"
    done = subprocess.run([f"{binaries}/ray", *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout)
    return done.stdout


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """A head started by the README's commands, by a user who never had a token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        ray("get-auth-token", "--generate")
        begun = ray("start", "--head", "--num-cpus=2")
        assert "Ray runtime started" in begun, begun
        yield
        ray("stop", "--force")


def submit(name: str, job: str, *arguments: str, wait: bool = True) -> str:
    """`ray job submit`, as the README has it; the job's log."""
    command = ["job", "submit", "--address", DASHBOARD, "--submission-id", name, *([] if wait else ["--no-wait"]), "--working-dir", "."]
    ray(*command, "--", "python", f"jobs/{job}.py", *arguments)
    return ray("job", "logs", "--address", DASHBOARD, name)


def status(name: str) -> str:
    return ray("job", "status", "--address", DASHBOARD, name)


@pytest.fixture(scope="module")
def theirs(head, tmp_path_factory) -> Path:
    """A data set, and a Qwen3 folder in bf16 with the tokenizer that it was made with."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from data_pipelines.tokens import load_tokenizer

    folder = tmp_path_factory.mktemp("theirs")
    code, output = run_job("prepare", f"data.path={folder}/first", "data.seq_len=512")
    assert code == 0, output
    tokenizer = load_tokenizer(Folder(folder / "first" / "tokenizer"))
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    shape = Qwen3Config(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                        max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)  # fmt: skip
    Qwen3ForCausalLM(shape).to(torch.bfloat16).save_pretrained(folder / "model")
    submit("prepare", "prepare", f"data.path={folder}/data", f"data.tokenizer={folder}/model", "data.seq_len=512")
    assert "SUCCEEDED" in status("prepare").upper()
    return folder


@pytest.fixture(scope="module")
def trained(theirs) -> tuple[str, str]:
    """The logs of a submission that was stopped and of the one that went on."""
    arguments = (f"model.path={theirs}/model", f"data.path={theirs}/data", f"run.path={theirs}/runs", "run.name=legal", f"train.steps={STEPS}", "train.epochs=100",
                 "checkpoint.every=100000", "validation.every=0", "train.learning_rate=1e-3")  # fmt: skip
    submit("first", "finetune", *arguments, wait=False)
    wait_for(lambda: f"step 1/{STEPS} " in ray("job", "logs", "--address", DASHBOARD, "first"), 300)
    begin = time.monotonic()
    ray("job", "stop", "--address", DASHBOARD, "first")
    assert time.monotonic() - begin < 120
    stopped = ray("job", "logs", "--address", DASHBOARD, "first")
    assert "stopped" in status("first").lower(), stopped
    reached = newest(Folder(theirs / "runs/legal/checkpoints"))
    assert reached is not None and 0 < reached.step < STEPS, stopped
    return stopped, submit("second", "finetune", *arguments)


def test_it_answers_nobody_without_the_token(head):
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{DASHBOARD}/api/jobs/", timeout=30)
    assert refused.value.code == 401


def test_it_trains_stops_with_a_checkpoint_and_goes_on(theirs, trained):
    stopped, again = trained
    assert "started 2 workers" in stopped and "SIGTERM: saving a checkpoint" in stopped and "legal: stopped (SIGTERM)" in stopped
    assert stopped.rstrip().splitlines()[-1].startswith("MLflow"), "the closing table comes last"
    assert "resume at step" in again and "legal: finished" in again, again
    assert [row["step"] for row in committed(theirs / "runs/legal")] == list(range(1, STEPS + 1))
    for log in trained:
        assert not [line for line in log.splitlines() if any(word in line for word in CHATTER)], log


def test_what_is_recorded_is_what_ran(theirs, trained):
    client = mlflow.MlflowClient(f"sqlite:///{theirs}/runs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("raytune70b").experiment_id])
    assert run.info.status == "FINISHED", "the second submission goes on with the first one's run"
    assert (run.data.params["model.path"], run.data.params["data.path"]) == (f"{theirs}/model", f"{theirs}/data")


def test_the_export_is_as_large_as_its_base_and_is_evaluated_beside_it(theirs, trained):
    log = submit("export", "export", f"{theirs}/runs/legal", f"export.path={theirs}/tuned")
    assert "SUCCEEDED" in status("export").upper(), log
    weights = {name: load_file(theirs / name / "model.safetensors") for name in ("model", "tuned")}
    assert {t.dtype for t in weights["tuned"].values()} == {torch.bfloat16}
    assert {k: t.shape for k, t in weights["tuned"].items()} == {k: t.shape for k, t in weights["model"].items()}
    sizes = [(theirs / name / "model.safetensors").stat().st_size for name in ("model", "tuned")]
    assert abs(sizes[0] - sizes[1]) < 4096, "but for the header"
    evaluated = submit("evaluate", "evaluate", f"{theirs}/runs/legal", "evaluation.max_conversations=4", "evaluation.max_texts=8", "evaluation.max_new_tokens=8")
    assert "SUCCEEDED" in status("evaluate").upper(), evaluated
    assert (theirs / "runs/legal/evaluation/page.html").is_file()
    for text in (log, evaluated):
        assert not [line for line in text.splitlines() if any(word in line for word in CHATTER)], text


@pytest.mark.parametrize(("settings", "numbers"), [(("cluster.workers=[3,3]",), ("3 CPUs", "2 CPUs")), (("cluster.cpus_per_worker=1.5",), ("3 CPUs", "2 CPUs"))])
def test_what_can_never_run_is_one_line(theirs, tmp_path, settings, numbers):
    code, output = run_job("finetune", f"data.path={theirs}/data", f"model.path={theirs}/model", f"run.path={tmp_path}", "cluster.address=auto", *settings, env={"RAY_ADDRESS": "auto"})
    lines = [line for line in output.splitlines() if line.strip()]
    assert code == 2 and len(lines) == 1 and all(word in lines[0] for word in ("cluster.workers", "cluster.cpus_per_worker", *numbers)), output


def test_an_entrypoint_that_takes_the_workers_cpu_is_told(theirs, tmp_path):
    ray("job", "submit", "--address", DASHBOARD, "--submission-id", "greedy", "--entrypoint-num-cpus", "1", "--working-dir", ".", "--", "python", "jobs/finetune.py",
        f"data.path={theirs}/data", f"model.path={theirs}/model", f"run.path={tmp_path}")  # fmt: skip
    log = ray("job", "logs", "--address", DASHBOARD, "greedy")
    assert "1 CPU beside the 1 CPU of this job's entrypoint" in log and "submit without --entrypoint-num-cpus" in log, log


def test_what_may_run_waits_says_for_what_and_obeys_sigterm(theirs, tmp_path):
    process = start_job("finetune", f"data.path={theirs}/data", f"model.path={theirs}/model", f"run.path={tmp_path}", "run.name=waits", "cluster.workers=[3,4]", env={"RAY_ADDRESS": "auto"})
    journal = tmp_path / "waits" / "journal.jsonl"
    wait_for(lambda: journal.is_file() and "waiting for machines" in journal.read_text(), 120)
    begin = time.monotonic()
    process.terminate()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75 and time.monotonic() - begin < 60, output
    assert "waits: stopped (SIGTERM)" in output and "take 3 CPUs, the Ray cluster has 2 CPUs" in journal.read_text()
