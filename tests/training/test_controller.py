"""What the controller decides differently from Ray's own; tests/faults go through it on a real cluster."""

from __future__ import annotations

import ray
from ray.train import FailureConfig, ScalingConfig
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision
from ray.train.v2.api.exceptions import ControllerError

from raytune70b.training import controller
from raytune70b.training.controller import GivesUp, LivingNodes
from raytune70b.training.mailbox import Mailbox


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


def policy(replicate: int = 1, box: Box | None = None) -> LivingNodes:
    scaling = ScalingConfig(num_workers=(2, 8), resources_per_worker={"CPU": 1.5})  # type: ignore[arg-type]
    return LivingNodes(scaling, "run", box or Box(), 1, 60.0, replicate)


def test_the_workers_of_a_replicated_run_are_a_multiple():
    nodes = {"a": {"CPU": 4.0}, "b": {"CPU": 4.0}, "c": {"CPU": 2.0}}  # room for 2, 2 and 1
    assert [policy(n)._count_possible_workers(nodes) for n in (1, 2, 4)] == [5, 4, 4]


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
    box = Box()
    gives_up = GivesUp(DefaultFailurePolicy(FailureConfig(max_failures=0)), box, 1)
    assert gives_up.make_decision(ControllerError(OSError("read-only file system"))) == FailureDecision.RETRY
    assert "read-only file system" in box.sent[0]["reason"]
    gives_up.make_decision(ControllerError(ray.exceptions.GetTimeoutError("slow")))
    assert len(box.sent) == 1, "Ray's own policy decides, and nothing is said of storage"


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
