"""What a sweep tries and what came of it: points, results, and their files. Pure but for the two functions on folders.

A point's name follows from its settings alone, so that the same command finds what an earlier launch has finished.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from raytune70b.storage import Folder

TRIALS = "trials"
DIVERGED = ("diverged", "failed")
"""What ends a trial without a loss to compare."""


@dataclass(frozen=True)
class Point:
    """Settings of one trial."""

    learning_rate: float
    global_batch_size: int
    warmup_share: float
    """Length of the warm-up as a share of the schedule, so that a trial's has the shape of the full run's."""
    lora_rank: int
    seed: int

    @property
    def name(self) -> str:
        return f"lr{self.learning_rate:.3g}-batch{self.global_batch_size}-warmup{self.warmup_share:.3g}-rank{self.lora_rank}-seed{self.seed}"


@dataclass(frozen=True)
class Result:
    """What came of a trial."""

    point: Point
    status: str
    """finished, stopped (by the leader's curve), diverged (its loss is not finite, or not below where it started) or failed."""
    curve: tuple[tuple[float, float], ...]
    """(share of the schedule, validation loss), the start included; a loss that is not finite is left out."""
    loss: float | None
    """Validation loss at the end of the schedule."""
    tokens: int
    begin: float
    end: float
    """Unix seconds."""
    reason: str = ""

    @property
    def usable(self) -> bool:
        return self.status == "finished" and self.loss is not None

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def write_result(sweep: Folder, result: Result) -> None:
    (sweep / TRIALS).write(f"{result.point.name}.json", json.dumps(dataclasses.asdict(result), indent=1).encode())


def read_results(sweep: Folder) -> dict[Point, Result]:
    """Every trial that has ended, in any launch."""
    folder = sweep / TRIALS
    found = [_result(json.loads(folder.read(name))) for name in folder.names() if name.endswith(".json")]
    return {result.point: result for result in found}


def _result(values: dict[str, Any]) -> Result:
    curve = tuple((share, loss) for share, loss in values["curve"])
    return Result(**{**values, "point": Point(**values["point"]), "curve": curve})


def hopeless(curve: Iterable[tuple[float, float]], leader: Result, patience: float) -> float | None:
    """The share of the schedule from which on a trial cannot catch up with a finished leader; None if it may.

    Both are compared at the same share of the same schedule, where the rate has fallen as far for one as for the other. A high
    rate looks worse in mid-schedule than it ends, because the fall of the rate is what it gains by: so the trial is granted
    `patience` times what the leader still gained from that point on.
    """
    if not leader.usable:
        return None
    assert leader.loss is not None
    for share, loss in curve:
        ahead = [own for at, own in leader.curve if abs(at - share) < 1e-6]
        if 0 < share < 1 and ahead and loss - leader.loss > patience * max(0.0, ahead[0] - leader.loss):
            return share
    return None


def elapsed(results: Iterable[Result]) -> float:
    """Seconds in which at least one trial ran, all launches together."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted((r.begin, r.end) for r in results):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
