"""Which trials come next, and the answer when none does: a pure function of the settings and of the results so far.

That is what makes a sweep resumable: the same results lead to the same next trials and to the same answer, in one launch or in
ten. The stages: the range of learning rates; beyond an end while the best rate lies there; between the best rate and its
neighbours, with repeats of the best rate under other seeds for the noise; then, at the best rate, the global batch, the warm-up
and the LoRA rank, one after the other, each kept only if it wins by more than noise.

The leader whose curve may stop a trial is fixed: the first rate of the range for the others of it, the best of the range for
further rates, the point before for a batch, warm-up or rank. The verdict asks the same leader again (`counts`), so that a trial
which happened to run to its end, because its leader was not done, counts no more than one that was stopped. Where a whole stage
runs side by side no leader is done in time: then it stops others by how far it has come (`points.hopeless`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from raytune70b.sweep.fit import Fit, best_rate, edge, noise, threshold, transfer
from raytune70b.sweep.points import Point, Result, hopeless

FINE = 2.5
"""Neighbouring rates this far apart around the best one are close enough for the fit."""


@dataclass(frozen=True)
class Space:
    """What may be tried."""

    start: Point
    """The full run's own settings."""
    rates: tuple[float, ...]
    batches: tuple[int, ...]
    warmups: tuple[float, ...]
    ranks: tuple[int, ...]
    extensions: int
    repeats: int
    patience: float
    batch_exponent: float
    horizon_exponent: float
    tokens_ratio: float
    """Tokens of the full run by those of a trial."""

    def at(self, rate: float) -> Point:
        return replace(self.start, learning_rate=rate)

    @property
    def expected(self) -> int:
        """Trials of a sweep whose range needs no extension."""
        levels = max(0, math.ceil(math.log2(math.log(self.rates[1] / self.rates[0]) / math.log(FINE))))
        return len(self.rates) + 2 * levels + self.repeats + len(self.batches) + len(self.warmups) + len(self.ranks)

    @property
    def most(self) -> int:
        """Trials of a sweep at most."""
        return self.expected + self.extensions


@dataclass(frozen=True)
class Stage:
    """Trials that may run side by side."""

    name: str
    points: tuple[Point, ...]
    leaders: dict[Point, Point]
    """Whose curve judges which trial; a trial that is not named here runs to its end."""


Results = dict[Point, Result]


def next_stage(space: Space, results: Results) -> Stage | None:
    """What is missing next; None when the answer is complete, or nothing of the range can be compared."""
    first = space.at(nearest(space.rates, space.start.learning_rate))
    order = sorted(space.rates, key=lambda r: (abs(math.log(r / first.learning_rate)), r))
    missing = [space.at(r) for r in order if space.at(r) not in results]
    if missing:
        return Stage("range", tuple(missing), {p: first for p in missing if p != first})
    best = best_of_range(space, results)
    if best is None:
        return None
    again, beyond = [p for p in repeats(space, results) if p not in results], extension(space, results)
    rates = [beyond] if beyond is not None else [r for r in between(space, results) if space.at(r) not in results]
    if again or rates:
        name = " and ".join([*(["noise"] if again else []), *(["extension" if beyond is not None else "refinement"] if rates else [])])
        return Stage(name, (*again, *map(space.at, rates)), {space.at(r): best for r in rates})
    for axis in AXES:
        base = settled(space, results, axis)
        missing = [p for p in variants(space, base, axis) if p not in results]
        if missing:
            return Stage(axis, tuple(missing), {p: base for p in missing})
    return None


def nearest(rates: Iterable[float], wanted: float) -> float:
    return min(rates, key=lambda r: abs(math.log(r / wanted)))


def counts(space: Space, results: Results, result: Result) -> bool:
    """Whether a trial's loss counts at the run's own batch, warm-up and rank: it was finished, and not without hope by its leader."""
    point = result.point
    if replace(point, seed=space.start.seed) != space.at(point.learning_rate) or not result.usable:
        return False
    if point.seed != space.start.seed:
        return True
    first = space.at(nearest(space.rates, space.start.learning_rate))
    ahead = first if point.learning_rate in space.rates else best_of_range(space, results)
    judge = results.get(ahead) if ahead is not None and ahead != point else None
    return judge is None or hopeless(result.curve, judge, space.patience) is None


def losses(space: Space, results: Results) -> dict[float, float]:
    """Loss by learning rate at the run's own batch, warm-up and rank: the mean over seeds."""
    found: dict[float, list[float]] = {}
    for result in results.values():
        if counts(space, results, result):
            found.setdefault(result.point.learning_rate, []).append(result.loss or 0.0)
    return {rate: statistics.fmean(values) for rate, values in sorted(found.items())}


def steering(space: Space, results: Results) -> dict[float, float]:
    """The same for the run's own seed only: what decides on further rates must not depend on which repeats are there already."""
    return losses(space, {p: r for p, r in results.items() if p.seed == space.start.seed})


