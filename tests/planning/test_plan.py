"""`jobs/plan.py` as a user runs it: the five recipes, its outputs, its speed, and one clear line for nonsense."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from raytune70b.config import compose
from raytune70b.planning.changes import useful_changes
from raytune70b.planning.plan import build_plan
from raytune70b.planning.report import main

ROOT = Path(__file__).parents[2]
RECIPES = ("cognistream", "synergy", "legalfin", "leximind", "compliance")
SNAPSHOT = {
    # verdict, GiB a GPU, likely tokens/s/GPU, steps inside the budget, whether that is the whole run
    "cognistream": ("fits", 65, 801, 6285, False),
    "synergy": ("fits", 23, 968, 7591, False),
    "legalfin": ("fits", 65, 801, 5938, False),
    "leximind": ("fits", 41, 706, 1389, False),
    "compliance": ("does not fit", 98, 779, 3053, False),
}


def recipe(name, *overrides):
    return compose([str(ROOT / f"conf/recipe/{name}.yaml"), *overrides])


@pytest.mark.parametrize("name", RECIPES)
def test_verdicts_of_the_recipes(name):
    plan = build_plan(recipe(name))
    found = (plan.verdict, round(plan.memory.total / 2**30), round(plan.throughput.likely), plan.schedule.budget_steps, plan.schedule.within_budget)
    assert found == SNAPSHOT[name]


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_run_tiny_with_their_own_method(name):
    full, tiny = recipe(name), recipe(name, str(ROOT / "conf/scale/tiny.yaml"))
    for section, keys in {"model": ("method", "precision", "sharding", "activation_checkpointing"), "train": ("optimizer", "schedule")}.items():
        for key in keys:
            assert getattr(getattr(tiny, section), key) == getattr(getattr(full, section), key)
    assert tiny.model.config["hidden_size"] == 64 and tiny.cluster.workers == [2, 2]
    assert build_plan(tiny).verdict == "fits"


def test_changes_for_what_does_not_fit_are_ranked_and_hold():
    plan = build_plan(recipe("compliance"))
    changes = useful_changes(plan)
    assert changes and all(c.plan.verdict != "does not fit" for c in changes)
    assert "model.sharding=fsdp train.optimizer=adamw_8bit" in [c.command for c in changes]
    for change in changes:  # the settings, typed as they are shown, give what was promised
        again = build_plan(recipe("compliance", *change.command.split()))
        assert again.memory.total == change.plan.memory.total
        assert again.throughput.likely == change.plan.throughput.likely


def test_changes_for_a_budget_that_ends_too_soon():
    plan = build_plan(recipe("cognistream"))
    first = useful_changes(plan)[0]
    assert first.settings == {"train.steps": plan.schedule.budget_steps}
    assert first.plan.schedule.within_budget
    assert "sees 2.6% of the corpus" in first.effect
    assert useful_changes(build_plan(recipe("cognistream", "train.steps=100"))) == []


def printed(capsys, *arguments):
    assert main("usage", list(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", RECIPES)
def test_tables(capsys, name):
    text = printed(capsys, f"conf/recipe/{name}.yaml")
    for part in ("verdict", "optimizer states", "tokens/s/GPU", "inside the budget", "checkpoint interval", "GPU-hours", "What would help", "Claims beside the plan"):
        assert part in text


def test_the_fewest_workers_are_told_and_that_the_job_would_refuse_fewer(capsys):
    text = printed(capsys, "conf/recipe/legalfin.yaml", "cluster.workers=[8,16]")
    assert "verdict: fits; but cluster.workers: the least is 8, but the run takes 13" in text and re.search(r"fewest GPUs that hold the run\W+13\b", text)
    assert "verdict: fits\n" in printed(capsys, "conf/recipe/legalfin.yaml", "cluster.workers=[13,16]")
    found = json.loads(printed(capsys, "conf/recipe/legalfin.yaml", "--json", "train.optimizer=adamw_8bit"))
    assert found["fewest_workers"] == 7


def test_json_holds_the_whole_plan(capsys):
    found = json.loads(printed(capsys, "conf/recipe/compliance.yaml", "--json", "budget.start=2026-12-01"))
    assert found["model"]["parameters"] == 70553706496
    assert found["verdict"] == "does not fit"
    assert sum(found["memory"]["parts"].values()) == pytest.approx(found["memory"]["total"])
    assert found["schedule"]["end"] == "2026-12-15"
    assert found["changes"] and found["claims"]


def test_sweep_and_hardware_side_by_side(capsys):
    swept = json.loads(printed(capsys, "conf/recipe/cognistream.yaml", "--sweep", "model.method=full,lora,qlora", "--json"))
    assert [p["variant"] for p in swept] == ["model.method=full", "model.method=lora", "model.method=qlora"]
    totals = [p["memory"]["total"] for p in swept]
    assert totals == sorted(totals, reverse=True)
    files = [f"conf/hardware/{name}.yaml" for name in ("2x8-h100-sxm", "2x8-h200-sxm", "2x8-a100-80gb")]
    text = printed(capsys, "conf/recipe/cognistream.yaml", "--hardware", *files)
    assert all(Path(name).stem in text for name in files)


def test_picture(capsys, tmp_path):
    printed(capsys, "conf/recipe/compliance.yaml", "--picture", str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_data_set_counts_instead_of_a_claim(blocks):
    folder, manifest = blocks
    plan = build_plan(recipe("cognistream", f"data.path={folder.uri}"))
    assert plan.schedule.corpus_tokens == manifest.rows("train") * manifest.seq_len


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hardware.gpus_per_node=0"], "hardware.gpus_per_node: is 0; the least is 1"),
        (["hardware.gpu=H100-SXM"], "hardware.gpu: is 'H100-SXM', which gpus.csv does not hold; did you mean H100-SXM-80GB?"),
        (["budget.price_per_gpu_hour=-2"], "budget.price_per_gpu_hour: is -2.0; the least is 0"),
        (["data.seq_len=8192"], "data.seq_len: is 8192, the model's context is 4096; use blocks of at most 4096"),
        (["budget.start=soon"], "budget.start: is 'soon'; it takes a day as YYYY-MM-DD"),
        (["--sweep", "model.method"], "--sweep model.method: it takes KEY=A,B,C"),
        (["--jsn"], "--jsn: unknown option; there are --json"),
        (["--picture", "/nowhere/x.png"], "--picture /nowhere/x.png: cannot be written"),
        (["model.config.num_hidden_layers=null"], "model.config"),
    ],
)
def test_nonsense_gets_one_clear_line(capsys, arguments, message):
    assert main("usage", ["conf/recipe/cognistream.yaml", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


def test_validate_refuses_in_one_line(capsys, tmp_path):
    assert main("usage", ["validate"]) == 2
    assert main("usage", ["validate", str(tmp_path / "none.csv")]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_a_plan_needs_neither_torch_nor_ray_and_little_time():
    code = (
        "import resource, sys; from raytune70b.planning.report import main; code = main('', ['conf/recipe/compliance.yaml', '--json']);"
        "loaded = {'torch', 'ray', 'transformers'} & set(sys.modules);"
        "print(code, sorted(loaded), resource.getrusage(resource.RUSAGE_SELF).ru_utime, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    exit_code, loaded, seconds = done.stderr.split(maxsplit=2)
    assert (exit_code, loaded) == ("0", "[]")
    assert float(seconds) < 10
