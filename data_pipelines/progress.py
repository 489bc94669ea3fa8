"""Progress lines of the pipeline: units done, documents/s, tokens/s and the time that is left."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Any

EVERY_S = 5.0
DIGEST = re.compile("-[0-9a-f]{12}$")
"""What a stage's folder has behind its name, and no reader needs to see."""


class Progress:
    """Prints at most one line in five seconds, and none when quiet. Units that were on disk count as done, not as speed."""

    def __init__(self, quiet: bool = False):
        self.quiet = quiet
        self.seconds: dict[str, float] = {}

    def begin(self, stage: str, weights: list[int], found: int) -> None:
        """A stage starts; `found` units with the first weights are on disk already."""
        self.stage, self.started = DIGEST.sub("", stage), time.monotonic()
        self.printed = self.started
        self.total, self.units, self.found = max(1, sum(weights[found:])), len(weights), found
        self.weight, self.done = 0, 0
        self.counts: Counter[str] = Counter()
        if found and not self.quiet:
            print(f"{self.stage}: {found} of {len(weights)} units are there from an earlier run", flush=True)

    def step(self, weight: int, result: dict[str, Any]) -> None:
        """A unit is done."""
        self.weight, self.done = self.weight + weight, self.done + 1
        self.counts.update(result.get("counts", {}))
        now = time.monotonic()
        if not self.quiet and now - self.printed >= EVERY_S:
            self.printed = now
            print(self.line(now - self.started), flush=True)

    def line(self, seconds: float) -> str:
        share = self.weight / self.total
        rates = [f"{self.counts[name] / seconds:,.0f} {name}/s" for name in ("documents", "tokens") if self.counts[name]]
        left = seconds * (1 - share) / share if share else float("inf")
        return "  ".join([f"{self.stage:<10} {self.done + self.found}/{self.units} units  {share:4.0%}", *rates, f"ETA {left:,.0f} s"])

    def end(self) -> None:
        self.seconds[self.stage] = self.seconds.get(self.stage, 0.0) + time.monotonic() - self.started
