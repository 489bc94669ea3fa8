"""What a sweep costs beforehand, and how many more trials its limits pay for. Pure numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from raytune70b.schema import Config
from raytune70b.sweep.points import Result, elapsed
from raytune70b.tracking.console import duration, number


def affordable(
    config: Config, results: Iterable[Result], wanted: int, room: int, trial_tokens: int, full_tokens: int, unfinished_s: float = 0.0
) -> tuple[int, str]:
    """How many of `wanted` trials may start now, at most, and the limit that says so ('' where none does).

    room: trials that run at a time. unfinished_s: seconds of trials that earlier launches began and did not end. Before any trial has ended nothing is known of its time: then one round of trials may start.
    """
    results, sweep = list(results), config.sweep
    most, why = wanted, ""
    if sweep.share is not None:
        left = sweep.share * full_tokens - sum(r.tokens for r in results)
        most, why = _less(most, why, int(left // trial_tokens), f"sweep.share: {sweep.share:g} of the full run's tokens")
    seconds = [r.seconds for r in results if r.usable]
    mean = statistics.fmean(seconds) if seconds else None
    if sweep.hours is not None:
        left = sweep.hours * 3600 - elapsed(results) - unfinished_s
        rounds = (1 if left > 0 else 0) if mean is None else int(left // mean)
        most, why = _less(most, why, rounds * room, f"sweep.hours: {sweep.hours:g} h")
    if sweep.usd is not None:
        left = sweep.usd - cost(config, results) - trial_cost(config, unfinished_s)
        count = (room if left > 0 else 0) if mean is None else int(left // trial_cost(config, mean))
        most, why = _less(most, why, count, f"sweep.usd: ${sweep.usd:,.2f}")
    return max(0, most), why


def _less(most: int, why: str, count: int, limit: str) -> tuple[int, str]:
    return (count, limit) if count < most else (most, why)


def trial_cost(config: Config, seconds: float) -> float:
    """USD of a trial that takes so long."""
    workers = config.sweep.workers or config.cluster.workers[0]
    return seconds / 3600 * workers * (config.budget.price_per_gpu_hour or 0.0)


def cost(config: Config, results: Iterable[Result]) -> float:
    """USD of all trials so far."""
    return sum(trial_cost(config, r.seconds) for r in results)


@dataclass(frozen=True)
class Price:
    """What trials take by the plan, all run to their ends: hours by the clock, and USD where a price is known."""

    trial_hours: float
    hours: float
    usd: float | None


def price(config: Config, trials: int, trial_seconds: float) -> Price:
    """Trials run side by side as far as the GPUs of `hardware` allow."""
    workers = config.sweep.workers or config.cluster.workers[0]
    at_a_time = max(1, config.hardware.nodes * config.hardware.gpus_per_node // workers)
    at_a_time = min(at_a_time, config.sweep.max_concurrent or at_a_time)
    usd = trials * trial_cost(config, trial_seconds) if config.budget.price_per_gpu_hour is not None else None
    return Price(trial_seconds / 3600, -(-trials // at_a_time) * trial_seconds / 3600, usd)


def beyond(config: Config, price: Price) -> str | None:
    """The full run's limit that a sweep without limits of its own would pass, with both values; None where there is none."""
    budget, sweep = config.budget, config.sweep
    if sweep.hours is not None or sweep.usd is not None or sweep.share is not None:
        return None
    if budget.usd is not None and price.usd is not None and price.usd > budget.usd:
        return f"${price.usd:,.0f}, more than budget.usd of the full run (${budget.usd:,.0f})"
    if budget.hours is not None and price.hours > budget.hours:
        return f"{price.hours:,.0f} h, more than budget.hours of the full run ({budget.hours:g} h)"
    return None


def plan_line(trials: int, most: int, trial_tokens: int, full_tokens: int, price: Price | None) -> str:
    """What the sweep will take, said before it starts."""
    share = trials * trial_tokens / full_tokens
    costs = ""
    if price is not None:
        costs = f"; {price.trial_hours:,.2f} h each by the plan, {price.hours:,.1f} h in all" + (f", ${price.usd:,.0f}" if price.usd is not None else "")
    return (f"sweep: about {trials} trials, {most} at most, of {number(trial_tokens)} tokens each: "
            f"{number(trials * trial_tokens)} tokens, {share:.0%} of the full run's{costs}, before any is stopped early")  # fmt: skip


def progress_line(results: list[Result], running: int, expected: int, room: int, newest: Result) -> str:
    """trials 4/13 done, 2 running; the newest; best so far; ETA."""
    usable = [r for r in results if r.usable]
    best = min(usable, key=lambda r: r.loss or 0.0, default=None)
    expected = max(expected, len(results) + running)
    mean = statistics.fmean(r.seconds for r in results)
    said = f"loss {newest.loss:.4f}" if newest.usable and newest.loss is not None else f"{newest.status} ({newest.reason})"
    parts = [f"trials {len(results)}/{expected} done, {running} running", f"{newest.point.name}: {said}"]
    if best is not None:
        parts.append(f"best {best.loss:.4f} at learning rate {best.point.learning_rate:.3g}")
    return "  ".join([*parts, f"ETA {duration((expected - len(results)) / room * mean)}"])
