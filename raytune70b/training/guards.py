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


PASSING = ("OSError", "ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError", "TimeoutError", "RuntimeError", "AcceleratorError",
           "DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "RayError", "RayTaskError", "ActorDiedError", "WorkerGroupError")  # fmt: skip
"""Kinds of errors that the machines may be to blame for, not the program: broken connections, storage, CUDA."""


@dataclass(frozen=True)
class Failure:
    """How a worker group ended."""

    step: int
    """Steps completed; -1: it never began to train."""
    error: str
    """`Kind: message` of the first worker that failed."""
    place: str
    """file:line where it was raised; empty for a worker that died without a word."""
    final: bool = False
    """The program says itself that trying again does not help."""


def gives_up(failures: list[Failure]) -> str:
    """Why another start would end in the same way, or "".

    The same error at the same step and line twice is the program's fault; kinds that machines cause, and deaths without a
    word, must repeat at one step three and five times.
    """
    last = failures[-1]
    if last.final:
        return last.error
    same_step = 0
    for failure in reversed(failures):
        if failure.step != last.step:
            break
        same_step += 1
    same_place = 0
    for failure in reversed(failures[-same_step:]):
        if (failure.place, failure.error.split(":")[0]) != (last.place, last.error.split(":")[0]):
            break
        same_place += 1
    machine = last.error.split(":")[0] in PASSING
    limit = 5 if not last.place else 3 if machine else 2
    if (same_place if last.place and not machine else same_step) >= limit:
        where = f"after step {last.step}" if last.step >= 0 else "before their first step"
        return f"the workers failed {limit} times in a row {where}: {last.error}"
    return ""
