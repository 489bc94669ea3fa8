"""What follows from records: MFU, stragglers, cost and goodput as the run goes on."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import ray

from raytune70b.schema import Budget
from raytune70b.tracking import goodput
from raytune70b.tracking.console import Progress, duration
from raytune70b.tracking.cost import Meter, outlook
from raytune70b.tracking.gauges import RUN, Gauges
from raytune70b.tracking.journal import Record
from raytune70b.tracking.series import mfu, tokens_per_s

ACCOUNT_EVERY_S = 15.0
STRAGGLER = 1.25
"""A worker this many times slower than the median is told, when it was so in `STRAGGLER_PROBES` probes in a row."""
STRAGGLER_PROBES = 3
WARN_SHARE = 0.8
CHECKPOINT_DUE_S = 4 * 3600.0
"""Work that a run may lose where `checkpoint.every` says no number of steps."""
BACK_SHARE = 0.95
"""A projected end at this share of a limit or below may be warned of again when it lies beyond later; one at the limit only wavers."""


class Derived:
    """Adds `mfu` to steps (by the plan of run_start) and `straggler_ratio` to worker records."""

    def __init__(self) -> None:
        self._plan: dict[str, Any] = {}
        self._probes: dict[int, float] = {}
        self._slow: dict[int, list[int]] = {}
        """Numbers of the last probes in a row in which a rank was slow."""
        self._told: set[int] = set()

    def take(self, record: Record) -> tuple[Record, str | None]:
        """The record with what follows from it, and a warning if there is one."""
        kind = record["kind"]
        if kind == "run_start":
            self._plan = record.get("plan") or {}
        elif kind == "group_start":
            for group in (self._probes, self._slow, self._told):
                group.clear()
        elif kind == "step":
            share = mfu(record, self._plan)
            return (record if share is None else {**record, "mfu": share}), None
        elif kind == "worker" and record.get("probe_seconds"):
            return self._worker(record)
        return record, None

    def _worker(self, record: Record) -> tuple[Record, str | None]:
        rank = record["rank"]
        self._probes[rank] = record["probe_seconds"]
        ratio = straggler_ratios(self._probes)[rank]
        slow = self._slow.setdefault(rank, [])
        if ratio <= STRAGGLER:
            slow.clear()
        elif record["probe"] not in slow:
            slow.append(record["probe"])
        warning = None
        if len(slow) >= STRAGGLER_PROBES and rank not in self._told:
            self._told.add(rank)
            warning = f"worker {rank} on {record['host']} computes {ratio:.2f} times slower than the median worker; all wait for it"
        return {**record, "straggler_ratio": ratio}, warning


def straggler_ratios(probes: dict[int, float]) -> dict[int, float]:
    """Each rank's time for the same computation by the lower median of all (so that of two workers the slow one shows)."""
    middle = statistics.median_low(probes.values())
    return {rank: seconds / middle for rank, seconds in probes.items()}


class Accountant:
    """A sink that writes a `cost` record now and then, and warns when 80 % of the budget are used or the end lies beyond it.

    `put` accounts at a step's end, `look` (from a thread, about once a minute) while none comes: waiting and loading cost too.
    """

    def __init__(self, budget: Budget, progress: Progress, history: list[Record], records: Callable[[], list[Record]], write: Callable[[Record], None]):
        self._budget, self._progress, self._records, self._write = budget, progress, records, write
        self._meter = Meter()
        self._due = 0.0
        self._step = 0
        self._launched = False
        """This launch goes on; the meter's `running` may be that of an earlier one, which was killed."""
        self._told: set[str] = set()
        self._lock = threading.Lock()
        for record in history:
            self._take(record)

    def put(self, record: Record) -> None:
        with self._lock:
            self._take(record)
            self._launched = record["kind"] == "run_start" or (self._launched and record["kind"] != "run_end")
            if record["kind"] == "step" and time.monotonic() >= self._due:
                self._account(record["time"])

    def look(self) -> None:
        """Writes a cost record as of now if the launch goes on and the last one was written a while ago."""
        with self._lock:
            if self._launched and time.monotonic() >= self._due:
                self._account(time.time())

    def account(self, now: float | None = None) -> None:
        """Writes a cost record as of `now` (unix seconds)."""
        with self._lock:
            if self._launched or self._step:
                self._account(now)

    def _account(self, now: float | None) -> None:
        begin = time.monotonic()
        intervals = goodput.timeline(self._records(), now)
        values = outlook(self._budget, self._meter.spent(now), self._progress.forecast)
        self._write({"kind": "cost", "step": self._step, **values, "goodput/share": goodput.goodput(intervals), "seconds_by_label": goodput.totals(intervals)})
        self._warn(values)
        self._due = time.monotonic() + max(ACCOUNT_EVERY_S, 100 * (time.monotonic() - begin))  # at most 1 % of a core

    def _warn(self, values: dict[str, float]) -> None:
        self._told -= back_within(self._budget, values)
        for key, text in budget_warnings(self._budget, values).items():
            if key not in self._told:
                self._told.add(key)
                self._write({"kind": "warning", "text": text})

    def _take(self, record: Record) -> None:
        self._meter.take(record)
        if record["kind"] == "step":
            self._step = record["step"]


