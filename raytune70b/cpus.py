"""CPUs that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Where a container finds its share of the machine's CPUs: microseconds in each period, or `max`, and the period."""

SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets it in the environment of a submitted job's own process."""


def usable(quota: Path = QUOTA) -> int:
    """CPUs that the scheduler gives this process: its affinity's, or fewer where its container's quota allows fewer; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        share, period = quota.read_text().split()
        return max(1, min(allowed, int(share) // int(period)))
    except (OSError, ValueError):  # no container, or one without a quota: `max`
        return max(1, allowed)


def take_all() -> None:
    """Lets torch compute with all of this process's CPUs where only Ray's precaution holds it to one: for a job that works by itself.

    A submitted job that reserves no CPUs gets OMP_NUM_THREADS=1 from Ray. Any other number (Ray's for `--entrypoint-num-cpus`, or the
    user's) stands, and so does 1 where the job was not submitted.
    """
    if SUBMITTED in os.environ and os.environ.get("OMP_NUM_THREADS") == "1":
        import torch

        torch.set_num_threads(usable())
