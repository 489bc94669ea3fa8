import math

import pytest

from raytune70b.training.guards import Guard


@pytest.mark.parametrize(("loss", "norm", "word"), [(math.nan, 1.0, "loss"), (math.inf, 1.0, "loss"), (1.0, math.nan, "gradient"), (1.0, math.inf, "gradient")])
def test_what_is_not_finite_is_skipped(loss, norm, word):
    guard = Guard(0.0, 2)
    assert word in guard.judge(loss, norm) and not guard.exhausted
    assert word in guard.judge(loss, norm) and guard.exhausted
    assert guard.judge(1.0, 1.0) is None and not guard.exhausted
    assert guard.recent == [1.0]


def test_a_spike_is_measured_against_the_recent_losses():
    guard = Guard(4.0, 5)
    for n in range(15):
        assert guard.judge(100.0 if n == 3 else 2.0 + 0.01 * (n % 3), 1.0) is None  # too early to judge
    guard = Guard(4.0, 5, [2.0 + 0.01 * (n % 3) for n in range(30)])
    assert guard.judge(2.03, 1.0) is None
    assert "deviations" in guard.judge(2.5, 1.0)
    assert 2.5 not in guard.recent and guard.judge(1.0, 1.0) is None, "a spike does not widen the measure, a fall is no spike"
    assert Guard(0.0, 5, [2.0] * 30).judge(9.0, 1.0) is None, "0 never skips a finite loss"


def test_a_resumed_guard_judges_as_an_undisturbed_one():
    whole, losses = Guard(3.0, 5), [3 - 0.01 * n + (0.5 if n % 23 == 22 else 0) for n in range(100)]
    verdicts = [whole.judge(loss, 1.0) for loss in losses]
    first = Guard(3.0, 5)
    head = [first.judge(loss, 1.0) for loss in losses[:60]]
    second = Guard(3.0, 5, list(first.recent), first.bad_in_a_row)
    assert head + [second.judge(loss, 1.0) for loss in losses[60:]] == verdicts
    assert sum(v is not None for v in verdicts) > 0
