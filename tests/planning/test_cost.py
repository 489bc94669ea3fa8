"""Prices, checkpoint intervals and the expected loss to failures."""

import math

import numpy as np
import pytest

from raytune70b.config import compose
from raytune70b.planning.cost import PriceError, read_prices, young_daly_interval
from raytune70b.planning.plan import build_plan


def expected_seconds(interval, stall, mtbf, work=1e6):
    """Daly's exact expectation for exponential failures: wall-clock for `work` seconds of training, recovery left out."""
    return mtbf * (math.exp((interval + stall) / mtbf) - 1) * work / interval


@pytest.mark.parametrize("stall", [0.2, 5.0, 60.0, 600.0])
@pytest.mark.parametrize("mtbf_hours", [1, 24, 200])
def test_interval_loses_the_least_time(stall, mtbf_hours):
    mtbf = mtbf_hours * 3600.0
    best = min(expected_seconds(x, stall, mtbf) for x in np.geomspace(1, mtbf, 4000))
    assert expected_seconds(young_daly_interval(stall, mtbf), stall, mtbf) <= best * 1.0005


def test_interval_at_the_edges():
    assert young_daly_interval(0.0, 3600.0) == 0.0
    assert young_daly_interval(8000.0, 3600.0) == 3600.0
    assert young_daly_interval(1.0, 720000.0) == pytest.approx(math.sqrt(2 * 720000.0), rel=0.01)


def test_cost_adds_up():
    plan = build_plan(compose(["conf/recipe/compliance.yaml"]))
    own = plan.costs[0]
    assert own.gpu_hours == pytest.approx(16 * 72)
    assert own.compute == pytest.approx(2304)  # 16 GPUs x 72 h x 2.00 USD
    assert own.total == own.compute + own.storage + own.egress
    assert own.egress == pytest.approx(70.553706496 * 2 * 0.09)
    assert 0 < own.lost < 0.05 * own.compute
    assert {c.offer.usd_per_gpu_hour for c in plan.costs} >= {2.0, 4.34, 98 / 8, 130 / 8}


def test_more_failures_cost_more_and_ask_for_more_checkpoints():
    steady, shaky = (build_plan(compose(["conf/recipe/cognistream.yaml", f"cluster.mtbf_hours={h}"])) for h in (1000, 10))
    assert shaky.losses.goodput < steady.losses.goodput < 1
    assert shaky.checkpoint.every_steps < steady.checkpoint.every_steps
    assert shaky.losses.failures == pytest.approx(100 * steady.losses.failures)


def test_validation_takes_its_forward_passes():
    """With activations computed again a training step makes four passes, a validation one of them."""
    plan = build_plan(compose(["conf/recipe/legalfin.yaml", "train.steps=1001"]))
    per_token = plan.throughput.step_seconds / (128 * 4096)
    assert plan.validation.seconds == pytest.approx(512 * 4096 * per_token / 4)
    assert plan.validation.total(1001) == pytest.approx(7 * plan.validation.seconds), "before the first step, after 200, 400, 600, 800, 1000 and at the end"
    busy = 1001 * plan.throughput.step_seconds + plan.validation.total(1001)
    assert plan.schedule.hours == pytest.approx(busy / 3600 / plan.losses.kept)
    assert plan.losses.kept - plan.losses.goodput == pytest.approx(plan.losses.validation) and plan.losses.validation > 0
    uneven = build_plan(compose(["conf/recipe/legalfin.yaml", "hardware.nodes=3"]))  # a step's micro-batches have empty places, a validation's have not
    assert uneven.validation.seconds == pytest.approx(plan.validation.seconds * 2 / 3, rel=0.02)
    none = build_plan(compose(["conf/recipe/legalfin.yaml", "validation.every=0", "validation.at_start=false"]))
    assert none.validation.total(1001) == none.validation.seconds


def test_what_the_budget_buys_is_what_fits_with_its_validations():
    plan = build_plan(compose(["conf/recipe/legalfin.yaml"]))
    seconds = plan.schedule.budget_hours * 3600 * plan.losses.kept
    bought = plan.schedule.budget_steps
    assert bought * plan.throughput.step_seconds + plan.validation.total(bought) <= seconds * (1 + 1e-9)
    more = bought + 2
    assert more * plan.throughput.step_seconds + more / plan.validation.every * plan.validation.seconds + 2 * plan.validation.seconds > seconds
    unbounded = build_plan(compose(["conf/recipe/legalfin.yaml", "validation.max_blocks=null"]))
    assert unbounded.validation.blocks == round(125e9 * 0.05 / 4096) and unbounded.schedule.budget_steps < 10


def test_what_a_run_reserves_and_keeps_for_ever_is_planned():
    plan, reserved = (build_plan(compose(["conf/recipe/legalfin.yaml", f"budget.reserve_minutes={m}"])) for m in (0, 600))
    assert plan.schedule.budget_hours - reserved.schedule.budget_hours == pytest.approx(10.0)
    kept = build_plan(compose(["conf/recipe/legalfin.yaml", "checkpoint.keep_every=50"]))
    assert kept.disk > 80e12 and kept.verdict == "does not fit"
    nothing = build_plan(compose(["conf/recipe/leximind.yaml", "claims.corpus_gb=null", "validation.max_blocks=null", "budget.hours=0.001"]))
    assert nothing.schedule.budget_steps == 0


def test_checkpoints_hold_what_training_changes():
    full = build_plan(compose(["conf/recipe/cognistream.yaml"]))
    assert full.checkpoint.bytes == pytest.approx(68.976648192e9 * (2 + 8), rel=1e-4)  # bf16 weights, fp32 moments
    adapters = build_plan(compose(["conf/recipe/synergy.yaml"]))
    assert adapters.checkpoint.bytes == pytest.approx(adapters.workload.trained_parameters * 12, rel=1e-3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x,-1,GPU-hour,1,2026-01-01,s", "asks -1 USD; a price is above 0"),
        ("x,nan,GPU-hour,1,2026-01-01,s", "a price is above 0"),
        ("x,2,GPU-hour,0,2026-01-01,s", "is no offer"),
        ("x,two,GPU-hour,1,2026-01-01,s", "is no offer"),
    ],
)
def test_a_price_that_is_none_is_refused(tmp_path, line, message):
    path = tmp_path / "prices.csv"
    path.write_text(f"offer,usd,per,gpus,date,source\n{line}\n")
    with pytest.raises(PriceError, match=message):
        read_prices(path)


def test_a_missing_price_list_is_named():
    with pytest.raises(PriceError, match=r"budget.price_list: .*none.csv cannot be read"):
        build_plan(compose(["conf/recipe/compliance.yaml", "budget.price_list=/none.csv"]))