def lowest(points: dict[float, float]) -> float | None:
    """The rate of the lowest loss; None where there is none."""
    return min(points, key=lambda r: points[r]) if points else None


def best_of_range(space: Space, results: Results) -> Point | None:
    """The best point of the range as it was first set."""
    rate = lowest(steering(space, {p: r for p, r in results.items() if p.learning_rate in space.rates}))
    return None if rate is None else space.at(rate)


def tried(space: Space, results: Results) -> list[float]:
    """Every learning rate tried at the run's own settings, whatever came of it."""
    return sorted({p.learning_rate for p in results if p == space.at(p.learning_rate)})


def repeats(space: Space, results: Results) -> list[Point]:
    """The best rate of the range again under further seeds."""
    best = best_of_range(space, results)
    return [] if best is None else [replace(best, seed=space.start.seed + 1 + n) for n in range(space.repeats)]


def seed_noise(space: Space, results: Results) -> tuple[float, float] | None:
    """(standard deviation between seeds, what a difference must exceed); None before two seeds are there."""
    again = repeats(space, results)
    group = [replace(again[0], seed=space.start.seed), *again] if again else []
    found = [loss for p in group if (r := results.get(p)) is not None and r.usable and (loss := r.loss) is not None]
    if len(found) < 2:
        return None
    return noise(found), threshold(noise(found), len(found))


def extension(space: Space, results: Results) -> float | None:
    """The next rate beyond an end of what was tried, where the best rate lies at that end and the bound allows it."""
    best, rates = lowest(steering(space, results)), tried(space, results)
    side = edge(rates, best) if best is not None else None
    if best is None or side is None:
        return None
    ratio = space.rates[1] / space.rates[0]
    beyond = [r for r in rates if (r < space.rates[0] if side == "low" else r > space.rates[-1])]
    if len(beyond) >= space.extensions:
        return None
    return float(f"{best / ratio if side == 'low' else best * ratio:.2e}")


def between(space: Space, results: Results) -> list[float]:
    """Rates half-way between the best one and its neighbours, and again between those, until they stand close enough for the fit.

    Each level is worked out from the levels before it alone, so that a part of a level leads to no other rates than the whole.
    """
    ratio, points = space.rates[1] / space.rates[0], steering(space, results)
    rates = [r for r in tried(space, results) if _on_grid(r, space.rates[0], ratio)]
    while (best := lowest({r: loss for r, loss in points.items() if r in rates})) is not None:
        place = rates.index(best)
        sides = [side for side in rates[max(0, place - 1) : place] + rates[place + 1 : place + 2] if max(side / best, best / side) > FINE]
        level = [float(f"{math.sqrt(best * side):.2e}") for side in sides]
        if not level or any(space.at(r) not in results for r in level):
            return level
        rates = sorted([*rates, *level])
    return []


def _on_grid(rate: float, first: float, ratio: float) -> bool:
    steps = math.log(rate / first) / math.log(ratio)
    return abs(steps - round(steps)) < 0.05


def fitted(space: Space, results: Results) -> Fit | None:
    points, spread = losses(space, results), seed_noise(space, results)
    if not points:
        return None
    deviation, margin = spread if spread is not None else (0.0, 0.0)
    return best_rate(points, deviation, margin)


AXES = ("batch", "warmup", "rank")
FIELD = {"batch": "global_batch_size", "warmup": "warmup_share", "rank": "lora_rank"}


def variants(space: Space, base: Point, axis: str) -> list[Point]:
    """The points that differ from `base` on one axis; with another batch the rate follows."""
    if axis == "batch":
        return [
            replace(base, global_batch_size=b, learning_rate=transfer(base.learning_rate, b / base.global_batch_size, 1.0, space.batch_exponent, 0.0))
            for b in space.batches
        ]
    if axis == "warmup":
        return [replace(base, warmup_share=w) for w in space.warmups]
    return [replace(base, lora_rank=r) for r in space.ranks]


def settled(space: Space, results: Results, until: str | None = None) -> Point:
    """The best point after the learning rate and the axes before `until`: a value is changed only by more than noise."""
    rate = lowest(losses(space, results))
    base = space.at(rate) if rate is not None else space.start
    spread = seed_noise(space, results)
    for axis in AXES:
        if axis == until:
            break
        base = _winner([base, *variants(space, base, axis)], results, spread[1] if spread else math.inf, space.patience)
    return base


def _winner(points: list[Point], results: Results, margin: float, patience: float) -> Point:
    """The first point, unless another one's loss is lower by more than `margin`."""
    first = results.get(points[0])
    found = {points[0]: first.loss} if first is not None and first.usable and first.loss is not None else {}
    for point in points[1:]:
        result = results.get(point)
        if result is not None and result.usable and result.loss is not None and (first is None or hopeless(result.curve, first, patience) is None):
            found[point] = result.loss
    if not found:
        return points[0]
    best = min(found, key=lambda p: found[p])
    return best if points[0] not in found or found[best] < found[points[0]] - margin else points[0]
