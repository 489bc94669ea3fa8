"""Where the time of a run went: every second from its first start to its end has exactly one label.

| label            | meaning                                                                                           |
|------------------|---------------------------------------------------------------------------------------------------|
| setup            | the first start until the first step begins, and the closing of a launch                          |
| train            | optimizer steps that count, and what the loop needs between them                                  |
| checkpoint stall | training stands still for a save                                                                  |
| evaluation       | validation                                                                                        |
| recovery         | noticing a fault or a resize, starting workers again, loading the checkpoint and the data         |
| lost work        | steps that were taken back: trained after the checkpoint from which the run went on               |
| wait for nodes   | the run wants more machines than there are                                                        |
| not running      | between two launches: nobody had started the job                                                  |

`timeline` is a pure function of the journal. Its intervals touch, so their lengths sum to the wall-clock by construction. A
launch that was killed ends with its last record. Clocks of machines may differ: time never runs backwards here, a record
that says so is moved to the latest time seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from raytune70b.tracking.cost import least_workers
from raytune70b.tracking.journal import Record, in_order

LABELS = ("setup", "train", "checkpoint stall", "evaluation", "recovery", "lost work", "wait for nodes", "not running")
IDLE = "not running"
CLEAN_ENDS = (None, "", "finished", "stopped")
"""Reasons of a group_end after which no group has to come back."""


@dataclass(frozen=True)
class Interval:
    start: float
    """Unix seconds."""
    end: float
    label: str
    launch: int
    world_size: int
    """Workers that the run held; of the coming group where none was up, or the fewest that it takes where none came."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


def timeline(records: Iterable[Record], until: float | None = None) -> list[Interval]:
    """The labelled intervals of a run, in order, without gap or overlap; those of equal label that touch are one.

    `until`: unix seconds to which the last launch is continued when it has no run_end yet (a run that is going on).
    """
    known = _with_fate(in_order(records))
    walk = _Walk({_place(r): r["stall_s"] for r in known if r["kind"] == "checkpoint"})
    for record in known:
        walk.take(record)
    if walk.running:
        walk.close(walk.seen if until is None else until)
    return walk.joined()


def totals(intervals: Iterable[Interval]) -> dict[str, float]:
    """Seconds by label, every label present."""
    sums = dict.fromkeys(LABELS, 0.0)
    for interval in intervals:
        sums[interval.label] += interval.seconds
    return sums


def goodput(intervals: Iterable[Interval]) -> float:
    """Share of the time in which the run was running that went into steps that count; 0 for an empty run."""
    sums = totals(intervals)
    running = sum(sums.values()) - sums[IDLE]
    return sums["train"] / running if running > 0 else 0.0


def worker_seconds(intervals: Iterable[Interval]) -> float:
    """Seconds times workers held, the time between launches left out: what a price per worker-hour is multiplied by."""
    return sum(i.seconds * i.world_size for i in intervals if i.label != IDLE)


def running_seconds(intervals: Iterable[Interval]) -> float:
    """Wall-clock seconds of all launches together."""
    return sum(i.seconds for i in intervals if i.label != IDLE)


def _place(record: Record) -> tuple[int, int, int]:
    return record.get("launch", 0), record.get("attempt", 0), record["step"]


def _with_fate(records: list[Record]) -> list[Record]:
    """Records with `lost` on the steps and validations that a later worker group took back."""
    fated: list[Record] = []
    horizon: float = float("inf")
    for record in reversed(records):
        if record["kind"] in ("step", "validation", "checkpoint") and record["step"] > horizon:
            record = {**record, "lost": True}
        fated.append(record)
        if record["kind"] == "group_ready":
            horizon = min(horizon, record["resumed_step"])
    return fated[::-1]


class _Walk:
    """Goes along the journal and closes one interval at each record that ends something."""

    def __init__(self, stalls: dict[tuple[int, int, int], float]) -> None:
        self.stalls = stalls
        self.intervals: list[Interval] = []
        self.clock: float | None = None
        self.seen = float("-inf")
        self.launch = 0
        self.world_size = 0
        self.least = 1
        self.running = False
        self.trained = False
        """A step was taken, in any launch: a start after that is recovery."""
        self.between = "setup"
        """The label of time that no record claims."""
        self.due = 0.0
        """Seconds for which training stood still for a save after the last step, not yet given to an interval."""

    def advance(self, to: float, label: str) -> None:
        """Closes an interval from the clock to a time."""
        if self.clock is None:
            self.clock = to
        if to > self.clock:
            self.intervals.append(Interval(self.clock, to, label, self.launch, self.world_size))
            self.clock = to

    def close(self, to: float, label: str = "") -> None:
        """Gives unclaimed time up to `to` its label; a save after the last step is paid first."""
        stall = max(0.0, min(self.due, to - (self.clock if self.clock is not None else to)))
        if stall and self.clock is not None:
            self.advance(self.clock + stall, "checkpoint stall")
            self.due -= stall
        self.advance(to, label or self.between)

    def starting(self) -> str:
        return "recovery" if self.trained else "setup"

    def take(self, record: Record) -> None:
        handler = getattr(self, f"_{record['kind']}", None)
        if handler is not None:
            handler(record, record["time"])
        self.seen = max(self.seen, record["time"])

    def _run_start(self, record: Record, time: float) -> None:
        if self.running:  # the launch before was killed: it lived at least until its last record
            self.close(self.seen)
        self.advance(time, IDLE)
        self.launch, self.running, self.between, self.due = record.get("launch", 1), True, self.starting(), 0.0
        self.least = least_workers(record)

    def _wait(self, record: Record, time: float) -> None:
        self.close(time)
        self.between = "wait for nodes"

    def _group_start(self, record: Record, time: float) -> None:
        self.close(time, self.starting() if self.between == "train" else "")
        self.world_size, self.between, self.due = record["world_size"], self.starting(), 0.0

    def _failure(self, record: Record, time: float) -> None:
        self.close(time, self.starting() if self.between == "train" else "")
        self.between, self.due = self.starting(), 0.0

    def _group_end(self, record: Record, time: float) -> None:
        self.close(time, "setup" if record.get("reason") in CLEAN_ENDS else self.starting())
        self.between, self.due = "setup" if record.get("reason") in CLEAN_ENDS else self.starting(), 0.0

    def _step(self, record: Record, time: float) -> None:
        self.close(time - record["seconds"])
        self.advance(time, "lost work" if record.get("lost") else "train")
        self.trained, self.between, self.due = True, "train", self.stalls.get(_place(record), 0.0)

    def _validation(self, record: Record, time: float) -> None:
        self.close(time - record["seconds"])
        self.advance(time, "lost work" if record.get("lost") else "evaluation")

    def _run_end(self, record: Record, time: float) -> None:
        if not self.running:
            return
        self.close(time, "setup")
        self.running, self.between = False, "setup"

    def joined(self) -> list[Interval]:
        whole: list[Interval] = []
        held = next((i.world_size for i in self.intervals if i.world_size), self.least)
        for i in self.intervals:
            held = i.world_size or held
            i = Interval(i.start, i.end, i.label, i.launch, held)
            if whole and (whole[-1].label, whole[-1].launch, whole[-1].world_size) == (i.label, i.launch, i.world_size):
                i = Interval(whole.pop().start, i.end, i.label, i.launch, i.world_size)
            whole.append(i)
        return whole
