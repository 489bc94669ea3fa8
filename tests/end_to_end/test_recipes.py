"""The five case studies, laid small, run through the main job with their own method and sharding and end with a falling loss."""

import json
from importlib.util import find_spec
from statistics import mean

import pytest

from tests.running import ROOT, run_job

DEEPSPEED = find_spec("deepspeed") is not None


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["cognistream", "synergy", "legalfin", "leximind", "compliance"])
def test_a_tiny_run_of_the_recipe_learns(sample, tmp_path, recipe):
    files = [str(ROOT / "conf/recipe" / f"{recipe}.yaml"), str(ROOT / "conf/scale/tiny.yaml")]
    sharding = () if DEEPSPEED else ("model.sharding=fsdp",)
    code, output = run_job("finetune", *files, *sharding, f"data.path={sample}", f"run.path={tmp_path}", "tracking.mlflow=null", timeout=600)
    assert code == 0, output
    assert "deprecated" not in output and "[WARNING]" not in output, "DeepSpeed is silent"
    records = [json.loads(line) for line in (tmp_path / recipe / "journal.jsonl").read_text().splitlines()]
    losses = [r["loss"] for r in records if r["kind"] == "step"]
    validations = [r["loss"] for r in records if r["kind"] == "validation"]
    assert len(losses) == 40
    assert mean(losses[-5:]) < mean(losses[:5]) - 0.1
    assert validations[-1] < validations[0] - 0.1
    if recipe in ("leximind", "compliance"):
        check_what_came_out(tmp_path / recipe, sample)


def check_what_came_out(run, data):
    """Trained by ZeRO-3 where it is installed: proved, and exported with its logits compared."""
    code, output = run_job("verify", f"run.path={run.parent}", f"run.name={run.name}", f"data.path={data}")
    assert code == 0 and "no gap, no repeat, no bad file" in output, output
    code, output = run_job("export", str(run), "export.register=null")
    assert code == 0 and (run / "export" / "model.safetensors").is_file(), output
