"""The decision to stop, on runs played through second by second."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytune70b.config import ConfigError, UserError, compose
from raytune70b.schema import Budget
from raytune70b.tracking.cost import Spent, outlook, spent
from raytune70b.tracking.goodput import timeline, worker_seconds
from raytune70b.training.budget import Clock, Stopper, affordable_steps, check_left, seconds_allowed
from tests.tracking.run_of_records import T0, Story


def play(clock, now, step_s, save_s, validation_s, save_every, limit=10_000):
    """Trains until the clock says stop, then saves and validates what is not saved yet. Returns (end, steps, reason)."""
    steps, saved, reason = 0, 0, None
    while steps < limit and (reason := clock.stop(now, step_s)) is None:
        now, steps = now + step_s, steps + 1
        if steps % save_every == 0:
            now, saved = now + save_s + validation_s, steps
            clock.learn({"kind": "checkpoint", "seconds": save_s})
            clock.learn({"kind": "validation", "seconds": validation_s})
    return now + (save_s + validation_s if steps > saved else 0), steps, reason


@settings(max_examples=200)
@given(
    st.integers(1, 16), st.floats(0.5, 20), st.floats(0.1, 30), st.floats(0.0, 30), st.integers(1, 20),
    st.floats(0.05, 3), st.booleans(), st.floats(0, 200), st.floats(0, 2), st.booleans(),
)  # fmt: skip
def test_no_limit_is_passed_by_more_than_a_step_and_a_save(world_size, step_s, save_s, validation_s, save_every, size, by_hours, used, reserve, measured):
    allowed = size / 10 * 3600 if by_hours else size / 2.0 * 3600 / world_size
    budget = Budget(hours=size / 10 if by_hours else None, usd=None if by_hours else size, price_per_gpu_hour=2.0, reserve_minutes=reserve)
    before = Story().start().group(world_size, 0, 0, 0).validation(0, validation_s).wait(used).group_end("killed")
    if measured:
        before.checkpoint(0, 0.0, save_s)
    begin = before.clock - T0
    clock = Clock.from_journal(budget, before.records, before.clock, world_size)
    end, steps, reason = play(clock, before.clock, step_s, save_s, validation_s, save_every, limit=5_000)
    if reason is None:
        return
    assert reason.startswith("budget.hours" if by_hours else "budget.usd")
    known = measured or steps >= save_every
    if steps:
        assert end - T0 <= allowed + (0 if measured else step_s + save_s) + 1e-3
        assert end - T0 + 60 * reserve >= allowed - step_s - (save_s + validation_s if known else 0) - 1e-3  # nor does it stop too early
    else:
        assert begin + step_s + 60 * reserve + validation_s + (save_s if measured else 0) >= allowed - 1e-3


def test_a_run_that_waits_without_a_step_is_stopped_too(monkeypatch):
    monkeypatch.setattr("raytune70b.training.budget.LOOK_EVERY_S", 0.02)
    asked, now = [], time.time()
    history = [{"kind": "run_start", "time": now - 4000, "launch": 1}, {"kind": "wait", "time": now, "launch": 1, "reason": "2 workers wanted"}]
    Stopper(Budget(hours=4001 / 3600), history, asked.append)
    idle = Stopper(Budget(hours=4001 / 3600), [*history, {"kind": "run_end", "time": now, "launch": 1}], asked.append)
    time.sleep(0.3)
    assert asked == []
    time.sleep(2)
    assert [reason.partition(":")[0] for reason in asked] == ["budget.hours"] and not idle._asked


@pytest.mark.parametrize(("step_s", "hours", "asked"), [(100.0, 1300, True), (100.0, 1301, False), (0.5, 1003, True), (0.5, 1004, False)])
def test_the_decision_comes_three_steps_ahead_for_workers_obey_it_later(step_s, hours, asked):
    """A step has ended at 1,000 s: steps of 100 s end at 1,100, 1,200 and 1,300 s before the workers stop; of short steps three seconds pass."""
    records = [{"kind": "run_start", "time": 0.0, "launch": 1}, {"kind": "group_start", "time": 0.0, "launch": 1, "attempt": 1, "world_size": 2}]
    reasons: list[str] = []
    stopper = Stopper(Budget(hours=hours / 3600 - 1e-9 if asked else hours / 3600), records, reasons.append)
    stopper.put({"kind": "step", "step": 1, "time": 1000.0, "launch": 1, "attempt": 1, "seconds": step_s, "loss": 1.0})
    assert bool(reasons) == asked
    stopper._asked = True  # ends its thread


def test_without_limits_a_run_never_stops():
    assert play(Clock(Budget(), Spent(0, 0, T0, 4), 4), T0, 1.0, 1.0, 1.0, 10, limit=500)[1:] == (500, None)
    assert seconds_allowed(Budget(price_per_gpu_hour=3.0), Spent(0, 0, 0, 1), 1) is None


def test_money_follows_the_workers_held_over_launches_faults_and_resizes():
    story = Story().start().group(4, 0, 10, 10).steps(1, 100).group_end("lost").group(2, 100, 5, 5).steps(101, 200).end()
    story.wait(36_000).start().group(2, 200, 5, 5)
    used = spent(story.records)
    assert used.seconds == pytest.approx(20 + 100 + 10 + 100 + 10)
    assert used.worker_seconds == pytest.approx(4 * (20 + 100 + 5) + 2 * (5 + 100 + 10))
    clock = Clock(Budget(usd=1.0, price_per_gpu_hour=3.6), used, 2)  # 0.001 USD a worker-second
    left = (1000 - used.worker_seconds) / 2
    assert clock.stop(used.at + left - 1.1, 1.0) is None
    assert clock.stop(used.at + left - 0.9, 1.0) == "budget.usd: $1.00 of $1.00 are spent and closing costs $0.00 more"


def test_waiting_for_the_first_workers_costs_what_they_do():
    """Sixteen were rented; that they are not all there yet is no reason to count one."""
    story = Story().start(config={"cluster": {"workers": [16, 32]}}).wait(3600)
    story.add("wait", reason="there is no room for 16 workers")
    used = spent(story.records)
    assert used.worker_seconds == 16 * 3600 == worker_seconds(timeline(story.records))
    assert Clock.from_journal(Budget(usd=31, price_per_gpu_hour=2), story.records, used.at, used.world_size).stop(used.at, 1.0)
    assert Clock.from_journal(Budget(usd=33, price_per_gpu_hour=2), story.records, used.at, used.world_size).stop(used.at, 1.0) is None
    story.group(32, 0, 0, 0)
    assert spent(story.records).worker_seconds == 32 * 3600


def test_the_outlook_projects_time_and_money():
    so_far = Spent(3600.0, 16 * 3600.0, T0, 16)
    values = outlook(Budget(hours=4, usd=100, price_per_gpu_hour=2.5), so_far, seconds_left=3600)
    assert values == {"hours": 1.0, "projected_hours": 2.0, "usd": 40.0, "projected_usd": 80.0, "budget_share": 0.4}


def test_a_schedule_that_fits_the_budget_ends_inside_it():
    budget = Budget(usd=10.0, price_per_gpu_hour=2.0, reserve_minutes=5)
    steps = affordable_steps(budget, 4, seconds_per_step=3.0, setup_seconds=120, closing_seconds=60)
    assert steps == int((10 / 2 / 4 * 3600 - 120 - 60 - 300) / 3.0)
    assert affordable_steps(budget, 4, 3.0, 120, 60, losses=0.1) == int((4500 - 480) * 0.9 / 3.0)
    assert affordable_steps(Budget(), 4, 3.0, 0, 0) is None and affordable_steps(Budget(hours=0.001), 4, 3.0, 60, 60) == 1


@pytest.mark.parametrize("overrides", [["budget.usd=5"], ["budget.fit_schedule=true"], ["budget.hours=0"], ["budget.reserve_minutes=-1"]])
def test_budgets_that_make_no_sense_are_refused(overrides):
    with pytest.raises(ConfigError, match=r"^budget\."):
        compose(overrides)


@pytest.mark.parametrize(("used", "refused"), [(80.0, False), (86.0, True), (90.0, True)])
def test_a_start_that_could_only_stop_again_is_refused(used, refused):
    """A run that was stopped in time has some seconds left, which its closing and the word of it need."""
    records = [
        {"kind": "run_start", "time": 0.0, "launch": 1}, {"kind": "group_start", "time": 1.0, "launch": 1, "attempt": 1, "world_size": 2},
        {"kind": "checkpoint", "time": 5.0, "launch": 1, "attempt": 1, "seconds": 2.0}, {"kind": "run_end", "time": used, "launch": 1, "status": "stopped"},
    ]  # fmt: skip
    budget = Budget(hours=90 / 3600)
    if refused:
        with pytest.raises(UserError, match=r"budget\.hours: earlier launches of this run have used it up"):
            check_left(budget, records)
    else:
        check_left(budget, records)
