"""From journal records to named numbers: the metrics that MLflow, Weights & Biases and TensorBoard show, by the same names.

| series       | metrics (unit)                                                                                                  |
|--------------|-----------------------------------------------------------------------------------------------------------------|
| train        | train/loss (nats a token), train/grad_norm, train/learning_rate, train/trained_tokens, train/skipped (0 or 1),   |
|              | train/tokens_per_s, train/mfu (share of peak), train/world_size, time/step_s, time/PART_s for each part of a step |
| validation   | validation/loss, validation/trained_tokens, validation/seconds                                                  |
| evaluation   | evaluation/METRIC of answers while training goes on, evaluation/answers, evaluation/seconds                      |
| checkpoint   | checkpoint/stall_s, checkpoint/seconds, checkpoint/bytes                                                        |
| cost         | cost/hours, cost/usd, cost/projected_hours, cost/projected_usd, goodput/share                                   |
| worker RANK  | system/worker_RANK/NAME: memory_allocated and memory_reserved (bytes), gpu_use (0 to 1), power_w, temperature_c,  |
|              | step_seconds, data_seconds, straggler_ratio                                                                     |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from raytune70b.tracking.journal import Record

NO_METRIC = {"kind", "time", "launch", "attempt", "step", "rank", "world_size", "seconds", "seconds_by", "lost", "path", "probe", "flops_per_token", "peak_flops"}


@dataclass(frozen=True)
class Point:
    """Values that belong to one step of one series."""

    series: str
    step: int
    time: float
    values: dict[str, float]

    @property
    def place(self) -> int:
        """What of its series it is, and is there once: the step; of costs the time in ms, for they go on while a step does not end."""
        return place(self.series, self.step, self.milliseconds)

    @property
    def milliseconds(self) -> int:
        """Unix time."""
        return int(self.time * 1000)


def point(record: Record) -> Point | None:
    """The metrics of a record, None where it has none. Values that are missing or not finite are left out."""
    kind = record["kind"]
    if kind == "step":
        return _point("train", record, _step_values(record))
    if kind in ("validation", "checkpoint", "evaluation"):
        values = {**_plain(record), "seconds": record.get("seconds")}
        return _point(kind, record, {f"{kind}/{name}": value for name, value in values.items()})
    if kind == "cost":
        return _point("cost", record, {name if "/" in name else f"cost/{name}": v for name, v in _plain(record).items()})
    if kind == "worker":
        prefix = f"system/worker_{record['rank']}"
        return _point(prefix, record, {f"{prefix}/{name}": value for name, value in _plain(record).items()})
    return None


def series_of(metric: str) -> str:
    """The series that a metric's name belongs to."""
    head = metric.split("/")
    if head[0] == "system":
        return "/".join(head[:2])
    return {"time": "train", "goodput": "cost"}.get(head[0], head[0])


def place(series: str, step: int, milliseconds: int) -> int:
    """See `Point.place`."""
    return milliseconds if series == "cost" else step


def anchor(series: str) -> str:
    """A metric that every point of a series has."""
    known = {"train": "train/tokens_per_s", "validation": "validation/seconds", "checkpoint": "checkpoint/seconds", "cost": "cost/hours",
             "evaluation": "evaluation/seconds"}  # fmt: skip
    return known.get(series, f"{series}/memory_allocated")


def tokens_per_s(record: Record) -> float:
    """Tokens of a step record by its time, over all workers."""
    return record["tokens"] / record["seconds"] if record["seconds"] > 0 else 0.0


def mfu(record: Record, plan: dict[str, Any]) -> float | None:
    """Model FLOPs utilisation of a step by the plan's figures: tokens/s * flops_per_token / (world_size * peak_flops)."""
    flops, peak = plan.get("flops_per_token"), plan.get("peak_flops")
    if not flops or not peak:
        return None
    return tokens_per_s(record) * flops / (record["world_size"] * peak)


def _step_values(record: Record) -> dict[str, Any]:
    values = {f"train/{name}": value for name, value in _plain(record).items() if name != "tokens"}
    values |= {"train/skipped": float(record.get("skipped", False)), "train/world_size": record["world_size"], "train/tokens_per_s": tokens_per_s(record)}
    values["time/step_s"] = record["seconds"]
    return values | {f"time/{part}_s": value for part, value in (record.get("seconds_by") or {}).items()}


def _plain(record: Record) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in NO_METRIC}


def _point(series: str, record: Record, values: dict[str, Any]) -> Point:
    finite = {n: float(v) for n, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v)}
    return Point(series, record["step"], record["time"], finite)
