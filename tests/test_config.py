import dataclasses
import io
import sys

import pytest
import yaml

from raytune70b.config import (
    CONF,
    ConfigError,
    UserError,
    commented_defaults,
    compose,
    differences,
    help_text,
    known_keys,
    main_with_clear_errors,
    to_dict,
    to_yaml,
)
from raytune70b.schema import Config
from raytune70b.tracking.console import Console


def test_the_embedded_default_is_the_schema():
    assert (CONF / "finetune.yaml").read_text() == commented_defaults(), "run `python -m raytune70b.config`"
    assert compose([str(CONF / "finetune.yaml")]) == Config() == compose([])


def test_every_key_has_its_documentation_and_its_comment():
    lines = [line.strip() for line in (CONF / "finetune.yaml").read_text().splitlines()]
    settings = [n for n, line in enumerate(lines) if line and not line.startswith("#") and not line.endswith(":")]
    assert [lines[n].split(":")[0] for n in settings] == [key.split(".")[-1] for key in known_keys()]
    assert all(lines[n - 1].startswith("# ") for n in settings)
    shown = help_text("usage: x", tuple(f.name for f in dataclasses.fields(Config)))
    assert all(f"  {key}=" in shown for key in known_keys())


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("train.lr=3e-4", ["train.lr", "train.learning_rate"]),
        ("trian.epochs=2", ["trian.epochs", "train.epochs"]),
        ("train.epochs=many", ["train.epochs", "many"]),
        ("train.epochs=0", ["train.epochs", "0", "least is 1"]),
        ("model.method=lorra", ["model.method", "lorra", "lora"]),
        ("train.global_batch_size=10", ["train.micro_batch_size", "4", "10"]),
        ("train.micro_batch_size=some", ["train.micro_batch_size", "some", "auto"]),
        ("cluster.workers=[3,1]", ["cluster.workers", "[3, 1]", "least"]),
        ("budget.usd=5000", ["budget.usd", "price_per_gpu_hour"]),
        ("data=3", ["data"]),
        ("conf/finetuen.yaml", ["finetuen", "finetune"]),
        ("=3", ["=3"]),
        ("budget.hours=nan", ["budget.hours", "nan", "finite"]),
        ("train.max_grad_norm=inf", ["train.max_grad_norm", "inf", "finite"]),
        ("sweep.batch_factors=[2.0,nan]", ["sweep.batch_factors", "nan", "finite"]),
        ("cluster.workers[0]=1", ["cluster.workers[0]=1"]),
        ("run.seed=9999999999999999999999", ["run.seed", "most"]),
        ("run.name=''", ["run.name", "one folder"]),
        ("sweep.name=a/b", ["sweep.name", "a/b", "one folder"]),
        (f"run.name={'n' * 300}", ["run.name", "300 bytes", "200"]),
        (f"sweep.name={'é' * 150}", ["sweep.name", "300 bytes", "200"]),
        *((f"run.path='/disk/a{odd}b'", ["run.path", f"/disk/a{odd}b", odd[0], "tracking.mlflow"]) for odd in ("?", "#", "%20")),
        ("sweep.low=1", ["sweep.low", "1", "0.048", "train.learning_rate=0.003"]),
        ("sweep.share=0.1", ["sweep.share", "0.1", "0.25", "sweep.data_fraction"]),
    ],
)
def test_mistakes_name_the_key_both_values_and_the_way_out(argument, words):
    with pytest.raises(ConfigError) as raised:
        compose([argument])
    message = str(raised.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.mark.parametrize("extends", ["", "5", "[recipe/legalfin, 3]"])
def test_what_extends_may_be(tmp_path, extends):
    (tmp_path / "mine.yaml").write_text(f"extends: {extends}\n")
    with pytest.raises(ConfigError, match="extends"):
        compose([str(tmp_path / "mine.yaml")])


def test_a_file_may_hold_nothing_of_its_own(tmp_path):
    (tmp_path / "mine.yaml").write_text("# later\nextends: recipe/legalfin\n")
    assert compose([str(tmp_path / "mine.yaml")]) == compose(["recipe/legalfin"])
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert compose([str(tmp_path / "empty.yaml")]) == Config()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sweep.usd=5", "budget.price_per_gpu_hour=0"], ["sweep.usd", "5", "budget.price_per_gpu_hour"]),
        (["sweep.low=1e-3", "sweep.high=1e-4"], ["sweep.low", "0.001", "0.0001"]),
        (["model.replicate=2", "cluster.workers=[3,4]"], ["model.replicate", "2", "[3, 4]"]),
        (["model.replicate=2", "cluster.workers=[2,4]", "sweep.workers=3"], ["sweep.workers", "3", "multiple", "2"]),
    ],
)
def test_settings_that_contradict_each_other(arguments, words):
    with pytest.raises(ConfigError) as raised:
        compose(arguments)
    assert all(word in str(raised.value) for word in words), raised.value


def test_layers_lie_over_each_other(tmp_path):
    (tmp_path / "base.yaml").write_text("train: {epochs: 2, learning_rate: 0.5}\n")
    (tmp_path / "top.yaml").write_text("extends: base.yaml\ntrain: {learning_rate: 0.25}\n")
    config = compose([str(tmp_path / "top.yaml"), "train.epochs=7"])
    assert (config.train.epochs, config.train.learning_rate) == (7, 0.25)
    assert compose(["train.epochs=7", str(tmp_path / "top.yaml")]).train.epochs == 7  # an override lies over every file


def test_another_architecture_replaces_the_whole_model_config():
    assert compose(["model.config={model_type: gpt2, n_embd: 8}"]).model.config == {"model_type": "gpt2", "n_embd": 8}
    assert compose(["model.config.hidden_size=32"]).model.config["num_hidden_layers"] == 2


def test_circles_and_broken_files(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    (tmp_path / "c.yaml").write_text("train: [\n")
    (tmp_path / "d.yaml").write_text("- 1\n")
    for name, word in {"a": "extends itself", "c": "not valid YAML", "d": "mapping"}.items():
        with pytest.raises(ConfigError, match=word):
            compose([str(tmp_path / f"{name}.yaml")])


def test_the_resolved_configuration_comes_back_equal(tmp_path):
    config = compose(["train.learning_rate=1e-5", "cluster.workers=[1,3]", "model.config.model_type=mistral"])
    (tmp_path / "resolved.yaml").write_text(to_yaml(config))
    assert compose([str(tmp_path / "resolved.yaml")]) == config
    assert yaml.safe_load(to_yaml(config)) == to_dict(config)


def test_differences_name_key_and_both_values():
    old, new = to_dict(compose([])), to_dict(compose(["train.epochs=3", "run.name=x"]))
    assert differences(old, new, ("train.",)) == ["train.epochs: 1 -> 3"]


def test_a_character_that_the_output_lacks_silences_nothing_after_it(monkeypatch):
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="latin-1") for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)

    def job(config):
        console = Console(10, False, 0.0)
        console.say("checkpoint of step 5 failed: /läufe/法律")
        console.say("step 6/10")
        raise UserError("法律: no such folder")

    assert main_with_clear_errors("", (), job, []) == 2
    for stream, text in ((out, "checkpoint of step 5 failed: /läufe/??\nstep 6/10\n"), (err, "error: ??: no such folder\n")):
        stream.flush()
        assert stream.buffer.getvalue().decode("latin-1") == text
