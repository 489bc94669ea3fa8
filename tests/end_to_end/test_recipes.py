"""The five case studies, laid small, run through the main job with their own method and end with a falling loss."""

import json
from statistics import mean

import pytest

from tests.running import ROOT, run_job


@pytest.mark.parametrize("recipe", ["legalfin", "leximind", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cognistream", "synergy", "compliance"))])
def test_a_tiny_run_of_the_recipe_learns(sample, tmp_path, recipe):
    files = [str(ROOT / "conf/recipe" / f"{recipe}.yaml"), str(ROOT / "conf/scale/tiny.yaml")]
    code, output = run_job("finetune", *files, f"data.path={sample}", f"run.path={tmp_path}", "tracking.mlflow=null", timeout=600)
    assert code == 0, output
    records = [json.loads(line) for line in (tmp_path / recipe / "journal.jsonl").read_text().splitlines()]
    losses = [r["loss"] for r in records if r["kind"] == "step"]
    validations = [r["loss"] for r in records if r["kind"] == "validation"]
    assert len(losses) == 40
    assert mean(losses[-5:]) < mean(losses[:5]) - 0.1
    assert validations[-1] < validations[0] - 0.1
