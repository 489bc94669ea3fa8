"""What the controller decides differently from Ray's own; tests/faults go through it on a real cluster."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray
from ray.train import FailureConfig, ScalingConfig
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision
from ray.train.v2.api.exceptions import ControllerError

from raytune70b.training import controller
from raytune70b.training.controller import GivesUp, LivingNodes
from raytune70b.training.mailbox import HAND_OVER, STOP, Mailbox


class Method:
    def __init__(self, calls, answer=None):
        self.calls, self.answer = calls, answer

    def remote(self, *args, **_):
        self.calls += args
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Box:
    """A mailbox that keeps what it is sent."""

    def __init__(self):
        self.sent = []
        self.put = Method(self.sent)
        self.told_gone: list = []
        self.gone = Method(self.told_gone)


def policy(replicate: int = 1, box: Box | None = None, held: dict | None = None) -> LivingNodes:
    scaling = ScalingConfig(num_workers=(2, 8), resources_per_worker={"CPU": 1.5})  # type: ignore[arg-type]
    return LivingNodes(scaling, "run", box or Box(), 1, 60.0, replicate, held or {})


def test_the_workers_of_a_replicated_run_are_a_multiple():
    nodes = {"a": {"CPU": 4.0}, "b": {"CPU": 4.0}, "c": {"CPU": 2.0}}  # room for 2, 2 and 1
    assert [policy(n)._count_possible_workers(nodes) for n in (1, 2, 4)] == [5, 4, 4]


def test_what_the_jobs_entrypoint_holds_is_no_workers():
    nodes = {"a": {"CPU": 4.0}, "b": {"CPU": 4.0}}
    assert [policy(held={"a": {"CPU": cpus}})._count_possible_workers(policy(held={"a": {"CPU": cpus}})._unoccupied(nodes)) for cpus in (0.0, 1.0, 2.0, 4.0)] == [4, 4, 3, 2]


def test_after_a_group_without_a_place_only_free_machines_count(monkeypatch):
    """What other jobs hold is not in Ray's reservation: a group of that size would time out for ever."""
    nodes, asked = {"a": {"CPU": 6.0}, "b": {"CPU": 6.0}}, policy()
    monkeypatch.setattr(controller.ray._private.state, "available_resources_per_node", lambda: {"a": {"CPU": 3.0}, "b": {}})
    assert asked._count_possible_workers(asked._unoccupied(nodes)) == 8
    asked.on_controller_start_worker_group(scaling_config=None, num_workers=8)
    assert asked._count_possible_workers(asked._unoccupied(nodes)) == 2


def test_it_says_what_it_waits_for_once_it_is_clear_that_it_does(monkeypatch):
    box, machines = Box(), [{"NodeID": "a", "Alive": True, "Resources": {"CPU": 2.0}}]
    waits = policy(box=box)
    monkeypatch.setattr(controller.ray, "nodes", lambda: machines)
    monkeypatch.setattr(controller.time, "sleep", lambda _: None)
    for _ in range(2):
        waits._wait()
    assert not box.sent, "the last group's resources come back within a second or two"
    for _ in range(100):
        waits._wait()
    (told,) = box.sent
    assert told["kind"] == "wait" and told["reason"] == (
        "there is no room for 2 workers (cluster.workers): 2 with 1.5 CPUs each (cluster.cpus_per_worker) take 3 CPUs, the Ray cluster has 2 CPUs, room for 1; waiting for machines")
    machines.clear()
    for _ in range(60):
        waits._wait()
    assert len(box.sent) == 2 and "has 0 CPUs" in box.sent[1]["reason"]


def test_told_to_stop_without_a_group_it_ends(monkeypatch):
    """Ray's own abort would never run: the control loop does not let go while it waits."""
    asked = policy()
    asked._mailbox = type("Told", (), {"command": Method([], STOP)})
    left: list = []
    monkeypatch.setattr(controller.ray, "get", lambda answer: answer)
    monkeypatch.setattr(controller.ray.actor, "exit_actor", lambda: (_ for _ in ()).throw(SystemExit))
    monkeypatch.setattr(asked, "_cancel_resource_request", lambda: left.append("reservation"))
    with pytest.raises(SystemExit):
        asked.make_decision_for_non_running_worker_group()
    assert left == ["reservation"]


def test_a_coordinator_that_does_not_answer_changes_nothing_and_is_told_of_once(monkeypatch):
    box = Box()
    asked = policy(box=box)
    silent = type("Silent", (), {"get_reserved_resources": Method([], ray.exceptions.GetTimeoutError("no answer"))})
    monkeypatch.setattr(asked, "_requester_id", "x", raising=False)
    monkeypatch.setattr(type(asked), "_autoscaling_coordinator", silent, raising=False)
    assert asked._get_reserved_resources() is None and asked._get_reserved_resources() is None
    assert [m["kind"] for m in box.sent] == ["warning"] and "no answer" in box.sent[0]["text"]


def test_only_storage_that_refuses_the_controllers_notes_is_tried_again(monkeypatch):
    """Ray's GetTimeoutError is an OSError too, by way of TimeoutError."""
    monkeypatch.setattr(controller, "STORAGE_PAUSE_S", 0.0)
    monkeypatch.setattr(controller.ray, "get", lambda answer: answer)
    gives_up, box = failing(0)
    assert gives_up.make_decision(ControllerError(OSError("read-only file system"))) == FailureDecision.RETRY
    assert "storage" in box.sent[0]["reason"] and "read-only file system" in box.sent[0]["reason"]
    gives_up.make_decision(ControllerError(ray.exceptions.GetTimeoutError("slow")))
    assert "storage" not in box.sent[1]["reason"] and "slow" in box.sent[1]["reason"]


