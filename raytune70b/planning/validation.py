"""How well the plan's model predicts runs it has never seen: `jobs/plan.py validate TABLE.csv`.

Each source of the table is predicted with constants fitted on the other sources only. A fit is a least-squares search in the
logarithm of tokens/s, each source weighing about alike, with every constant held near a value that physics suggests (PRIOR, with
its spread), since some sources say nothing about some constants. The band holds 90 % of what such a fit has not seen. Only constants
are fitted: what memory.py counts, and the rules by which published.py reads a row, were worked out with the whole table in view.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from raytune70b.planning.memory import MemoryPlan, plan_memory, with_fragments
from raytune70b.planning.published import Left, Run, read_table
from raytune70b.planning.throughput import Constants, predict

PRIOR: dict[str, tuple[float, float]] = {
    "matrix": (0.9, 0.1),
    "half_hidden": (500.0, 0.7),
    "half_tokens": (300.0, 0.7),
    "traffic": (4.0, 0.7),
    "attention": (1.0, 0.3),
    "host": (1e-3, 0.7),
    "link": (0.7, 0.25),
    "exposed": (0.2, 0.7),
    "unpack": (8.0, 0.7),
}
"""Expected value of each constant, and the standard deviation of its logarithm: a measured figure of this kind within 10 % where
benchmarks of matrix products exist, within a factor of two where only the mechanism is known."""

BAND = 0.9
NOISE = 0.1
FULL_WEIGHT_ROWS = 20
FRAGMENT_GRID = tuple(n / 100 for n in range(0, 31, 2))


@dataclass(frozen=True)
class Prediction:
    """One run predicted by constants that its source had no part in. Errors are relative; None where the row states nothing."""

    run: Run
    memory: MemoryPlan
    memory_error: float | None
    fits_right: bool
    low: float
    likely: float
    high: float
    speed_error: float | None
    in_band: bool | None


@dataclass(frozen=True)
class Validation:
    predictions: list[Prediction]
    left: list[Left]
    constants: dict[str, Constants]


def validate(path: Path) -> Validation:
    """Leave-one-source-out over a table. Raises TableError."""
    runs, left = read_table(path)
    predictions, constants = [], {}
    for source in dict.fromkeys(run.source for run in runs):
        others = [run for run in runs if run.source != source]
        fitted, fragments = fit(others), fit_fragments(others)
        constants[source] = fitted
        predictions += [_predict(run, fitted, fragments) for run in runs if run.source == source]
    return Validation(predictions, left, constants)


def fit(runs: Sequence[Run]) -> Constants:
    """The constants that predict the stated throughputs best. Their band is as wide as their kind errs on sources it was not fitted to:
    each source of `runs` is left out in turn. No run: the prior."""
    runs = [run for run in runs if run.tokens_per_s_per_gpu]
    best = _search(runs, [0.0] * len(PRIOR))
    weights = _weights(runs)
    unseen, unseen_weights = [], []
    for source in dict.fromkeys(run.source for run in runs):
        constants = _constants(_search([run for run in runs if run.source != source], best, tries=5))
        for run, weight in zip(runs, weights, strict=True):
            if run.source == source:
                unseen.append(_log_error(run, constants))
                unseen_weights.append(weight)
    return replace(_constants(best), **_band(unseen, unseen_weights)) if unseen else _constants(best)


def _search(runs: Sequence[Run], start: Sequence[float], tries: int = 40) -> list[float]:
    """Least squares of the logarithmic errors, from `start` (the logarithms of the constants over their priors)."""
    import numpy as np
    from scipy.optimize import least_squares

    if not runs:
        return list(start)
    weights = np.sqrt(_weights(runs)) / NOISE
    spread = np.array([deviation for _, deviation in PRIOR.values()])

    def errors(x: Sequence[float]) -> np.ndarray:
        constants = _constants(x)
        return np.concatenate([weights * [_log_error(run, constants) for run in runs], x / spread])

    return list(least_squares(errors, np.array(start), loss="soft_l1", max_nfev=tries, xtol=1e-4, ftol=1e-4).x)


def _weights(runs: Sequence[Run]) -> list[float]:
    """A source of many rows weighs as FULL_WEIGHT_ROWS of them."""
    rows = Counter(run.source for run in runs)
    return [min(rows[run.source], FULL_WEIGHT_ROWS) / rows[run.source] for run in runs]


def _constants(x: Sequence[float]) -> Constants:
    return Constants(**{name: value * math.exp(shift) for (name, (value, _)), shift in zip(PRIOR.items(), x, strict=True)})


def _log_error(run: Run, constants: Constants) -> float:
    assert run.tokens_per_s_per_gpu is not None
    return math.log(predict(run.workload, run.machine, constants).likely / run.tokens_per_s_per_gpu)


def _band(errors: Sequence[float], weights: Sequence[float]) -> dict[str, float]:
    """The factors around the likely value that hold the weighted share BAND of the errors; alike on both sides, as so few sources show
    no skew that could be trusted."""
    reached, edge = 0.0, 0.0
    for error, weight in sorted(zip(map(abs, errors), weights, strict=True)):
        if reached >= BAND * sum(weights):
            break
        reached, edge = reached + weight, error
    return {"low": math.exp(-edge), "high": math.exp(edge)}


def fit_fragments(runs: Sequence[Run]) -> float:
    """The allocator's loss that tells which runs fit and which ended out of memory: the largest, and so safest, within a hundredth of
    the best share of right answers."""
    plans = [(run, plan_memory(run.workload, run.machine.gpu.memory)) for run in runs]
    right = {share: sum(_fits_right(run, with_fragments(plan, share)) for run, plan in plans) / len(plans) for share in FRAGMENT_GRID}
    return max(share for share, value in right.items() if value >= max(right.values()) - 0.01)


def _fits_right(run: Run, plan: MemoryPlan) -> bool:
    return (plan.verdict == "does not fit") == run.out_of_memory


def _predict(run: Run, constants: Constants, fragments: float) -> Prediction:
    memory = plan_memory(run.workload, run.machine.gpu.memory, fragments)
    stated, speed = run.memory, run.tokens_per_s_per_gpu
    counted = memory.allocated if run.memory_is_allocated else memory.total
    likely = predict(run.workload, run.machine, constants).likely
    low, high = constants.low * likely, constants.high * likely
    return Prediction(
        run, memory, None if stated is None else counted / stated - 1, _fits_right(run, memory), low, likely, high,
        None if speed is None else likely / speed - 1, None if speed is None else low <= speed <= high,
    )  # fmt: skip


def score(predictions: Sequence[Prediction]) -> dict[str, float | int | None]:
    """Median errors, share right on fits or out-of-memory, share of runs that the band holds."""
    memory = [abs(p.memory_error) for p in predictions if p.memory_error is not None]
    speed = [abs(p.speed_error) for p in predictions if p.speed_error is not None]
    band = [p.in_band for p in predictions if p.in_band is not None]
    return {
        "rows": len(predictions),
        "memory_rows": len(memory),
        "memory_median_error": median(memory) if memory else None,
        "fits_right": sum(p.fits_right for p in predictions) / len(predictions),
        "speed_rows": len(speed),
        "speed_median_error": median(speed) if speed else None,
        "in_band": sum(band) / len(band) if band else None,
    }


def write_predictions(validation: Validation, path: Path) -> None:
    """One line a row of the table, predicted or left out with its reason."""
    columns = [
        "line",
        "source",
        "method",
        "tokens_per_s_per_gpu",
        "low",
        "likely",
        "high",
        "memory_gib",
        "predicted_memory_gib",
        "verdict",
        "out_of_memory",
        "left_out",
    ]
    lines: dict[int, list[object]] = {}
    for p in validation.predictions:
        run, counted = p.run, p.memory.allocated if p.run.memory_is_allocated else p.memory.total
        stated = None if run.memory is None else round(run.memory / 2**30, 2)
        lines[run.line] = [
            run.line, run.source, run.method, run.tokens_per_s_per_gpu, round(p.low, 1), round(p.likely, 1), round(p.high, 1),
            stated, round(counted / 2**30, 2), p.memory.verdict, run.out_of_memory, "",
        ]  # fmt: skip
    for row in validation.left:
        lines[row.line] = [row.line, row.source, *[""] * 9, row.reason]
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(lines[line] for line in sorted(lines))