def budget_warnings(budget: Budget, values: dict[str, float]) -> dict[str, str]:
    """Warnings about the budget by a key under which each is told once, until `back_within` names the key. `values`: a cost record's."""
    warnings: dict[str, str] = {}
    for unit, limit, used, projected, show in (
        ("hours", budget.hours, values["hours"], values.get("projected_hours", 0.0), lambda h: duration(3600 * h)),
        ("usd", budget.usd, values.get("usd", 0.0), values.get("projected_usd", 0.0), lambda usd: f"${usd:,.2f}"),
    ):
        if limit and used >= WARN_SHARE * limit:
            warnings[f"used {unit}"] = f"{used / limit:.0%} of the budget are used: {show(used)} of {show(limit)}"
        if limit and projected > limit:
            warnings[f"beyond {unit}"] = f"at this speed the run ends at {show(projected)}, its budget is {show(limit)}; it will stop before that with a checkpoint"
    return warnings


def back_within(budget: Budget, values: dict[str, float]) -> set[str]:
    """Keys of `budget_warnings` whose projection is clearly inside its limit again, so that a later overrun is news."""
    pairs = (("hours", budget.hours, values.get("projected_hours")), ("usd", budget.usd, values.get("projected_usd")))
    return {f"beyond {unit}" for unit, limit, projected in pairs if limit and projected is not None and projected <= BACK_SHARE * limit}


def projected_share(budget: Budget, record: Record) -> float | None:
    """The largest share of a limit that a cost record projects; None without a limit."""
    pairs = ((budget.hours, record.get("projected_hours")), (budget.usd, record.get("projected_usd")))
    shares = [value / limit for limit, value in pairs if limit and value is not None]
    return max(shares) if shares else None


class RunGauges:
    """A sink that shows the run to Prometheus. Needs an initialised Ray: what is to be shown waits for it."""

    def __init__(self, run: str, total_steps: int, budget: Budget, progress: Progress):
        self._gauges, self._budget, self._progress = Gauges(RUN, run), budget, progress
        self._waiting: dict[str, Any] = {}
        self._every: Any = None
        self._counts = {"skipped_steps": 0, "group_starts": 0, "failed_checkpoints": 0}
        self._total_steps = total_steps

    def put(self, record: Record) -> None:
        self._waiting |= {name: value for name, value in self._values(record).items() if value is not None}
        if not ray.is_initialized():
            return
        for name, value in self._waiting.items():
            self._gauges.set(name, value)
        self._waiting = {}
        if record["kind"] == "worker":
            self._gauges.set("straggler_ratio", record.get("straggler_ratio"), rank=str(record["rank"]))
        for label, seconds in record.get("seconds_by_label", {}).items():
            self._gauges.set("time_seconds", seconds, label=label)

    def close(self) -> None:
        self._gauges.close()

    def _values(self, record: Record) -> dict[str, Any]:
        kind = record["kind"]
        if kind == "step":
            self._counts["skipped_steps"] += bool(record.get("skipped"))
            same = {name: record.get(name) for name in ("step", "loss", "grad_norm", "learning_rate", "mfu", "world_size")}
            more = {"tokens_per_second": tokens_per_s(record), "step_seconds": record["seconds"], "last_step_unixtime": record["time"], "checkpoint_due_seconds": self._due()}
            return {**same, **more, "total_steps": self._total_steps, **self._counts}
        if kind == "group_start":
            self._counts["group_starts"] += 1
            self._gauges.forget("straggler_ratio")  # ranks may be gone
        elif kind == "checkpoint_failed":
            self._counts["failed_checkpoints"] += 1
        elif kind == "run_start":
            self._total_steps = record.get("total_steps", self._total_steps)
            self._every = record.get("config", {}).get("checkpoint", {}).get("every")
            return {"step": record.get("resumed_step", 0), "total_steps": self._total_steps, "last_step_unixtime": record["time"]}  # a launch may hang before its first step
        elif kind == "group_ready":  # from here on work can be lost, whether there is a checkpoint or not
            return {"checkpoint_step": record["resumed_step"], "checkpoint_unixtime": record["time"], "checkpoint_due_seconds": self._due()}
        elif kind == "validation":
            return {"validation_loss": record["loss"]}
        elif kind == "checkpoint":
            return {f"checkpoint_{n}": record[f] for n, f in (("step", "step"), ("unixtime", "time"), ("stall_seconds", "stall_s"), ("seconds", "seconds"))}
        elif kind == "cost":
            same = {name: record.get(name) for name in ("hours", "projected_hours", "usd", "projected_usd", "budget_share")}
            return {**same, "goodput_ratio": record["goodput/share"], "projected_budget_share": projected_share(self._budget, record)}
        return {}

    def _due(self) -> float:
        """Seconds from one checkpoint to the next at the present speed."""
        known = isinstance(self._every, int) and self._progress.measured
        return self._every * self._progress.step_seconds if known else CHECKPOINT_DUE_S
