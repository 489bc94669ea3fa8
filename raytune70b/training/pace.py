"""When the next checkpoint is due: every so many steps, or by the Young-Daly rule from what saving has cost so far."""

from __future__ import annotations

FIRST_AUTO = 10
"""Steps before the first save of `checkpoint.every: auto`: enough to know the pace, little to lose."""


def passes(every: int, before: int, after: int) -> bool:
    """Whether a multiple of `every` lies in (before, after]; never for 0."""
    return every > 0 and after // every > before // every


class Pace:
    """Kept by rank 0, whose word the others follow. `step` counts completed optimizer steps."""

    def __init__(self, every: int | str, mtbf_hours: float, resumed_step: int):
        self._every, self._mtbf_s = every, mtbf_hours * 3600
        self._step_s: float | None = None
        self._stalls: list[float] = []
        self.saved_step: int | None = resumed_step or None
        """The step of the newest save that was begun and did not fail."""
        self._next = self._after(resumed_step)

    def stepped(self, seconds: float) -> None:
        """A step took so long; a moving average follows."""
        self._step_s = seconds if self._step_s is None else 0.9 * self._step_s + 0.1 * seconds

    def saving(self, step: int) -> None:
        """A save of this step begins."""
        self.saved_step, self._next = step, self._after(step)

    def saved(self, stall_s: float, published: bool) -> None:
        """The save ended; one that failed is due again at once."""
        self._stalls.append(stall_s)
        if not published:
            self.saved_step, self._next = None, 0
        elif self._every == "auto" and self.saved_step is not None:
            self._next = self._after(self.saved_step)

    def due(self, step: int) -> bool:
        """Whether the state after `step` steps is to be saved."""
        return 0 < step != self.saved_step and step >= self._next

    def interval(self) -> int:
        """Steps between saves."""
        if isinstance(self._every, int):
            return self._every
        if len(self._stalls) < 2 or self._step_s is None:  # the first copy of a group also pins its memory, which the later ones find there
            return FIRST_AUTO
        from raytune70b.planning.cost import young_daly_interval

        return max(1, round(young_daly_interval(self._stalls[-1], self._mtbf_s) / max(self._step_s, 1e-6)))

    def _after(self, step: int) -> int:
        """The next due step: a multiple of a fixed interval, so that a resumed run saves where an undisturbed one does."""
        length = self.interval()
        return (step // length + 1) * length if isinstance(self._every, int) else step + length
