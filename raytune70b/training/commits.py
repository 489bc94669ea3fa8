"""What belongs together when a run commits its progress: when a save is due, the ledger's entries it makes final, who is told.

A save's outcome is settled by all ranks together, at an agreed step: the ledger's segment becomes the new head, the driver gets
a record, and Ray Train a report of the published checkpoint, which has it evaluated where that is due.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ray.train
import torch.distributed as dist

from raytune70b.blocks.ledger import Entry
from raytune70b.storage import Folder
from raytune70b.training.checkpoint import Cursor
from raytune70b.training.mailbox import Link
from raytune70b.training.pace import Pace, passes
from raytune70b.training.saver import Outcome, Saver, from_rank_0


class Commits:
    """One rank's side. `state` gives the live tensors; `control` is a gloo group that the saver does not use."""

    def __init__(self, saver: Saver, pace: Pace, link: Link, control: dist.ProcessGroup, state: Callable[[], Any], ledger_head: str | None,
                 evaluate_every: int = 0):  # fmt: skip
        self._saver, self._link, self._control, self._state = saver, link, control, state
        self.pace = pace
        self._head = ledger_head
        self._entries: list[Entry] = []
        self._evaluate_every, self._reported_step = evaluate_every, pace.saved_step or 0
        self.longest_s = 0.0
        """The longest save so far."""

    @property
    def busy(self) -> bool:
        return self._saver.busy

    @property
    def ended(self) -> bool:
        return self._saver.ended

    def stepped(self, entry: Entry, seconds: float) -> None:
        """Rank 0 notes a step for the ledger."""
        self._entries.append(entry)
        self.pace.stepped(seconds)

    def save(self, cursor: Cursor) -> None:
        """Begins a save of the state after `cursor.step` steps; waits for the one before it. All ranks together."""
        self._saver.wait()
        self.settle()
        self._saver.start(self._state(), dataclasses.replace(cursor, ledger=self._head), list(self._entries))
        self.pace.saving(cursor.step)

    def settle(self) -> Outcome | None:
        """Takes the outcome of a save that has ended; all ranks together. A failed save is due again at the next step."""
        if not self._saver.ended:
            return None
        outcome = self._saver.take()
        self.pace.saved(outcome.stall_s, outcome.error is None)
        self.longest_s = max(self.longest_s, outcome.total_s)
        leads = self._link.rank == 0
        if outcome.error is not None:
            if leads:
                self._link.send("checkpoint_failed", step=outcome.step, reason=outcome.error)
            return outcome
        if leads and outcome.cursor is not None:
            self._head = outcome.cursor.ledger
            self._entries = [e for e in self._entries if e.step > outcome.step]
            self._link.send("checkpoint", step=outcome.step, stall_s=outcome.stall_s, seconds=outcome.seconds, bytes=outcome.bytes, path=outcome.path)
        folder = Folder(outcome.path)
        checkpoint = ray.train.Checkpoint(folder.path(), filesystem=folder.filesystem)
        due = passes(self._evaluate_every, self._reported_step, outcome.step)
        self._reported_step = outcome.step
        ray.train.report({"step": outcome.step}, checkpoint=checkpoint, checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD, validation=due)
        return outcome

    def flush(self, cursor: Cursor) -> None:
        """Returns when the state after `cursor.step` steps is published. Raises RuntimeError where it cannot be."""
        self._saver.wait()
        outcome = self.settle()
        if outcome is None or outcome.error is not None or outcome.step != cursor.step:
            if from_rank_0(cursor.step in (0, self.pace.saved_step), self._control):
                return
            self.save(cursor)
            self._saver.wait()
            outcome = self.settle()
        assert outcome is not None
        if outcome.error is not None:
            raise RuntimeError(f"the checkpoint of step {cursor.step} could not be written: {outcome.error}")
