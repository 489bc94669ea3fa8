"""What to do about a preemption notice: save at once and make way for a group without the machines that will be taken.

When the group cannot do without them, it trains on until a save must begin to be done in time.
"""

from __future__ import annotations

import time

import ray.train

LOOK_EVERY_S = 1.0
"""Seconds between looks: each is a round trip of all workers through Ray Train's barrier, too dear for every step of a small model."""
SPARE_S = 10.0


class Preempted(Exception):
    """Ends the workers so that Ray Train starts them again elsewhere; no failure."""


class Notice:
    """One rank's knowledge; rank 0's word counts. least: `cluster.workers[0]`."""

    def __init__(self, least: int):
        self._least = least
        self._looked = 0.0
        self._leave_by: float | None = None
        """Monotonic time at which the machine is taken; 0: leave at once."""
        self.text = ""

    def time_to_look(self) -> bool:
        return self._leave_by is None and time.monotonic() - self._looked >= LOOK_EVERY_S

    def look(self, world_size: int) -> None:
        """Asks Ray Train; all ranks must call it together."""
        self._looked = time.monotonic()
        info = ray.train.get_preemption_info()
        if info is None:
            return
        self.text = f"ranks {info.preempted_ranks} are on machines that will be taken"
        can_do_without = world_size - len(info.preempted_ranks) >= self._least
        left_s = info.deadline_ms / 1000 - time.time() if info.deadline_ms else 0.0
        self._leave_by = 0.0 if can_do_without else time.monotonic() + left_s

    def time_to_leave(self, save_s: float) -> bool:
        """Whether to save and leave now; save_s: how long the longest save took."""
        return self._leave_by is not None and time.monotonic() >= self._leave_by - 2 * save_s - SPARE_S
