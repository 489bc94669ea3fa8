import math

import pytest

from raytune70b.training.pace import FIRST_AUTO, Pace, passes


def saves(pace, steps, start=0, fails=(), step_s=1.0, stall_s=0.5):
    done = []
    for step in range(start, steps + 1):
        if pace.due(step):
            pace.saving(step)
            pace.saved(stall_s, step not in fails)
            done.append(step)
        pace.stepped(step_s)
    return done


def test_a_fixed_interval_saves_its_multiples_also_after_a_resume():
    assert saves(Pace(5, 200, 0), 21) == [5, 10, 15, 20]
    assert saves(Pace(5, 200, 7), 21, start=7) == [10, 15, 20]
    assert saves(Pace(5, 200, 10), 21, start=10) == [15, 20], "the step that was resumed from is saved already"


def test_a_save_that_failed_is_due_again_at_once():
    assert saves(Pace(5, 200, 0), 21, fails={10}) == [5, 10, 11, 15, 20]


@pytest.mark.parametrize(("stall_s", "mtbf_hours", "step_s"), [(2.0, 200.0, 15.0), (0.1, 1.0, 0.5)])
def test_auto_follows_young_and_daly(stall_s, mtbf_hours, step_s):
    pace = Pace("auto", mtbf_hours, 0)
    done = saves(pace, 2000, step_s=step_s, stall_s=stall_s)
    young = math.sqrt(2 * stall_s * mtbf_hours * 3600)  # Young 1974; Daly 2006 adds terms that are small here
    assert done[0] == FIRST_AUTO
    assert (done[2] - done[1]) * step_s == pytest.approx(young, rel=0.1)


def test_the_first_stall_of_a_group_which_pins_its_memory_sets_no_interval():
    pace, done = Pace("auto", 200.0, 0), []
    for step in range(3000):
        if pace.due(step):
            pace.saving(step)
            pace.saved(50.0 if not done else 0.5, True)
            done.append(step)
        pace.stepped(1.0)
    assert done[1] == 2 * FIRST_AUTO and done[2] - done[1] == pytest.approx(math.sqrt(2 * 0.5 * 200 * 3600), rel=0.1)


def test_passes_marks_the_first_step_at_or_after_each_multiple():
    for every in (1, 3, 10):
        reached = [5, 10, 12, 19, 20, 31]
        due = [after for before, after in zip([0, *reached], reached, strict=False) if passes(every, before, after)]
        assert due == [s for n, s in enumerate(reached) if any(m % every == 0 for m in range((reached[n - 1] if n else 0) + 1, s + 1))]
    assert not passes(0, 0, 99)
