"""The README's commands, read out of the README and run as written by a newcomer's shell, on a fresh copy of the project."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytune70b.config import compose
from tests.running import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
JOBS = [shlex.split(line, comments=True) for line in COMMANDS if line.startswith("python jobs/")]
SMALL = str(ROOT / "conf/scale/tiny.yaml")


def test_it_names_what_there_is():
    assert {words[1] for words in JOBS} == {str(p.relative_to(ROOT)) for p in (ROOT / "jobs").glob("*.py")}
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
    for path in re.findall(r"`((?:tests|conf|jobs|raytune70b|data_pipelines)/[\w./-]+)`", README):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("words", JOBS, ids=" ".join)
def test_its_settings_are_settings(words, tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()  # the reader's own; a fresh checkout has none
    monkeypatch.chdir(tmp_path)
    overrides = [w for w in words[2:] if re.match(r"[a-z_.]+=", w)]
    files = [str(ROOT / w) for w in words[2:] if w.startswith("conf/")]
    compose([*files, *overrides])


def test_no_cluster_starts_before_there_is_a_token():
    starts = [line for line in README.splitlines() if "ray start --head" in line]
    assert starts and all(re.search(r"ray get-auth-token --generate [^`]*&& ray start --head", line) for line in starts), starts


def test_its_exit_codes_are_the_jobs():
    text = (ROOT / "jobs/finetune.py").read_text()
    for code, word in ((0, "finished"), (1, "failed"), (2, "wrong input or configuration"), (3, "budget"), (75, "stopped")):
        assert re.search(rf"\b{code}\b[^;,.]*{word}", README.split("Exit codes:")[1]) and re.search(rf"\b{code}\b[^;.]*{word}", text)


def the_users_own(folder: Path) -> None:
    """Documents and a small Hugging Face model, under the names that the README uses."""
    from data_pipelines.sample_corpus import write_sample
    from data_pipelines.tokens import train_tokenizer

    write_sample(folder / "corpus", seed=3)
    rows = [row for path in sorted((folder / "corpus").rglob("*.jsonl")) for line in path.read_bytes().split(b"\n") if (row := whole_row(line))]
    (folder / "statutes").mkdir()
    (folder / "decisions").mkdir()
    texts = [r["text"] for r in rows if isinstance(r.get("text"), str)]
    (folder / "contracts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + "a bad line\n")
    for n, text in enumerate(texts[:40]):
        (folder / f"statutes/{n}.txt").write_text(f"Statute {n}\n\n{text}")
    pq.write_table(pa.table({"text": [f"Decision {n}. {t}" for n, t in enumerate(texts[40:80])]}), folder / "decisions/one.parquet")
    save_model(folder / "models/my-llama", train_tokenizer(texts, 600))


def whole_row(line: bytes) -> dict | None:
    """A row of the sample; None for those that are broken on purpose."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def save_model(folder: Path, tokenizer) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                        max_position_embeddings=512, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def as_written(command: str, folder: Path) -> str:
    """The command; behind a recipe goes the overlay that makes it small, as the README says, without what is of 70 B, and /shared is in the test's folder."""
    if "conf/recipe/" in command and "jobs/plan.py" not in command:
        command = re.sub(r"(conf/recipe/\w+\.yaml)", rf"\1 {SMALL}", command)
        command = re.sub(r" (model\.path|data\.inputs|data\.tokenizer|train\.steps)=\S+", "", command)  # what the overlay makes small
        command = command.replace("sweep.data_fraction=0.01", "sweep.data_fraction=0.5")  # of 40 steps
    return command.replace("/shared", f"{folder}/shared")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_newcomers_journey(tmp_path):
    folder = tmp_path / "clone"
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    the_users_own(folder)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(folder)}
    environment.pop("RAY_ADDRESS", None)
    made = ["python jobs/finetune.py conf/finetune.yaml"]  # what `make finetune` runs; installing and `make test` are the test suite's own start
    left_out = ("make finetune", "make test", ". .venv/bin/activate")
    for command in [*made, *(c for c in COMMANDS if c.strip() and not c.startswith(left_out))]:
        done = subprocess.run(["bash", "-c", as_written(command, tmp_path)], cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert (folder / "models/first/config.json").is_file() and (tmp_path / "shared/models/legalfin/config.json").is_file()
