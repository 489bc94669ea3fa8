"""What ends a run: nothing left to do, or what its workers said last."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from raytune70b.config import UserError, compose
from raytune70b.storage import Folder
from raytune70b.training import trainer
from raytune70b.training.checkpoint import Cursor
from raytune70b.training.prepared import prepare_run
from raytune70b.training.trainer import Post, ending
from tests.conftest import publish, write_blocks


@pytest.mark.parametrize(("loss", "validation", "journal", "ended"), [
    (2.0, [7], [], True),
    (None, [7], [], False),
    (None, [7], [(1, "validation", 10)], True),  # a stop fell between the last save and its validation, which the next launch made
    (None, [7], [(1, "validation", 5)], False),
    (None, [7], [(1, "validation", 10), (2, "group_ready", 5)], False),  # taken back
    (None, [], [], True),  # nothing to validate on
])  # fmt: skip
def test_a_run_has_ended_with_its_last_step_and_validation(tmp_path, loss, validation, journal, ended):
    write_blocks(Folder(tmp_path / "data"), {"train": [40], "validation": validation}, seq_len=16)
    config = compose([f"data.path={tmp_path / 'data'}", f"run.path={tmp_path}", "train.global_batch_size=4", "train.micro_batch_size=2"])
    prepared = prepare_run(config)
    assert prepared.feed.total_steps == 10 and not prepared.ended([])
    records = [{"kind": kind, "launch": launch, "time": float(n), "step": step, "resumed_step": step, "loss": 2.0} for n, (launch, kind, step) in enumerate(journal)]
    for step in (9, 10):
        resumed = dataclasses.replace(prepared, resumed=Cursor(step=step, validation_loss=loss))
        assert resumed.ended(records) == (ended and step == 10)


@pytest.mark.parametrize(("begun", "changes", "words"), [
    (False, ["train.steps=300"], ["train.steps: is 300", "10 steps (40 blocks)", "raise train.epochs"]),
    (True, ["train.steps=300"], ["train.steps: is 300", "a checkpoint of step 10", "jobs/export.py", "another run.name with model.path="]),
    (True, ["train.epochs=30"], ["train.epochs: 1 -> 30", "Set them back", "jobs/export.py", "another run.name with model.path="]),
    (True, ["train.epochs=30", "train.steps=300"], ["train.steps: null -> 300", "jobs/export.py"]),
    (True, ["train.beta1=0.8"], ["train.beta1: 0.9 -> 0.8", "Set them back, or choose another run.name"]),
])  # fmt: skip
def test_more_steps_for_a_run_are_refused_with_a_way_that_works(tmp_path, begun, changes, words):
    write_blocks(Folder(tmp_path / "data"), {"train": [40], "validation": [7]}, seq_len=16)
    given = [f"data.path={tmp_path / 'data'}", f"run.path={tmp_path}", "run.name=mine", "train.global_batch_size=4", "train.micro_batch_size=2"]
    if begun:
        publish(Folder(tmp_path / "mine" / "checkpoints"), Cursor(step=10, fingerprint=json.loads(json.dumps(prepare_run(compose(given)).fingerprint))))
    with pytest.raises(UserError) as refused:
        prepare_run(compose([*given, *changes]))
    assert all(word in str(refused.value) for word in words), refused.value
    assert begun or "jobs/export.py" not in str(refused.value)


def after(*records, stop_reason=None):
    """A post that has carried these records."""
    post = Post.__new__(Post)
    post.result, post.failure, post.stop_reason, post._watch = None, None, stop_reason, SimpleNamespace(record=lambda record: None)
    for record in records:
        post._take(record)
    return post


FAILURE = {"kind": "failure", "attempt": 1, "error": "DistBackendError: NCCL", "final": False}
READY, STOPPED, FINISHED = {"kind": "group_ready", "attempt": 2}, {"kind": "result", "status": "stopped"}, {"kind": "result", "status": "finished"}


@pytest.mark.parametrize(("post", "said", "status", "reason", "code"), [
    (after(FAILURE, READY, FINISHED), "", "finished", "", 0),
    (after(FAILURE), "Training failed", "failed", "DistBackendError: NCCL", 1),
    (after({**FAILURE, "final": True}), "Training failed", "failed", "DistBackendError: NCCL", 2),
    (after(FAILURE, {**READY, "attempt": 1}), "Training failed", "failed", "DistBackendError: NCCL", 1),  # of another rank, while rank 0 got ready
    (after(FAILURE, READY), "the workers failed 5 times", "failed", "the workers failed 5 times", 1),  # it had got over the first
    (after(STOPPED, stop_reason="budget.usd: spent"), "the storage refused", "stopped", "budget.usd: spent", 3),  # it is saved, whatever came after
    (after(STOPPED, stop_reason="SIGTERM"), "", "stopped", "SIGTERM", 75),
    (after(stop_reason="SIGTERM"), "Training failed", "failed", "Training failed", 1),
])  # fmt: skip
def test_the_exit_code_is_that_of_what_ended_the_run(post, said, status, reason, code):
    end = ending(post, said)
    assert (end.status, end.reason, end.exit_code) == (status, reason, code)


@pytest.mark.parametrize(("marks", "gives_up"), [
    ([], True), (["set up", "set up"], True), (["set up", "data"], False), (["compute", "agree"], False), (["wait", "wait"], False),
])  # fmt: skip
def test_a_wish_to_stop_waits_only_for_workers_that_may_have_something_to_save(monkeypatch, marks, gives_up):
    """SIGTERM while a run waits for machines, or loads: nothing was trained since the newest checkpoint."""
    post, signals, told = after(stop_reason="SIGTERM"), [], []
    post._watchdog, post._watch.warn, post._told_s = SimpleNamespace(look=lambda beats: None), told.append, 0.0
    monkeypatch.setattr(trainer.os, "kill", lambda pid, number: signals.append(number))
    clock = [trainer.STOP_WITHOUT_WORKERS_S - 0.1]
    monkeypatch.setattr(trainer.time, "monotonic", lambda: clock[0])
    beats = {rank: {"mark": mark} for rank, mark in enumerate(marks)}
    post._look_after(beats)
    assert not signals, "a group that is just coming up has a moment to beat"
    clock[0] += 0.2
    for _ in range(2):
        post._look_after(beats)
    assert signals == ([trainer.signal.SIGINT] if gives_up else []) and len(told) == gives_up