def failing(max_failures: int) -> tuple[GivesUp, Box]:
    box, real = Box(), Mailbox.__ray_metadata__.modified_class()
    box.group_failed = Method([], None)
    box.group_failed.remote = real.group_failed
    return GivesUp(DefaultFailurePolicy(FailureConfig(max_failures=max_failures)), box, 1), box


@pytest.mark.parametrize(("error", "patience"), [
    (WorkerGroupStartupFailedError("one of the worker actors failed"), 5), (ray.exceptions.RayTaskError("bind", "Traceback\nOSError: gone", OSError("gone")), 3),
])  # fmt: skip
def test_a_group_that_cannot_be_started_is_tried_again_a_few_times_and_told_of(monkeypatch, error, patience):
    """Plain Ray tries the first kind for ever without a word, and ends the run at the first of the second."""
    monkeypatch.setattr(controller.ray, "get", lambda answer: answer)
    gives_up, box = failing(100)
    decisions = [gives_up.make_decision(ControllerError(error)) for _ in range(patience)]
    assert decisions == [FailureDecision.RETRY] * (patience - 1) + [FailureDecision.RAISE]
    assert [r["kind"] for r in box.sent] == ["group_end"] * patience and "could not be started" in box.sent[0]["reason"]
    assert f"{patience} times in a row before their first step" in box.sent[-1]["reason"]
    few, _ = failing(1)
    assert [few.make_decision(ControllerError(error)) for _ in range(2)] == [FailureDecision.RETRY, FailureDecision.RAISE]


def test_what_the_program_raises_while_a_group_is_made_ends_the_run(monkeypatch):
    monkeypatch.setattr(controller.ray, "get", lambda answer: answer)
    gives_up, box = failing(100)
    assert gives_up.make_decision(ControllerError(ray.exceptions.RayTaskError("set up", "Traceback", ValueError("no such backend")))) == FailureDecision.RAISE
    assert not box.sent, "Ray Train's error says it"


def test_a_timeout_of_the_start_is_no_failure(monkeypatch):
    monkeypatch.setattr(controller.ray, "get", lambda answer: answer)
    gives_up, _ = failing(0)
    assert [gives_up.make_decision(ControllerError(WorkerGroupStartupTimeoutError(4))) for _ in range(9)] == [FailureDecision.RETRY] * 9


def resizing(monkeypatch, hand_over_s: float) -> tuple[LivingNodes, Any, Box]:
    """A policy that has asked its workers to hand over, and their mailbox."""
    real, box = Mailbox.__ray_metadata__.modified_class(), Box()
    for name in ("hand_over_state", "withdraw", "order"):
        setattr(box, name, Method([]))
        getattr(box, name).remote = getattr(real, name)
    monkeypatch.setattr(controller.ray, "get", lambda answer: answer)
    asked = policy(box=box)
    real.begin()
    real.beat(0, {"attempt": 1, "mark": "wait", "step": 3})
    real.order(HAND_OVER)
    now = time.monotonic()
    asked._announced, asked._asked, asked._wait_until = ResizeDecision(4, {}), now, now + hand_over_s
    return asked, real, box


def test_a_resize_waits_until_the_workers_have_saved(monkeypatch):
    asked, mailbox, _ = resizing(monkeypatch, 60.0)
    assert isinstance(asked._once_saved(2), NoopDecision)
    assert mailbox.handed_over()
    assert asked._once_saved(2) == ResizeDecision(4, {})


def test_workers_that_take_too_long_to_save_are_not_ended_for_a_resize(monkeypatch):
    """They would lose the steps that they are saving, at every resize again."""
    asked, mailbox, box = resizing(monkeypatch, 0.0)
    assert isinstance(asked._once_saved(2), NoopDecision) and asked._announced is None and asked._not_before > time.monotonic()
    assert [r["kind"] for r in box.sent] == ["warning"]
    assert mailbox.command() == "" and not mailbox.handed_over(), "they are told to go on"


def test_an_order_to_hand_over_does_not_outlive_the_word_of_it(monkeypatch):
    """The driver's machine stood still: the controller goes on as if nothing had been asked, and so must the workers."""
    asked, mailbox, box = resizing(monkeypatch, 60.0)
    mailbox._beats[0]["heard"] -= 11
    assert isinstance(asked._once_saved(2), NoopDecision) and asked._announced is None
    assert mailbox.command() == "" and not mailbox.handed_over() and not box.sent


def test_a_stop_outlives_a_resize_that_is_taken_back():
    box = Mailbox.__ray_metadata__.modified_class()
    box.order(STOP)
    assert box.withdraw() and box.command() == STOP and not box.handed_over()


def test_what_the_last_processes_of_a_lost_group_say_is_not_heard():
    """A run that waits for machines would else be told by dead workers' beats that somebody is there to obey a stop."""
    box = Mailbox.__ray_metadata__.modified_class()
    assert box.begin() == 1
    box.beat(0, {"attempt": 1, "mark": "train", "step": 3})
    assert box.drain()[1] and box.training()
    box.gone()
    box.beat(0, {"attempt": 1, "mark": "train", "step": 3})
    assert not box.drain()[1] and not box.training()
    assert box.begin() == 2
    box.beat(0, {"attempt": 2, "mark": "train", "step": 3})
    assert box.drain()[1]
