"""One launch at a time in a run's folder: a second one would overwrite the first one's journal and delete its checkpoints.

The file `launch.json` says who is there, and changes every few seconds while it is. A launch that was killed leaves it behind: on
the same machine the process is seen to be gone, from another one the file is watched for a while. Clocks are not compared.
Keeping the file never stops training: where it cannot be written, there is none.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from typing import Any

import psutil

from raytune70b.config import UserError
from raytune70b.storage import Folder

LEASE = "launch.json"
BEAT_S = 10.0
"""Between signs of life."""
PATIENCE = 3
"""Signs of life that may be missing before a launch on another machine counts as dead."""


class Lease:
    """`with Lease(run): ...`. Raises UserError where another launch lives."""

    def __init__(self, run: Folder):
        self._run, self._count = run, 0
        self._me = {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}
        self._over = threading.Event()

    def __enter__(self) -> Lease:
        if self._lives():
            there = self._there() or {"pid": "?", "host": "?"}
            raise UserError(f"{self._run.uri}: is being worked on by another launch (process {there['pid']} on {there['host']}); wait for its end or stop it, or choose another name")
        self._write()
        if not self._mine(self._there()):
            raise UserError(f"{self._run.uri}: another launch has begun at the same moment; run one of them")
        threading.Thread(target=self._beat, name="lease", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._mine(self._there()):
            with contextlib.suppress(OSError):
                self._run.delete(LEASE)

    def _there(self) -> dict[str, Any] | None:
        """Who the file names; None where there is none that can be read."""
        try:
            there = json.loads(self._run.read(LEASE))
            return there if {"host", "pid", "started"} <= there.keys() else None
        except (OSError, ValueError, AttributeError):
            return None

    def _mine(self, there: dict[str, Any] | None) -> bool:
        return there is None or {**there, "count": 0} == {**self._me, "count": 0}

    def _lives(self) -> bool:
        """Whether another launch is there."""
        there = self._there()
        if there is None or self._mine(there):  # this process itself, after a launch that could not clear up
            return False
        if there["host"] == self._me["host"]:
            return _runs(there["pid"], there["started"])
        print(f"{self._run.uri}: {there['host']} was working on it; looking for {PATIENCE * BEAT_S:.0f} s whether it still does", flush=True)
        time.sleep(PATIENCE * BEAT_S)
        return self._there() not in (there, None)

    def _write(self) -> None:
        self._count += 1
        with contextlib.suppress(OSError):
            self._run.write(LEASE, json.dumps({**self._me, "count": self._count}).encode())

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            self._write()


def _runs(pid: int, started: float) -> bool:
    """Whether the process that began at this time runs: its number may be another one's by now, and a dead one that nobody asked after keeps it."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - started) < 1
    except (psutil.Error, TypeError, ValueError):
        return False
