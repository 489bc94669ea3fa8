"""How workers and driver talk: records go to the driver and are never waited for, commands come back with the next step.

A `Mailbox` is a Ray actor on the driver's node that needs no CPU; each worker has a `Link` to it. Training does not depend
on what the driver does with a record.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections import deque
from typing import Any

import ray

Record = dict[str, Any]


@ray.remote(num_cpus=0, max_concurrency=4)
class Mailbox:
    """Holds records until the driver drains them, and the command that workers must obey."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque()
        self._command: str | None = None
        self._attempt = 0
        self._failures: list[int] = []

    def put(self, record: Record) -> str | None:
        """Takes a record; returns the command in force."""
        self._records.append(record)
        return self._command

    def drain(self) -> list[Record]:
        records = [self._records.popleft() for _ in range(len(self._records))]
        return records

    def order(self, command: str) -> None:
        """From now on every worker is told `command` (such as "stop: budget")."""
        self._command = command

    def begin(self) -> int:
        """A worker group is up: its number in this launch, from 1."""
        self._attempt += 1
        return self._attempt

    def failed_at(self, step: int) -> int:
        """A worker failed after `step` completed steps; returns how often that has happened in a row at this very step."""
        self._failures.append(step)
        same = [s == step for s in reversed(self._failures)]
        return same.index(False) if False in same else len(same)


class Link:
    """One worker's end of the mailbox."""

    def __init__(self, mailbox: Any, rank: int, launch: int):
        self._mailbox, self.rank, self._launch, self.attempt = mailbox, rank, launch, 0
        self._reply: Any = None
        self.host = socket.gethostname()

    def begin(self) -> int:
        """Rank 0 registers the worker group; the others are told the number by rank 0."""
        return ray.get(self._mailbox.begin.remote())

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a record and goes on at once."""
        record = {"kind": kind, "time": time.time(), "launch": self._launch, "attempt": self.attempt, **fields}
        self._reply = self._mailbox.put.remote(record)

    def warn(self, text: str) -> None:
        self.send("warning", text=text)

    def command(self) -> str | None:
        """The command that came back with the newest answered record; never waits."""
        if self._reply is None:
            return None
        ready, _ = ray.wait([self._reply], timeout=0)
        return ray.get(ready[0]) if ready else None

    def failed(self, error: BaseException, step: int) -> int:
        """Tells what ended this worker; returns how often a worker failed in a row at this step."""
        text = "".join(traceback.format_exception(error))
        record = {"rank": self.rank, "host": self.host, "pid": os.getpid(), "step": step, "error": f"{type(error).__name__}: {error}"}
        self.send("failure", **record, traceback=text)
        return ray.get(self._mailbox.failed_at.remote(step))
