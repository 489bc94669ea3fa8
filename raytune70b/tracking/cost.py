"""What a run has cost so far and will have cost at its end: hours of wall-clock, and workers times hours times price.

Time between launches is free. The time before the first worker group counts with that group's size, and until one is there with the
fewest workers that the run takes: it waits for them. The time after a group has ended counts with the size it had. So the sums are
those of `goodput.running_seconds` and `goodput.worker_seconds`, taken as the records come and not over the whole journal each time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from raytune70b.schema import Budget
from raytune70b.tracking.journal import Record


@dataclass(frozen=True)
class Spent:
    """Seconds of all launches, and seconds times workers, up to `at` (unix seconds) with `world_size` workers held then."""

    seconds: float
    worker_seconds: float
    at: float
    world_size: int

    def hours(self, now: float | None = None) -> float:
        """Hours up to `now`, which must lie in the same launch."""
        return (self.seconds + max(0.0, (now or self.at) - self.at)) / 3600

    def usd(self, price_per_gpu_hour: float, now: float | None = None) -> float:
        """Cost up to `now`, with the workers held at `at`."""
        later = max(0.0, (now or self.at) - self.at) * max(1, self.world_size)
        return (self.worker_seconds + later) / 3600 * price_per_gpu_hour


class Meter:
    """Adds up a run's time record by record."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._worker_seconds = 0.0
        self._unpriced = 0.0
        """Seconds before the first worker group."""
        self._least = 1
        self._clock: float | None = None
        self._world_size = 0
        self._running = False

    @property
    def running(self) -> bool:
        """Whether a launch goes on."""
        return self._running

    def take(self, record: Record) -> None:
        kind, time = record["kind"], record["time"]
        if kind == "run_start":
            self._clock, self._running = max(time, self._clock or time), True
            self._least = least_workers(record)
        if self._running:
            self._advance(time)
        if kind == "group_start":
            self._world_size = record["world_size"]
            self._worker_seconds += self._unpriced * self._world_size
            self._unpriced = 0.0
        elif kind == "run_end":
            self._running = False

    def _advance(self, time: float) -> None:
        passed = max(0.0, time - (self._clock if self._clock is not None else time))
        self._seconds += passed
        if self._world_size:
            self._worker_seconds += passed * self._world_size
        else:
            self._unpriced += passed
        self._clock = max(time, self._clock or time)

    def spent(self, now: float | None = None) -> Spent:
        """What was spent up to `now` (unix seconds; default: the last record) if the run is still going."""
        if now is not None and self._running:
            self._advance(now)
        return Spent(self._seconds, self._worker_seconds + self._unpriced * self._least, self._clock or 0.0, self._world_size or self._least)


def least_workers(run_start: Record) -> int:
    """The fewest workers that a launch takes, by its `run_start` record."""
    return run_start.get("config", {}).get("cluster", {}).get("workers", [1])[0]


def spent(records: Iterable[Record], now: float | None = None) -> Spent:
    """What a journal says was spent."""
    meter = Meter()
    for record in records:
        meter.take(record)
    return meter.spent(now)


def outlook(budget: Budget, so_far: Spent, seconds_left: float | None) -> dict[str, float]:
    """Fields of a `cost` record: hours, projected_hours; with a price usd, projected_usd; with a limit budget_share.

    seconds_left: until the planned end at the present speed; None while no speed is known, and nothing is projected then.
    budget_share: the largest used share of a limit.
    """
    end = None if seconds_left is None else so_far.at + seconds_left
    values = {"hours": so_far.hours()} | ({} if end is None else {"projected_hours": so_far.hours(end)})
    shares = [values["hours"] / budget.hours] if budget.hours else []
    price = budget.price_per_gpu_hour
    if price is not None:
        values |= {"usd": so_far.usd(price)} | ({} if end is None else {"projected_usd": so_far.usd(price, end)})
        shares += [values["usd"] / budget.usd] if budget.usd else []
    if shares:
        values["budget_share"] = max(shares)
    return values
