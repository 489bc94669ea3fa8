"""Signs of life: each worker beats from a thread of its own, and the driver names and ends the one that is stuck.

Two kinds of stuck: a process that no longer beats (stopped, swapped out, its machine cut off), and one that beats while its
training thread stands still and all others wait for it in a collective. Where that thread waits for data, it is the reading that
is stuck; the group starts again all the same, which reads anew. The price is one small message a worker and second.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytune70b.training.mailbox import Link, Record

BEAT_S = 1.0
MARKS = ("set up", "data", "agree", "compute", "validate", "save", "wait")
"""Where a training thread can be. `set up` and `wait` may take any time: only silence is judged there."""


class Heart(threading.Thread):
    """Beats for one worker, and brings back the command in force."""

    def __init__(self, link: Link):
        super().__init__(name="heart", daemon=True)
        self._link, self._thread = link, threading.get_ident()
        self._step, self._mark, self._count, self._since = 0, MARKS[0], 0, time.monotonic()
        self._over = threading.Event()
        self.command = ""

    def at(self, mark: str, step: int) -> None:
        """The training thread has come to a place; a few hundred nanoseconds."""
        self._step, self._mark, self._count, self._since = step, mark, self._count + 1, time.monotonic()

    def run(self) -> None:
        while not self._over.wait(BEAT_S):
            try:
                self.command = ray.get(self._link.mailbox.beat.remote(self._link.rank, self._beat()), timeout=60)
            except Exception:  # the driver is gone or slow: training goes on, and Ray ends it when it must
                continue

    def stop(self) -> None:
        self._over.set()

    def _beat(self) -> Record:
        still = time.monotonic() - self._since
        stack = "".join(traceback.format_stack(sys._current_frames()[self._thread])[-12:]) if still > BEAT_S else ""
        link = self._link
        return {"attempt": link.attempt, "host": link.host, "pid": link.pid, "node": link.node, "step": self._step, "mark": self._mark,
                "count": self._count, "still": still, "stack": stack}  # fmt: skip


def stuck(beats: dict[int, Record], timeout_s: float) -> tuple[Record, str] | None:
    """The worker that holds up the others, and why it is thought so; None while all is well."""
    if not beats:
        return None
    quiet = max(beats.values(), key=lambda b: b["silent"])
    if quiet["silent"] > timeout_s:
        return quiet, f"no sign of life for {quiet['silent']:.0f} s"
    judged = [b for b in beats.values() if b["mark"] not in ("set up", "wait")]
    if len(judged) == len(beats) and min(b["still"] for b in judged) > timeout_s:
        behind = min(judged, key=lambda b: (b["count"], -b["still"]))  # the others wait for it, further on
        waits = f"has waited {behind['still']:.0f} s for its data" if behind["mark"] == "data" else f"its training thread has stood still for {behind['still']:.0f} s"
        return behind, waits
    return None


def describe(beat: Record, why: str, timeout_s: float) -> str:
    """One warning: rank, host, pid, step and the last stack known. A worker that waits for data is not to blame, and no stack of it tells anything."""
    if beat["mark"] == "data" and beat["silent"] <= timeout_s:
        return (f"no worker hangs, but the data stands still after step {beat['step']}: worker {beat['rank']} on {beat['host']} {why} "
                f"(run.hang_timeout_s={timeout_s:g}); is the storage of data.path slow or gone? The worker group starts again and reads from there")  # fmt: skip
    stack = f"; last seen at\n{beat['stack']}" if beat["stack"] else ""
    return (f"worker {beat['rank']} on {beat['host']} (pid {beat['pid']}) is stuck after step {beat['step']} in {beat['mark']}: {why} "
            f"(run.hang_timeout_s={timeout_s:g}); it is ended and the worker group starts again{stack}")  # fmt: skip


class Watchdog:
    """The driver's judge of beats; ends a stuck worker once, on its own machine, so that Ray Train starts the group again."""

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._looked = time.monotonic()
        self._ended: set[tuple[str, int]] = set()

    def look(self, beats: dict[int, Record]) -> str | None:
        """The warning about a worker that is ended now, or None."""
        now, before = time.monotonic(), self._looked
        self._looked = now
        if now - before > 5:  # the driver itself was stopped: what it has not heard is no one's fault
            return None
        found = stuck(beats, self._timeout_s)
        if found is None or (found[0]["node"], found[0]["pid"]) in self._ended:
            return None
        beat, why = found
        self._ended.add((beat["node"], beat["pid"]))
        here = NodeAffinitySchedulingStrategy(beat["node"], soft=False)
        kill_process.options(scheduling_strategy=here).remote(beat["pid"])  # type: ignore[attr-defined]
        return describe(beat, why, self._timeout_s)


@ray.remote(num_cpus=0, max_retries=0)
def kill_process(pid: int) -> None:
    """SIGKILL, which a stopped process obeys too; only a process that is a Ray Train worker still."""
    with open(f"/proc/{pid}/cmdline", "rb") as source:
        if b"RayTrainWorker" in source.read():
            os.kill(pid, signal.SIGKILL)
