"""How workers, controller and driver talk: records go to the driver and are never waited for, commands come back with beats.

The `Mailbox` is a Ray actor on the driver's node that needs no CPU; each worker has a `Link` to it. Training does not depend
on what the driver does with a record.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from collections import deque
from typing import Any

import ray

from raytune70b.training.guards import Failure, gives_up

Record = dict[str, Any]

STOP, HAND_OVER = "stop", "hand over"
"""Commands: save and end the run; save and wait, because the worker group will be resized."""


@ray.remote(num_cpus=0, max_concurrency=8)  # type: ignore[call-overload]
class Mailbox:
    """Holds records until the driver drains them, the newest beat of each worker, and the command that workers obey."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque()
        self._beats: dict[int, Record] = {}
        self._command = ""
        self._attempt, self._up = 0, False
        self._handed_over = False
        self._lock = threading.Lock()
        """Around the command and whether it was obeyed: calls come on several threads."""
        self._failures: list[Failure] = []
        self._first: Record | None = None

    def put(self, record: Record) -> None:
        if record["kind"] == "failure" and self._first is None:
            self._first = record  # those that follow are the peers' broken connections
        self._records.append(record)

    def beat(self, rank: int, beat: Record) -> str:
        """A worker lives; returns the command in force. The time is taken here: clocks of machines may differ."""
        if self._up and beat["attempt"] == self._attempt:
            self._beats[rank] = {**beat, "rank": rank, "heard": time.time()}
        return self._command

    def drain(self) -> tuple[list[Record], dict[int, Record]]:
        """The records since the last call, and the newest beats; `silent` is the seconds since each was heard."""
        records = [self._records.popleft() for _ in range(len(self._records))]
        return records, {rank: {**beat, "silent": time.time() - beat["heard"]} for rank, beat in self._beats.items()}

    def order(self, command: str) -> None:
        """From now on every worker is told `command`; a stop is never taken back."""
        if self._command != STOP:
            self._command = command
            self._handed_over = False

    def command(self) -> str:
        """The command in force."""
        return self._command

    def begin(self) -> int:
        """A worker group is up: its number in this launch, from 1. A hand-over is over with that."""
        self.gone()
        self._attempt, self._up = self._attempt + 1, True
        if self._command == HAND_OVER:
            self._command = ""
        return self._attempt

    def handed_over(self) -> bool:
        """The workers have published a checkpoint of the step at which they wait; returns whether that is still wanted."""
        with self._lock:
            self._handed_over = self._command == HAND_OVER
            return self._handed_over

    def withdraw(self) -> bool:
        """Takes the order to hand over back, unless it has been obeyed meanwhile; returns whether it was taken back."""
        with self._lock:
            if self._handed_over:
                return False
            if self._command == HAND_OVER:
                self._command = ""
            return True

    def gone(self) -> None:
        """The worker group is no more: what its last processes still say is not heard, so that nobody waits for them to obey."""
        self._up, self._beats, self._first = False, {}, None

    def hand_over_state(self) -> str:
        """done; declined (it could not save); lost (the group failed, or has not been heard for ten seconds); waiting."""
        heard = max((beat["heard"] for beat in self._beats.values()), default=0.0)
        if self._handed_over:
            self.gone()  # these workers are ended now, and not missed
            return "done"
        if self._first is not None or time.time() - heard > 10:
            return "lost"
        return "waiting" if self._command == HAND_OVER else "declined"

    def training(self) -> bool:
        """Whether a worker group is up and past its start: before, it cannot be asked to hand over."""
        return bool(self._beats) and all(beat["mark"] != "set up" for beat in self._beats.values())

    def group_failed(self, reason: str, place: str = "") -> str:
        """The worker group is gone; returns why the run must give up, or "". The beats say how far it had come; `place`: where it was raised, if known."""
        heard = max((beat["step"] for beat in self._beats.values()), default=-1)
        first = self._first
        self.gone()
        step = first["step"] if first else heard
        error = first["error"] if first else reason
        self._failures.append(Failure(step, error, first["place"] if first else place, bool(first and first["final"])))
        return gives_up(self._failures)


class Link:
    """One worker's end of the mailbox."""

    def __init__(self, mailbox: Any, rank: int, launch: int):
        self.mailbox, self.rank, self._launch, self.attempt = mailbox, rank, launch, 0
        self.host, self.pid, self.node = socket.gethostname(), os.getpid(), ray.get_runtime_context().get_node_id()

    def begin(self) -> int:
        """Rank 0 registers the worker group; the others are told the number by rank 0."""
        return ray.get(self.mailbox.begin.remote())

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a record and goes on at once."""
        self.mailbox.put.remote({"kind": kind, "time": time.time(), "launch": self._launch, "attempt": self.attempt, **fields})

    def warn(self, text: str) -> None:
        self.send("warning", text=text)

    def failed(self, error: BaseException, step: int, final: bool) -> None:
        """Tells what ends this worker. final: trying again does not help. Returns when the driver's side has it."""
        frames = traceback.extract_tb(error.__traceback__)
        record = {
            "kind": "failure", "time": time.time(), "launch": self._launch, "attempt": self.attempt, "rank": self.rank, "host": self.host, "pid": self.pid,
            "step": step, "error": f"{type(error).__name__}: {error}", "place": f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "",
            "final": final, "traceback": "".join(traceback.format_exception(error)),
        }  # fmt: skip
        ray.get(self.mailbox.put.remote(record), timeout=10)
