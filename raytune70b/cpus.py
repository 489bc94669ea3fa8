"""CPUs that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Where a container finds its share of the machine's CPUs: microseconds in each period, or `max`, and the period."""


def usable(quota: Path = QUOTA) -> int:
    """CPUs that the scheduler gives this process: its affinity's, or fewer where its container's quota allows fewer; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        share, period = quota.read_text().split()
        return max(1, min(allowed, int(share) // int(period)))
    except (OSError, ValueError):  # no container, or one without a quota: `max`
        return max(1, allowed)
