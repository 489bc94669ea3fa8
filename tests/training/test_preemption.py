"""When a group that was given notice leaves: the decision alone; tests/faults gives real notices to real clusters."""

import time
from types import SimpleNamespace

import pytest

from raytune70b.training.preemption import SPARE_S, Notice


@pytest.fixture
def noticed(monkeypatch):
    """A notice of `least` workers that has heard that some ranks go `left_s` seconds from now; and a clock that can be turned on."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr("raytune70b.training.preemption.time", SimpleNamespace(monotonic=lambda: now.seconds, time=lambda: now.seconds + 1e9))

    def make(least, world_size, ranks, left_s=300.0):
        deadline = (now.seconds + 1e9 + left_s) * 1000 if left_s is not None else None
        monkeypatch.setattr("ray.train.get_preemption_info", lambda: SimpleNamespace(preempted_ranks=ranks, deadline_ms=deadline))
        notice = Notice(least)
        notice.look(world_size)
        return notice

    return make, now


@pytest.mark.parametrize(("least", "world_size", "ranks", "at_once"), [(2, 4, [2, 3], True), (3, 4, [3], True), (3, 4, [2, 3], False), (4, 4, [0], False), (1, 2, [0, 1], False)])
def test_a_group_leaves_at_once_where_the_others_are_enough(noticed, least, world_size, ranks, at_once):
    notice = noticed[0](least, world_size, ranks)
    assert notice.time_to_leave(save_s=1.0) == at_once
    assert str(ranks) in notice.text and not notice.time_to_look()  # heard once


@pytest.mark.parametrize(("left_s", "save_s"), [(300.0, 20.0), (120.0, 50.0), (60.0, 0.0)])
def test_a_group_that_cannot_do_without_trains_on_while_two_saves_still_fit(noticed, left_s, save_s):
    make, now = noticed
    notice = make(2, 2, [1], left_s)
    last = now.seconds + left_s - 2 * save_s - SPARE_S
    now.seconds = last - 0.1
    assert not notice.time_to_leave(save_s)
    now.seconds = last + 0.1
    assert notice.time_to_leave(save_s)


def test_without_a_deadline_the_machine_may_go_any_moment(noticed):
    assert noticed[0](2, 2, [1], None).time_to_leave(save_s=20.0)


def test_without_a_notice_nobody_leaves(monkeypatch):
    monkeypatch.setattr("ray.train.get_preemption_info", lambda: None)
    notice = Notice(1)
    notice.look(2)
    assert not notice.time_to_leave(1e9) and not notice.time_to_look()
    notice._looked = time.monotonic() - 60
    assert notice.time_to_look()
