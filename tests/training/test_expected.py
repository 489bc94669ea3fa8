import pytest

from raytune70b.config import compose, to_yaml
from raytune70b.storage import Folder
from raytune70b.training.checkpoint import Cursor
from raytune70b.training.expected import SETUP_S, expectation, fitted
from tests.conftest import publish, write_blocks

BUDGET = ["budget.usd=1", "budget.price_per_gpu_hour=2", "budget.fit_schedule=true"]


@pytest.fixture
def manifest(tmp_path):
    return write_blocks(Folder(tmp_path / "data"), {"train": [8], "validation": [2]})


def test_a_fitted_schedule_costs_what_the_budget_allows_and_a_resumed_run_keeps_it(tmp_path, manifest):
    config, run = compose([f"run.path={tmp_path}", *BUDGET]), Folder(tmp_path / "default")
    plan = expectation(config, manifest, 10**6)
    steps = fitted(config, run, manifest, 10**6).train.steps
    seconds = 1 / 2 / config.cluster.workers[1] * 3600
    a_step = plan["step_seconds"] + plan["validation_s"] / config.validation.every
    assert seconds - a_step < steps * a_step + 2 * SETUP_S + 2 * plan["validation_s"] <= seconds
    assert fitted(config, run, manifest, 100).train.steps == 100
    started = fitted(config, run, manifest, 10**6)
    run.write("config.yaml", to_yaml(started).encode())
    config.budget.usd = 2
    assert fitted(config, run, manifest, 10**6).train.steps > 1.9 * steps, "nothing is trained yet: a mended budget counts"
    publish(run / "checkpoints", Cursor(step=1, fingerprint={"train.steps": steps}))
    assert fitted(config, run, manifest, 10**6).train.steps == steps


def test_the_expectation_multiplies_out(manifest):
    config = compose(["budget.price_per_gpu_hour=3"])
    plan = expectation(config, manifest, 1000)
    validations = 1 + 999 // config.validation.every + 1
    assert plan["hours"] * 3600 == pytest.approx(1000 * plan["step_seconds"] + validations * plan["validation_s"])
    assert plan["usd"] == pytest.approx(plan["hours"] * 3 * config.cluster.workers[1])
    per_step = config.train.global_batch_size * manifest.seq_len
    assert plan["tokens_per_s"] == pytest.approx(per_step / plan["step_seconds"], rel=0.01)
    assert plan["mfu"] == pytest.approx(plan["tokens_per_s"] * plan["flops_per_token"] / (config.cluster.workers[1] * plan["peak_flops"]), rel=0.01)
    assert "usd" not in expectation(compose([]), manifest, 1000)
