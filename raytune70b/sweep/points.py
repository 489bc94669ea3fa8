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
    """finished, stopped (by the leader's curve), diverged (its loss is not finite, not below where it started, or that of a model which
    knows nothing) or failed; `running` for a leader that others are compared with meanwhile."""
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
    """The share of the schedule from which on a trial cannot catch up with its leader; None if it may.

    Both are compared at the same share of the same schedule, where the rate has fallen as far for one as for the other. A high
    rate looks worse in mid-schedule than it ends, because the fall of the rate is what it gains by: so the trial is granted
    `patience` times what the leader still gained from that point on. Of a leader that runs beside it the end is not known: in
    the second half it is granted `patience` times what the leader would still gain at its present pace, which is more,
    since gains shrink. A finished leader is asked both ways, so that the verdict is the same whenever it is asked.
    """
    if not leader.usable and leader.status != "running":
        return None
    for share, loss in curve:
        place = next((n for n, (at, _) in enumerate(leader.curve) if abs(at - share) < 1e-6), None)
        if place is None or not 0 < share < 1:
            continue
        if leader.loss is not None and loss - leader.loss > patience * max(0.0, leader.curve[place][1] - leader.loss):
            return share
        gain = _gain_at_present_pace(leader.curve, place)
        if share >= 0.5 and gain > 0 and loss - leader.curve[place][1] > patience * gain:
            return share
    return None


def _gain_at_present_pace(curve: tuple[tuple[float, float], ...], place: int) -> float:
    """What a trial would gain from a point of its curve to the end as fast as since the point before; 0 where nothing is known."""
    if place == 0:
        return 0.0
    (before, higher), (share, loss) = curve[place - 1], curve[place]
    return (higher - loss) / (share - before) * (1 - share)


def elapsed(results: Iterable[Result]) -> float:
    """Seconds in which at least one trial ran, all launches together."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted((r.begin, r.end) for r in results):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
