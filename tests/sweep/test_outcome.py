import math

from raytune70b.sweep.trials import outcome


def journal(losses, skipped_last=0, total=8):
    records = [{"kind": "group_start", "resumed_step": 0}]
    records += [{"kind": "step", "step": n + 1, "tokens": 10, "skipped": n >= total - skipped_last} for n in range(total)]
    return records + [{"kind": "validation", "step": round(share * total), "loss": loss} for share, loss in losses]


def test_a_run_that_ended_with_a_lower_loss_is_finished():
    found = outcome(journal([(0, 5.0), (0.5, 4.0), (1, 3.0)]), 8, 1000, {"status": "finished", "reason": ""})
    assert (found["status"], found["loss"], found["tokens"], found["curve"]) == ("finished", 3.0, 80, [(0.0, 5.0), (0.5, 4.0), (1.0, 3.0)])


def test_what_is_not_finite_or_not_below_the_start_has_diverged():
    for losses in ([(0, 5.0), (1, None)], [(0, 5.0), (1, math.nan)], [(0, 5.0), (0.5, 4.0), (1, 5.0)]):
        assert outcome(journal(losses), 8, 1000, {"status": "finished", "reason": ""})["status"] == "diverged"
    bad_steps = outcome(journal([(0, 5.0)], skipped_last=5), 8, 1000, {"status": "failed", "reason": "UserError: 5 bad steps in a row"})
    assert bad_steps["status"] == "diverged" and "step 8" in bad_steps["reason"]


def test_other_failures_keep_their_reason():
    found = outcome(journal([(0, 5.0)]), 8, 1000, {"status": "failed", "reason": "OutOfMemoryError"})
    assert (found["status"], found["reason"], found["loss"]) == ("failed", "OutOfMemoryError", None)


def test_weights_that_have_grown_out_of_all_bounds_have_diverged():
    """A learning rate of 10,000 ends, finite, at ln(vocabulary), which may lie a hair below the start from random weights."""
    found = outcome(journal([(0, math.log(1000) + 1e-3), (0.5, math.log(1000)), (1, math.log(1000) - 1e-7)]), 8, 1000, {"status": "finished", "reason": ""})
    assert found["status"] == "diverged" and "same chance" in found["reason"]
    assert outcome(journal([(0, math.log(1000)), (1, math.log(1000) - 0.01)]), 8, 1000, {"status": "finished", "reason": ""})["status"] == "finished"
