"""Journals for tests: records as a run writes them, on a clock that the test sets."""

from __future__ import annotations

import math
from typing import Any

from raytune70b.tracking.journal import Record

T0 = 1_700_000_000.0


class Story:
    """Collects records; each method moves the clock by what the event takes."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.clock = T0
        self.launch = self.attempt = 0
        self.world_size = 1

    def add(self, kind: str, **fields: Any) -> Record:
        record = {"kind": kind, "time": self.clock, "launch": self.launch, **fields}
        self.records.append(record)
        return record

    def start(self, **fields: Any) -> Story:
        self.launch += 1
        self.attempt = 0
        self.add("run_start", **fields)
        return self

    def wait(self, seconds: float) -> Story:
        self.clock += seconds
        return self

    def group(self, world_size: int, resumed_step: int, schedule_s: float = 2.0, load_s: float = 3.0) -> Story:
        self.attempt += 1
        self.world_size = world_size
        self.wait(schedule_s).add("group_start", attempt=self.attempt, world_size=world_size, hosts=["a"] * world_size)
        self.wait(load_s).add("group_ready", attempt=self.attempt, world_size=world_size, resumed_step=resumed_step, seconds={"model": load_s})
        return self

    def steps(self, first: int, last: int, seconds: float = 1.0, **fields: Any) -> Story:
        for step in range(first, last + 1):
            self.wait(seconds)
            self.add("step", attempt=self.attempt, **{**step_fields(step, seconds, self.world_size), **fields})
        return self

    def validation(self, step: int, seconds: float = 2.0) -> Story:
        self.wait(seconds).add("validation", attempt=self.attempt, step=step, loss=5 * math.exp(-step / 50), trained_tokens=1000, seconds=seconds)
        return self

    def checkpoint(self, step: int, stall_s: float = 0.25, seconds: float = 1.0) -> Story:
        self.wait(stall_s).add("checkpoint", attempt=self.attempt, step=step, stall_s=stall_s, seconds=seconds, bytes=10**6, path=f"step-{step:08d}")
        return self

    def group_end(self, reason: str) -> Story:
        self.add("group_end", attempt=self.attempt, reason=reason)
        return self

    def end(self, status: str = "finished") -> Story:
        self.add("run_end", status=status, reason="", exit_code=0)
        return self


def step_fields(step: int, seconds: float = 1.0, world_size: int = 2) -> dict[str, Any]:
    return {
        "step": step, "loss": 6 * math.exp(-step / 50), "grad_norm": 1.0 + 1 / step, "learning_rate": 1e-3, "trained_tokens": 3900, "tokens": 4096,
        "seconds": seconds, "seconds_by": {"data": 0.1 * seconds, "forward_backward": 0.7 * seconds, "optimizer": 0.1 * seconds},
        "world_size": world_size, "skipped": False,
    }  # fmt: skip
