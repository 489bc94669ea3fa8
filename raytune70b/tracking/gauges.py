"""The metrics that Prometheus reads from a run, under names that do not change.

They are `ray.util.metrics` gauges, so every Ray node serves them at its metrics endpoint (`ray start --metrics-export-port`) as
`ray_raytune70b_NAME`, with the labels below beside Ray's own. `RUN` comes from the driver, `WORKER` from each worker. The
dashboard and the alert rules of this package use no others.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import ray
from ray.util.metrics import Gauge

PREFIX = "raytune70b_"
REFRESH_S = 4.0
"""Well under Ray's export interval of 10 s (RAY_metrics_report_interval_ms)."""

RUN: dict[str, tuple[str, tuple[str, ...]]] = {
    "step": ("Last optimizer step; before a launch's first one the step from which it goes on", ()),
    "total_steps": ("Step at which the run ends", ()),
    "last_step_unixtime": ("When the last step ended, or the launch began, unix seconds", ()),
    "loss": ("Training loss of the last step, nats a token", ()),
    "grad_norm": ("Global gradient norm before clipping", ()),
    "learning_rate": ("Learning rate of the last step", ()),
    "tokens_per_second": ("Tokens of the last step by its time, all workers", ()),
    "mfu": ("Model FLOPs utilisation of the last step, 0 to 1, by the plan's formula", ()),
    "step_seconds": ("Seconds of the last step", ()),
    "world_size": ("Workers in the group", ()),
    "skipped_steps": ("Steps whose update was skipped, in this launch", ()),
    "group_starts": ("Worker groups started in this launch", ()),
    "validation_loss": ("Last validation loss, nats a token", ()),
    "checkpoint_step": ("Step of the newest committed checkpoint", ()),
    "checkpoint_unixtime": ("When it was committed, or the worker group went on from it or began without one, unix seconds", ()),
    "checkpoint_due_seconds": ("Seconds from one checkpoint to the next: checkpoint.every steps at the present speed, four hours where it is no number", ()),
    "checkpoint_stall_seconds": ("Seconds for which training stood still for it", ()),
    "checkpoint_seconds": ("Seconds from its begin to its commit", ()),
    "failed_checkpoints": ("Saves that failed, in this launch", ()),
    "straggler_ratio": ("A worker's time for a fixed computation by the median of all workers", ("rank",)),
    "time_seconds": ("Seconds of the run by goodput label", ("label",)),
    "goodput_ratio": ("Share of the running time that went into steps that count", ()),
    "hours": ("Hours of wall-clock of all launches", ()),
    "projected_hours": ("Hours at the planned end", ()),
    "usd": ("Cost so far", ()),
    "projected_usd": ("Cost at the planned end", ()),
    "budget_share": ("Largest used share of a budget limit", ()),
    "projected_budget_share": ("The same at the planned end", ()),
}
WORKER: dict[str, tuple[str, tuple[str, ...]]] = {
    "worker_step": ("Last optimizer step of the worker", ("rank",)),
    "worker_step_seconds": ("Mean seconds of a step since the last sample", ("rank",)),
    "worker_part_seconds": ("Mean seconds of a part of a step since the last sample: data, forward_backward, optimizer, ...", ("rank", "part")),
    "worker_memory_allocated_bytes": ("GPU memory in tensors; resident memory of the process without a GPU", ("rank",)),
    "worker_memory_reserved_bytes": ("GPU memory held by the allocator; peak resident memory without a GPU", ("rank",)),
    "worker_probe_seconds": ("Seconds of a fixed computation on the worker's device", ("rank",)),
    "gpu_use_ratio": ("Share of the time in which a kernel ran, 0 to 1 (NVML)", ("rank",)),
    "gpu_power_watts": ("Board power (NVML)", ("rank",)),
    "gpu_temperature_celsius": ("GPU temperature (NVML)", ("rank",)),
}
GPU_ONLY = ("gpu_use_ratio", "gpu_power_watts", "gpu_temperature_celsius")
"""Absent on workers without a GPU."""


class Gauges:
    """Sets the gauges of one table for one run. Needs an initialised Ray; a gauge is made when it is first set.

    Ray exports a gauge once for each time it is set, and forgets it two exports later: a thread sets all again every `REFRESH_S`.
    """

    def __init__(self, table: dict[str, tuple[str, tuple[str, ...]]], run: str):
        self._table, self._run = table, run
        self._made: dict[str, Any] = {}
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def set(self, name: str, value: float | None, **labels: str) -> None:
        """Sets a gauge; a value that is missing or not finite leaves the last one. KeyError for an undocumented name."""
        text, keys = self._table[name]
        if value is None or not math.isfinite(value):
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._refresh, name="gauges", daemon=True)
                self._thread.start()
            if name not in self._made:
                self._made[name] = Gauge(PREFIX + name, description=text, tag_keys=("run", *keys))
            self._values[name, tuple(sorted(labels.items()))] = float(value)
            self._made[name].set(float(value), tags={"run": self._run, **labels})

    def forget(self, name: str) -> None:
        """Lets a gauge fade, whatever its labels."""
        with self._lock:
            self._values = {key: value for key, value in self._values.items() if key[0] != name}

    def close(self) -> None:
        self._closing.set()

    def _refresh(self) -> None:
        while not self._closing.wait(REFRESH_S):
            with self._lock:
                if ray.is_initialized():
                    for (name, labels), value in self._values.items():
                        self._made[name].set(value, tags={"run": self._run, **dict(labels)})
