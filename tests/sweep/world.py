"""A world in which training takes no time: losses by formula, for tests of what a sweep decides."""

import math
import random

from raytune70b.sweep.points import Point, Result, hopeless
from raytune70b.sweep.stages import Space, next_stage

START = Point(1e-3, 16, 0.1, 16, 17)


def make_space(low=1e-4, high=1e-2, points=5, batches=(8, 32), warmups=(0.05, 0.2), ranks=(), extensions=3, repeats=2, start=START, patience=2.0, tokens_ratio=4.0):
    rates = tuple(float(f"{low * (high / low) ** (n / (points - 1)):.2e}") for n in range(points))
    return Space(start, rates, tuple(batches), tuple(warmups), tuple(ranks), extensions, repeats, patience, 0.5, 0.32, tokens_ratio)


class World:
    """Loss over the logarithm of the rate: slow towards low rates, steep towards high ones, divergence above `cliff`."""

    def __init__(self, best=1e-3, floor=3.0, noise=0.003, cliff=None, batch_gain=0.0, steep=1.0):
        self.best, self.floor, self.noise, self.cliff, self.batch_gain, self.steep = best, floor, noise, cliff or 100 * best, batch_gain, steep

    def loss(self, point: Point, noise=True) -> float:
        x = math.log(point.learning_rate / self.best)
        height = 0.05 * self.steep * (math.exp(0.9 * x) + 1.5 * math.exp(-0.6 * x) - 2.5)
        luck = random.Random(repr(point)).gauss(0, self.noise) if noise else 0.0
        return self.floor + height + luck - self.batch_gain * math.log2(16 / point.global_batch_size)

    def curve(self, point: Point) -> list[tuple[float, float]]:
        end = self.loss(point)
        return [(share, end + (7.0 - end) * (1 - share) ** 2) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]

    def run(self, point: Point, leader: Result | None = None, patience=2.0) -> Result:
        """The result of a trial; `leader`: a finished trial that judges it meanwhile."""
        if point.learning_rate > self.cliff:
            return Result(point, "diverged", ((0.0, 7.0),), None, 100, 0.0, 1.0, "not finite")
        curve = self.curve(point)
        stop = hopeless(curve, leader, patience) if leader is not None else None
        if stop is not None:
            kept = tuple(c for c in curve if c[0] <= stop)
            return Result(point, "stopped", kept, None, int(400 * stop), 0.0, stop, "behind")
        return Result(point, "finished", tuple(curve), curve[-1][1], 400, 0.0, 1.0)

    def run_beside(self, point: Point, first: Point | None, patience=2.0) -> Result:
        """The result of a trial whose leader runs at the same pace: at each validation the leader has come as far as the trial."""
        if point.learning_rate > self.cliff or first is None or first.learning_rate > self.cliff:
            return self.run(point)
        curve, ahead = self.curve(point), self.curve(first)
        for n in range(1, len(curve) + 1):
            stop = hopeless(curve[:n], Result(first, "running", tuple(ahead[:n]), None, 0, 0.0, 0.0), patience)
            if stop is not None:
                return Result(point, "stopped", tuple(curve[:n]), None, int(400 * stop), 0.0, stop, "behind")
        return self.run(point)


def sweep(space: Space, world: World, results=None, lucky=lambda point: True, kill_after=None, beside=False):
    """Runs stages until nothing is missing; returns the results and the points in the order they ran.

    lucky(point): whether the leader's result is there in time to stop this trial. kill_after: ends after so many trials.
    beside: all trials of a stage run at once; a leader of an earlier stage is finished, one of this stage is as far as they are.
    """
    results, ran = dict(results or {}), []
    while (stage := next_stage(space, results)) is not None:
        for point in stage.points:
            if kill_after is not None and len(ran) == kill_after:
                return results, ran
            first = stage.leaders.get(point)
            if beside and first in stage.points:
                results[point] = world.run_beside(point, first, space.patience)
            else:
                results[point] = world.run(point, results.get(first) if first is not None and lucky(point) else None, space.patience)
            ran.append(point)
    return results, ran
