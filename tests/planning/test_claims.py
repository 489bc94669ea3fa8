"""The case studies' arithmetic, computed by the plan itself."""

import pytest

from raytune70b.config import compose
from raytune70b.planning.claims import check_claims, least_flops_per_token, needed_for_one_pass, share_of_peak, share_seen
from raytune70b.planning.plan import build_plan


def plan_of(recipe, *overrides):
    return build_plan(compose([f"conf/recipe/{recipe}.yaml", *overrides]))


def claims_of(recipe, *overrides):
    return {claim.figure: claim for claim in check_claims(plan_of(recipe, *overrides))}


def test_one_pass_over_500_gb_in_72_hours():
    plan = plan_of("compliance", "claims.corpus_tokens=null", "claims.corpus_gb=500")
    needed = needed_for_one_pass(plan, 72)
    assert plan.schedule.corpus_tokens == 125e9
    assert round(needed) == 30141
    assert share_of_peak(plan, needed) == pytest.approx(12.9, abs=0.05)
    seen = [share_seen(plan, speed, 72) for speed in (1150, 1800, 2450)]
    assert [round(100 * share, 1) for share in seen] == [3.8, 6.0, 8.1]


def test_claimed_speeds_against_the_peak():
    plan = plan_of("compliance")
    assert 2450 * least_flops_per_token(plan.workload) / 1e12 == pytest.approx(1037, abs=1)
    assert [round(100 * share_of_peak(plan, speed)) for speed in (2450, 1800, 1150)] == [105, 77, 49]
    assert 700 <= plan.throughput.likely <= 900


def test_what_cannot_be_is_said_to_be_impossible():
    claims = claims_of("compliance")
    assert claims["tokens/s/GPU"].possible == "no" and "1,037 TFLOP/s, 105% of the bf16 peak" in claims["tokens/s/GPU"].why
    assert claims["MFU"].possible == "no" and "contradict" in claims["MFU"].why
    assert claims["compute cost"].possible == "no" and claims["compute cost"].planned == "2,304 USD"
    assert "2.0 times that: it counts the machines twice" in claims["compute cost"].why


def test_what_is_out_of_reach_is_unlikely():
    assert claims_of("cognistream")["tokens/s/GPU"].possible == "unlikely"
    assert claims_of("legalfin")["tokens/s/GPU"].possible == "unlikely"
    assert "30,141 tokens/s/GPU" in claims_of("legalfin")["corpus seen"].why


def test_what_is_possible_is_granted():
    assert claims_of("synergy")["tokens/s/GPU"].possible == "yes"
    assert claims_of("leximind")["tokens/s/GPU"].possible == "yes"
    assert claims_of("cognistream")["GPU memory use"].possible == "yes"
    assert claims_of("cognistream")["cost"].possible == "yes"
    assert claims_of("cognistream", "claims.tokens_per_s_per_gpu=800")["tokens/s/GPU"].possible == "yes"


def test_instance_prices_disagree():
    planned = {recipe: claims_of(recipe)["hyperscaler cost"].planned for recipe in ("cognistream", "synergy", "legalfin", "compliance")}
    assert planned == {"cognistream": "7,075 USD", "synergy": "7,056 USD", "legalfin": "18,720 USD", "compliance": "14,112 USD"}


def test_no_claims_no_table():
    assert check_claims(build_plan(compose([]))) == []
