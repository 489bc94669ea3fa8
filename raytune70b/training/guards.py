"""Which optimizer steps are skipped: a non-finite loss or gradient, or a spike of the loss. Pure: the same on all ranks.

The judge sees the loss and the gradient norm of the whole global batch, after the sum over ranks, so one rank's NaN
reaches every rank and all skip alike. Its memory goes into the cursor: a resumed run judges as an undisturbed one.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

MEMORY = 64
"""Accepted losses that a spike is measured against."""
LEAST = 16
"""Accepted losses before a spike is looked for."""


@dataclass
class Guard:
    spike_sigma: float
    max_bad_steps: int
    recent: list[float] = field(default_factory=list)
    bad_in_a_row: int = 0

    def judge(self, loss: float, grad_norm: float) -> str | None:
        """Why this step must be skipped, or None; call once a step."""
        reason = self._reason(loss, grad_norm)
        if reason is None:
            self.recent = [*self.recent, loss][-MEMORY:]
        self.bad_in_a_row = 0 if reason is None else self.bad_in_a_row + 1
        return reason

    def _reason(self, loss: float, grad_norm: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(grad_norm):
            return f"the gradient norm is {grad_norm}"
        if self.spike_sigma and len(self.recent) >= LEAST:
            mean, deviation = statistics.fmean(self.recent), statistics.pstdev(self.recent)
            if loss > mean + self.spike_sigma * deviation:
                return f"the loss {loss:.4f} is more than {self.spike_sigma:g} deviations ({deviation:.4f}) above the recent mean {mean:.4f}"
        return None

    @property
    def exhausted(self) -> bool:
        """Whether so many steps in a row were bad that the run must stop."""
        return self.bad_in_a_row >= self.max_bad_steps
