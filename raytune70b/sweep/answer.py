"""The answer of a sweep in numbers and in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from raytune70b.sweep.fit import Fit, edge, transfer
from raytune70b.sweep.points import Point, Result
from raytune70b.sweep.stages import Results, Space, fitted, losses, seed_noise, settled, tried

FOUND, ALL_DIVERGED, ALL_FAILED, NOTHING_YET = "found", "all diverged", "all failed", "nothing yet"


@dataclass(frozen=True)
class Answer:
    """What a sweep found."""

    status: str
    """found, all diverged, all failed, or nothing yet (no trial has a loss to go by)."""
    verdict: str
    point: Point
    """Settings for the full run: the best of the trials, the rate carried over."""
    trial_rate: float
    """The best rate over the trials' horizon."""
    fit: Fit | None
    deviation: float | None
    """Standard deviation of the loss between seeds."""
    margin: float | None
    """What the difference of two trials must exceed."""
    notes: tuple[str, ...]


def answer(space: Space, results: Results) -> Answer:
    """The answer that these results give."""
    points, spread, fit = losses(space, results), seed_noise(space, results), fitted(space, results)
    if fit is None:
        return _none(space, results)
    base = settled(space, results)
    flat = spread is not None and len(points) >= 3 and max(points.values()) - min(points.values()) <= spread[1]
    keeps = flat and _among(points, space, results)
    batch_ratio = base.global_batch_size / space.start.global_batch_size
    rate = space.start.learning_rate if keeps else transfer(fit.rate, batch_ratio, space.tokens_ratio, space.batch_exponent, space.horizon_exponent)
    verdict = f"learning rate {rate:.3g} for the full run, {fit.rate:.3g} over the trials' horizon"
    if flat:
        verdict = f"no difference beyond noise between learning rates {min(points):.3g} and {max(points):.3g}: " + (
            f"the run keeps its {rate:.3g}" if keeps else f"{verdict}, since the run's own {space.start.learning_rate:.3g} is not among them"
        )
    deviation, margin = spread if spread is not None else (None, None)
    chosen = replace(base, learning_rate=rate, seed=space.start.seed)
    return Answer(FOUND, verdict, chosen, fit.rate, fit, deviation, margin, tuple(_notes(space, results, fit, chosen, flat)))


def _among(points: dict[float, float], space: Space, results: Results) -> bool:
    """Whether the run's own rate lies among the rates that came to a loss, and is not itself one that did not."""
    own = space.start.learning_rate
    return own in points or (min(points) < own < max(points) and own not in tried(space, results))


def _none(space: Space, results: Results) -> Answer:
    at = [r for r in results.values() if r.point.learning_rate in space.rates]
    reasons = sorted({r.reason for r in at if r.reason})
    if len({r.point for r in at}) < len(space.rates):
        status, verdict = NOTHING_YET, "no trial has come to its end yet"
    elif all(r.status == "failed" for r in at):
        status, verdict = ALL_FAILED, f"all {len(at)} trials failed: {reasons[0] if reasons else 'no reason given'}"
    else:
        low, high = min(space.rates), max(space.rates)
        status, verdict = ALL_DIVERGED, f"all learning rates from {low:.3g} to {high:.3g} diverge; lower sweep.low (to {low / 100:.3g}, say) and sweep.high"
    return Answer(status, verdict, space.start, space.start.learning_rate, None, None, None, tuple(reasons))


def _notes(space: Space, results: Results, fit: Fit, chosen: Point, flat: bool) -> Iterable[str]:
    rates = tried(space, results)
    for side, beyond in (("below", [r for r in rates if r < min(space.rates)]), ("above", [r for r in rates if r > max(space.rates)])):
        if beyond:
            yield f"the best rate lay at the range's end, so it was extended {side} to {min(beyond) if side == 'below' else max(beyond):.3g}"
    points = losses(space, results)
    side_open = edge(rates, min(points, key=lambda r: points[r]))
    if side_open is not None and not flat:
        yield f"the best rate is still the {'lowest' if side_open == 'low' else 'highest'} tried: raise sweep.extensions, or set sweep.{side_open} beyond it"
    if not flat and fit.curvature and fit.low < fit.high:
        yield f"rates from {fit.low:.3g} to {fit.high:.3g} cannot be told from the best one"
    if not flat:
        yield from _transfer_notes(space, chosen)
    yield from _axis_notes(space, results, chosen)
    for status in ("diverged", "failed", "stopped"):
        found = sorted({r.point.learning_rate for r in results.values() if r.status == status})
        if found:
            yield f"{status}: {', '.join(f'{rate:.3g}' for rate in found)}"


def _transfer_notes(space: Space, chosen: Point) -> Iterable[str]:
    if space.tokens_ratio > 1.01:
        rule = f"by tokens^-{space.horizon_exponent:g} (arXiv 2409.19913)" if space.horizon_exponent else "as it is (sweep.horizon_exponent: 0)"
        yield f"carried to {space.tokens_ratio:.3g} times the tokens {rule}"
    if chosen.global_batch_size != space.start.global_batch_size:
        yield f"carried to batch {chosen.global_batch_size} by batch^{space.batch_exponent:g} (arXiv 2205.10287)"


def _axis_notes(space: Space, results: Results, chosen: Point) -> Iterable[str]:
    start = space.start
    for name, values, old, new in (
        ("global batch", space.batches, start.global_batch_size, chosen.global_batch_size),
        ("warm-up (share of the run)", space.warmups, start.warmup_share, chosen.warmup_share),
        ("LoRA rank", space.ranks, start.lora_rank, chosen.lora_rank),
    ):  # fmt: skip
        if values and any(_on_axis(p, name, values) for p in results):
            yield f"{name}: {new:g} instead of {old:g}" if new != old else f"{name}: no difference beyond noise in favour of {' or '.join(f'{v:g}' for v in values)}; {old:g} stays"


def _on_axis(point: Point, name: str, values: tuple[float, ...]) -> bool:
    return {"g": point.global_batch_size, "w": point.warmup_share, "L": point.lora_rank}[name[0]] in values


def rows(results: Iterable[Result]) -> list[dict[str, object]]:
    """The table of the trials, best first."""
    ordered = sorted(results, key=lambda r: (r.loss is None, r.loss or 0.0, r.point.name))
    return [
        {"learning_rate": r.point.learning_rate, "global_batch_size": r.point.global_batch_size, "warmup_share": r.point.warmup_share,
         "lora_rank": r.point.lora_rank, "seed": r.point.seed, "status": r.status, "loss": r.loss, "share": r.curve[-1][0] if r.curve else 0.0,
         "tokens": r.tokens, "seconds": round(r.seconds, 1), "reason": r.reason}
        for r in ordered
    ]  # fmt: skip
