"""Stopping before the money is gone: pure decisions from what was spent and how long a step and the closing take.

A run may go on with a step only if, after it, the closing still fits: one save, one validation, and `budget.reserve_minutes`
for evaluation and export by hand. The closing is measured, over all launches; before the first save it counts as zero. So the
limit is passed by no more than a step and a save, when they take longer than those before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from raytune70b.config import UserError
from raytune70b.schema import Budget
from raytune70b.tracking.cost import Meter, Spent, spent
from raytune70b.tracking.journal import Record

LOOKAHEAD_STEPS = 3
"""Steps between the decision in the driver and the step at whose top the workers obey."""
OBEY_S = 3.0
"""Seconds that the decision takes to reach workers by their beats, and workers to end what runs beside them, when steps are shorter."""
LOOK_EVERY_S = 5.0
"""Between looks at the clock while no step ends: a run that waits for machines, or loads, spends its hours too."""


def check_left(budget: Budget, records: list[Record]) -> None:
    """Raises UserError when earlier launches have used the budget up: another start could only stop again."""
    so_far = spent(records)
    over = Clock.from_journal(budget, records, so_far.at, so_far.world_size).stop(so_far.at, OBEY_S) if records else None
    if over is not None:
        key = over.partition(":")[0]
        raise UserError(f"{key}: earlier launches of this run have used it up; raise {key}, or start another run.name")


class Stopper:
    """A sink of the watch that asks for the end of the run, once, when the budget wants it: at a step's end, or while none comes."""

    def __init__(self, budget: Budget, history: list[Record], request_stop: Callable[[str], None]):
        self._request_stop, self._asked, self._lock = request_stop, False, threading.Lock()
        self._meter = Meter()
        self._clock = Clock(budget, self._meter.spent(), 1)
        for record in history:
            self._take(record)
        if budget.hours is not None or budget.usd is not None:
            threading.Thread(target=self._look, name="budget", daemon=True).start()

    def put(self, record: Record) -> None:
        with self._lock:
            self._take(record)
            if record["kind"] == "step":
                self._decide(self._meter.spent(), record["time"], max(LOOKAHEAD_STEPS * record["seconds"], OBEY_S))

    def _look(self) -> None:
        while not self._asked:
            time.sleep(LOOK_EVERY_S)
            with self._lock:
                now = time.time()
                if self._meter.running:
                    self._decide(self._meter.spent(now), now, 0.0)

    def _decide(self, so_far: Spent, now: float, step_seconds: float) -> None:
        self._clock.spent = so_far
        reason = None if self._asked else self._clock.stop(now, step_seconds)
        if reason is not None:
            self._asked = True
            self._request_stop(reason)

    def _take(self, record: Record) -> None:
        self._meter.take(record)
        self._clock.learn(record)


@dataclass
class Clock:
    """Watches the limits for one worker group. `spent`: from the journal when the group started."""

    budget: Budget
    spent: Spent
    world_size: int
    save_seconds: float = 0.0
    """The longest save so far."""
    validation_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.spent = replace(self.spent, world_size=self.world_size)

    @classmethod
    def from_journal(cls, budget: Budget, records: list[Record], now: float, world_size: int) -> Clock:
        """The clock of a worker group that starts at `now`, with what the journal knows of saves and validations."""
        clock = cls(budget, spent(records, now), world_size)
        for record in records:
            clock.learn(record)
        return clock

    def learn(self, record: Record) -> None:
        """Measures the closing: the longest save and the longest validation so far."""
        if record["kind"] == "checkpoint":
            self.save_seconds = max(self.save_seconds, record["seconds"])
        elif record["kind"] == "validation":
            self.validation_seconds = max(self.validation_seconds, record["seconds"])

    def stop(self, now: float, step_seconds: float) -> str | None:
        """Why the run must stop before another step of `step_seconds`; None: it may go on. now: unix seconds."""
        closing = self.save_seconds + self.validation_seconds + 60 * self.budget.reserve_minutes
        return must_stop(self.budget, self.spent, now, step_seconds + closing)


def must_stop(budget: Budget, so_far: Spent, now: float, needed_seconds: float) -> str | None:
    """The limit that `needed_seconds` from now would pass, as a sentence; None if there is none."""
    if budget.hours is not None and so_far.hours(now + needed_seconds) > budget.hours:
        return f"budget.hours: {so_far.hours(now):.2f} of {budget.hours:g} h are used and closing takes {needed_seconds / 3600:.2f} h more"
    price = budget.price_per_gpu_hour
    if budget.usd is not None and price is not None and so_far.usd(price, now + needed_seconds) > budget.usd:
        more = so_far.usd(price, now + needed_seconds) - so_far.usd(price, now)
        return f"budget.usd: ${so_far.usd(price, now):,.2f} of ${budget.usd:,.2f} are spent and closing costs ${more:,.2f} more"
    return None


def seconds_allowed(budget: Budget, so_far: Spent, world_size: int) -> float | None:
    """Seconds that the limits leave with `world_size` workers; None without a limit; 0 when nothing is left."""
    left = []
    if budget.hours is not None:
        left.append(budget.hours * 3600 - so_far.seconds)
    if budget.usd is not None and budget.price_per_gpu_hour:
        left.append((budget.usd / budget.price_per_gpu_hour * 3600 - so_far.worker_seconds) / world_size)
    return max(0.0, min(left)) if left else None


def affordable_steps(budget: Budget, world_size: int, seconds_per_step: float, setup_seconds: float, closing_seconds: float, losses: float = 0.0) -> int | None:
    """Steps for which a new run's budget lasts, to fit the schedule to it; None without a limit, at least 1.

    seconds_per_step: saves and validations included. losses: share of the time expected to go to faults (0 <= losses < 1).
    """
    allowed = seconds_allowed(budget, Spent(0.0, 0.0, 0.0, world_size), world_size)
    if allowed is None:
        return None
    working = allowed - setup_seconds - closing_seconds - 60 * budget.reserve_minutes
    return max(1, int(working * (1 - losses) / seconds_per_step))
