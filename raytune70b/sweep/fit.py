"""From losses at a few learning rates to the best rate, with its uncertainty: pure numbers.

The loss near its minimum is a parabola in the logarithm of the rate. The fit trusts a point the less the higher it lies above
the lowest one, for far from the minimum the curve is no parabola: it climbs steeply towards divergence and slowly towards rates
that learn nothing. Differences count only where they exceed what other seeds give (`threshold`).

Two rules carry the optimum to the full run (`transfer`):
- batch: eta ~ B ** 0.5 for Adam (Malladi, Lyu, Panigrahi, Arora, NeurIPS 2022, "On the SDEs and Scaling Rules for Adaptive
  Gradient Algorithms", arXiv 2205.10287). Their square root rule also moves the betas and epsilon; here they stay, since
  batches are tried within a factor of two;
- horizon: eta ~ D ** -0.32 with D the tokens of a run (Bjorck, Benhaim, Chaudhary, Wei, Song, ICLR 2025, "Scaling Optimal LR
  Across Token Horizons", arXiv 2409.19913). It was measured where models are pre-trained, on 25 billion tokens and more, and a
  later study finds the law bent at larger scales (arXiv 2606.29158); a fine-tuning run is neither, so the exponents are settings.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np

DISTRUST = 0.25
"""Error of the parabola as a share of a point's height above the lowest one."""
LEAST_NOISE = 1e-4
"""Noise assumed at least, as a share of the lowest loss."""
STUDENT = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81)
"""95 % quantiles, one-sided, of Student's t with 1, 2, ... 10 degrees of freedom."""


@dataclass(frozen=True)
class Fit:
    """The best rate by the fit, and the rates that cannot be told from it."""

    rate: float
    loss: float
    curvature: float
    """The loss at `rate` * e ** x is loss + curvature * x ** 2; 0 where no parabola fits."""
    low: float
    high: float
    """Between these rates the loss lies within the threshold of the minimum, as far as rates were tried."""

    def at(self, rate: float) -> float:
        """The fitted loss at a rate."""
        return self.loss + self.curvature * math.log(rate / self.rate) ** 2


def best_rate(points: dict[float, float], noise: float, margin: float = 0.0) -> Fit:
    """Fits losses by rate, at least one; `noise`: standard deviation between seeds; `margin`: the threshold.

    The optimum stays between the neighbours of the best rate tried: beyond that it would be a guess.
    """
    rates = sorted(points)
    best = min(rates, key=lambda r: points[r])
    place = rates.index(best)
    low, high = rates[max(0, place - 1)], rates[min(len(rates) - 1, place + 1)]
    curvature, middle, bottom = _parabola(points, best, noise) if len(rates) >= 3 else (0.0, 0.0, points[best])
    if curvature <= 0:
        curvature, middle, bottom = 0.0, 0.0, points[best]
    rate = min(max(best * math.exp(middle), low), high)
    loss = bottom + curvature * (math.log(rate / best) - middle) ** 2
    reach = math.exp(math.sqrt(margin / curvature)) if curvature else math.inf
    return Fit(_rounded(rate), loss, curvature, max(rate / reach, rates[0]), min(rate * reach, rates[-1]))


def _parabola(points: dict[float, float], best: float, noise: float) -> tuple[float, float, float]:
    """(curvature, place of the minimum, loss there) over x = ln(rate / best), by weighted least squares."""
    x = np.log(np.array(list(points)) / best)
    y = np.array(list(points.values()))
    floor = max(noise, LEAST_NOISE * abs(y.min()))
    error = np.sqrt(floor**2 + (DISTRUST * (y - y.min())) ** 2)
    a, b, c = np.polyfit(x, y, 2, w=1 / error)
    if a <= 0:
        return 0.0, 0.0, float(y.min())
    return float(a), float(-b / (2 * a)), float(c - b * b / (4 * a))


def _rounded(rate: float) -> float:
    """Three significant digits: more would claim more than was measured."""
    return float(f"{rate:.2e}")


def noise(losses: list[float]) -> float:
    """Standard deviation of losses that differ in the seed only, at least two."""
    return statistics.stdev(losses)


def threshold(deviation: float, count: int) -> float:
    """What the difference of two single trials must exceed to be more than noise, at 95 % (one-sided t test).

    deviation: standard deviation between `count` seeds.
    """
    quantile = STUDENT[min(count - 1, len(STUDENT)) - 1]
    return quantile * math.sqrt(2) * deviation


def edge(tried: list[float], best: float) -> str | None:
    """`low` or `high` where no rate beyond the best one has been tried on that side; None where it is bracketed."""
    if best <= min(tried):
        return "low"
    return "high" if best >= max(tried) else None


def spaced(low: float, high: float, count: int) -> list[float]:
    """`count` rates from low to high, evenly spaced in their logarithm."""
    return [_rounded(float(r)) for r in np.geomspace(low, high, count)]


def transfer(rate: float, batch_ratio: float, tokens_ratio: float, batch_exponent: float, horizon_exponent: float) -> float:
    """The rate for a run with `batch_ratio` times the global batch and `tokens_ratio` times the tokens."""
    return _rounded(rate * batch_ratio**batch_exponent * tokens_ratio**-horizon_exponent)
