"""What people type instead of a setting: it is taken where its meaning is plain, and otherwise the line that works is shown."""

import subprocess
import sys
from pathlib import Path

import pytest

from raytune70b.arguments import check_folder_of_a_model
from raytune70b.config import COMMON, ConfigError, compose, get, help_text, known_keys, main_with_clear_errors

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("cluster.workers=8", "cluster.workers", [8, 8]),
        ("cluster.workers=[8]", None, "[least, most]"),
        ("claims.gpu_use_pct=95", "claims.gpu_use_pct", [95.0, 95.0]),
        ("data.inputs=a.jsonl", "data.inputs", ["a.jsonl"]),
        ("data.inputs=s3://bucket/a", "data.inputs", ["s3://bucket/a"]),
        ("data.languages=fr", "data.languages", ["fr"]),
        ("sweep.batch_factors=2", "sweep.batch_factors", [2.0]),
        ("data.inputs=['a,b.jsonl']", "data.inputs", ["a,b.jsonl"]),
        ("data.columns={text: body}", "data.columns", {"text": "body"}),
        ("data.columns.text=body", "data.columns", {"text": "body"}),
        ("model.config={model_type: llama, 'a{': 1}", "model.config", {"model_type": "llama", "a{": 1}),
        ("legalfin", "claims.tokens_per_s_per_gpu", 1800.0),
        ("recipe/legalfin", "claims.tokens_per_s_per_gpu", 1800.0),
        ("data.inputs=a.jsonl,b.jsonl", None, "'data.inputs=[a.jsonl,b.jsonl]'"),
        ("cluster.workers=8,16", None, "'cluster.workers=[8,16]'"),
        ("data.columns={text:body}", None, "'data.columns={text: body}'"),
        ("data.columns=text:body", None, "'data.columns={text: body}'"),  # what bash makes of {text:body,label:x}
        ("data.columns={text:body,label:x}", None, "'data.columns={text: body, label: x}'"),
        ("data.columns=body", None, "'data.columns={text: body}'"),
        ("model.path=meta-llama/Llama-2-70b-hf", None, "hf download meta-llama/Llama-2-70b-hf --local-dir models/Llama-2-70b-hf, then model.path=models/Llama-2-70b-hf"),
        ("data.tokenizer=Qwen/Qwen3-8B", None, 'hf download Qwen/Qwen3-8B --include "*.json" --include "tokenizer*" --local-dir models/Qwen3-8B'),
    ],
)
def test_one_word(argument, key, value):
    if key is not None:
        assert get(compose([argument]), key) == value
        return
    with pytest.raises(ConfigError) as raised:
        compose([argument])
    assert value in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("train.epochs = 2", "train.epochs =: no spaces around the =; write train.epochs=2"),
        ("train.epochs =2", "train.epochs =2: no spaces around the =; write train.epochs=2"),
        ("train.epochs= 2", "train.epochs= 2: a setting is one word; write train.epochs=2"),
        ("train.epochs 2", "train.epochs 2: a setting is one word; write train.epochs=2"),
        ("train.epochs", "train.epochs: a setting is one word; write train.epochs=VALUE"),
        ("data.inputs=[a.jsonl, b.jsonl]", "the shell cuts at spaces, so put the setting in quotes: 'data.inputs=[a.jsonl, b.jsonl]'"),
        ("data.columns={text: body} run.name=x", "put the setting in quotes: 'data.columns={text: body}'"),
        ("run.name=x data.inputs=[a.jsonl", "'data.inputs=[a.jsonl'"),
    ],
)
def test_words_that_the_shell_has_cut(words, line, capsys):
    for expand in (list, lambda arguments: pytest.fail("a cut setting was taken for a run folder")) if "=[" not in words and "={" not in words else (list,):
        assert main_with_clear_errors("", (), lambda config: 0, words.split(), expand) == 2
        error = capsys.readouterr().err
        assert line in error and error.count("\n") == 1


def test_an_empty_value_before_a_file_is_no_slip(tmp_path):
    (tmp_path / "mine.yaml").write_text("train: {epochs: 3}\n")
    assert compose(["tracking.mlflow=", str(tmp_path / "mine.yaml")]).train.epochs == 3


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train:\n\tepochs: 2\n", "mine.yaml, line 2: a tab; YAML indents with spaces"),
        ("train:\n  epochs: 2\n\tsteps: 3\n", "mine.yaml, line 3: a tab; YAML indents with spaces"),
        ("train:\n  epochs: [2\n", "mine.yaml, line 3: not valid YAML: "),
        ("cluster: {workers: 8,16}\n", "unknown key"),
        ("data: {inputs: 'a,b'}\n", "'data.inputs=[a,b]'"),
    ],
)
def test_files(tmp_path, text, line):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        compose([str(tmp_path / "mine.yaml")])
    assert line in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_may_give_one_value_for_a_list(tmp_path):
    (tmp_path / "mine.yaml").write_text("cluster: {workers: 3}\ndata: {inputs: contracts}\n")
    config = compose([str(tmp_path / "mine.yaml")])
    assert config.cluster.workers == [3, 3] and config.data.inputs == ["contracts"]


def test_a_folder_that_is_there_is_no_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for value in (None, "models/llama", "/abs/llama", "a/b/c", "s3://bucket/llama", "../x/y", "train"):
        check_folder_of_a_model("model.path", value)
    check_folder_of_a_model("run.name", "org/model")
    with pytest.raises(ConfigError, match="hf download org/model"):
        check_folder_of_a_model("evaluation.base", "org/model")


@pytest.mark.parametrize("sections", [("run", "data", "model", "train", "checkpoint", "cluster", "budget"), ("data", "cluster", "run"), ("sweep", "run", "data", "train")])
def test_help_begins_with_what_people_change(sections):
    text = help_text("usage: x", sections)
    first = [line.split("=")[0].strip() for line in text.split("All keys:")[0].splitlines() if line.startswith("  ")]
    assert first == [key for key in COMMON[sections[0]] if key.split(".")[0] in sections] and len(first) <= 15
    assert all(len(line) <= 140 for line in text.splitlines())
    assert {key for keys in COMMON.values() for key in keys} <= set(known_keys())


def test_verify_takes_a_run_folder_as_the_other_jobs_do(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "jobs/verify.py", tmp_path / "nowhere"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and f"{tmp_path / 'nowhere'}: no such run folder" in done.stderr
