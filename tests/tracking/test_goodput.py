import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytune70b.tracking.cost import spent
from raytune70b.tracking.goodput import LABELS, goodput, running_seconds, timeline, totals, worker_seconds
from tests.tracking.run_of_records import T0, Story


def seconds(story, until=None):
    return {label: pytest.approx(s) for label, s in totals(timeline(story.records, until)).items() if s}


def test_an_undisturbed_run():
    story = Story().start().wait(4).group(2, 0, schedule_s=2, load_s=3).validation(0, 2).steps(1, 10).checkpoint(10, 0.25).validation(10, 2).wait(1).end()
    assert seconds(story) == {"setup": 10, "train": 10, "checkpoint stall": 0.25, "evaluation": 4}


def test_a_fault_makes_lost_work_and_recovery_and_a_resize_only_recovery():
    story = Story().start().group(4, 0, 2, 3).steps(1, 5).checkpoint(5, 0.5).steps(6, 8).wait(7).group_end("a node died")
    story.wait(1).add("wait", reason="4 workers wanted, 2 there")
    story.wait(20).group(2, 5, 0, 3).steps(6, 10).group_end("resize")
    story.group(4, 10, 1, 1).steps(11, 12).end()
    assert seconds(story) == {"setup": 5, "train": 12, "checkpoint stall": 0.5, "lost work": 3, "recovery": 7 + 1 + 3 + 2, "wait for nodes": 20}
    assert goodput(timeline(story.records)) == pytest.approx(12 / (5 + 12 + 0.5 + 3 + 13 + 20))


def test_a_killed_driver_lived_until_its_last_record_and_what_it_had_not_saved_is_lost():
    story = Story().start().group(2, 0, 2, 3).steps(1, 9).wait(0.5)
    story.add("warning", text="the last sign of life")
    story.wait(100).start().group(2, 4, 2, 3).steps(5, 6)
    assert seconds(story) == {"setup": 5, "train": 4 + 0.5 + 2, "lost work": 5, "not running": 100, "recovery": 5}
    assert seconds(story, until=story.clock + 30)["train"].expected == pytest.approx(36.5)  # still going on


def test_a_save_committed_steps_later_pays_for_the_gap_after_its_own_step():
    story = Story().start().group(2, 0, 0, 1).steps(1, 3).wait(0.5).steps(4, 6)
    story.add("checkpoint", attempt=1, step=3, stall_s=0.4, seconds=2.9, bytes=1, path="p")
    story.steps(7, 8).end()
    assert seconds(story) == {"setup": 1, "checkpoint stall": 0.4, "train": 8.1}


def test_workers_held_are_priced_and_the_time_between_launches_is_not():
    story = Story().start().wait(6).group(4, 0, 2, 2).steps(1, 10).group_end("lost two").group(2, 10, 5, 5).steps(11, 20).end()
    story.wait(1000).start().group(2, 20, 1, 1).steps(21, 22).end()
    held = 4 * (6 + 2 + 2 + 10 + 5) + 2 * (5 + 10) + 2 * 4
    assert worker_seconds(timeline(story.records)) == pytest.approx(held)
    assert running_seconds(timeline(story.records)) == pytest.approx(6 + 4 + 10 + 10 + 10 + 4)


@st.composite
def stories(draw):
    """Runs with launches, faults, resizes, waits, saves, clocks that jump back; records may arrive late."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    story, saved = Story(), 0
    for _ in range(draw(st.integers(1, 3))):
        story.start().wait(rng.uniform(0, 5))
        step = saved
        for _ in range(draw(st.integers(1, 3))):
            story.group(rng.choice([1, 2, 3, 8]), saved, rng.uniform(0, 3), rng.uniform(0, 3))
            step = saved
            for _ in range(rng.randrange(8)):
                step += 1
                story.steps(step, step, rng.uniform(0.01, 3))
                what = rng.random()
                if what < 0.2:
                    story.checkpoint(step, rng.uniform(0, 1))
                    saved = step
                elif what < 0.4:
                    story.validation(step, rng.uniform(0, 2))
                elif what < 0.5:
                    story.wait(-rng.uniform(0, 2))  # another machine's clock
            if rng.random() < 0.7:
                story.wait(rng.uniform(0, 4)).group_end(rng.choice(["killed", "resize", "finished"]))
            elif rng.random() < 0.5:
                story.wait(rng.uniform(0, 4)).add("failure", rank=0, host="h", step=step, error="E", traceback="")
            if rng.random() < 0.3:
                story.add("wait", reason="nodes")
        if rng.random() < 0.6:
            story.wait(rng.uniform(0, 2)).end(rng.choice(["finished", "stopped", "failed"]))
        story.wait(rng.uniform(0, 50))
    return story


@settings(max_examples=150)
@given(stories(), st.booleans())
def test_labels_sum_to_the_wall_clock_whatever_happens(story, going_on):
    last = max(r["time"] for r in story.records)
    until = last + 5 if going_on else None
    intervals = timeline(story.records, until)
    for before, after in itertools.pairwise(intervals):
        assert before.end == after.start
        assert (before.label, before.launch, before.world_size) != (after.label, after.launch, after.world_size)
    assert all(i.end > i.start and i.label in LABELS and i.world_size >= 1 for i in intervals)
    running_on = going_on and story.records[-1]["kind"] != "run_end"
    if intervals:
        end = last + 5 if running_on else max(intervals[-1].end, T0)
        assert sum(totals(intervals).values()) == pytest.approx(end - T0, abs=1e-4)
        assert 0 <= goodput(intervals) <= 1


@settings(max_examples=150)
@given(stories())
def test_the_meter_counts_as_the_timeline_does(story):
    story.end()
    intervals, meter = timeline(story.records), spent(story.records)
    assert meter.seconds == pytest.approx(running_seconds(intervals), abs=1e-4)
    assert meter.worker_seconds == pytest.approx(worker_seconds(intervals), abs=1e-3)
