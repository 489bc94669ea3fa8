"""Joins the Ray cluster that is there, or starts one on this machine."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

from raytune70b.config import UserError
from raytune70b.schema import Config

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
"""What workers print reaches the user through the run's own records."""

STARTED_AT_ONCE = 8
GPUS_S = 600.0
"""How long a cluster's first GPU is waited for: a node that starts, pulls its image."""


def use_token() -> None:
    """Makes this process show Ray's token where there is one and RAY_AUTH_MODE does not say otherwise; call it before Ray is imported.

    `ray start` protects a cluster as soon as the machine has a token (the first local cluster makes one), but clients show it
    only when they are told to, and fail with "token is missing". A cluster without protection ignores it.
    """
    has = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ or (Path.home() / ".ray" / "auth_token").is_file()
    if has:
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def start(config: Config) -> None:
    """Connects this process to Ray; does nothing where it is connected.

    A cluster started here has a CPU for every worker and one to read data, whatever the machine has: more workers than cores
    are slow, fewer CPUs than workers wait for ever. Raises UserError when `cluster.address` cannot be reached.
    """
    import ray

    if ray.is_initialized():
        return
    # The token that Ray makes for a new cluster is told of once a process; it is in Ray's documentation, not the user's business.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    address = config.cluster.address
    if starts_its_own(config):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # what a team trains is nobody else's business unless it says so
        # Ray warns of four times as many processes as it starts at once (a process a core), which on a small machine a sweep has always.
        os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(max(STARTED_AT_ONCE, os.cpu_count() or 1)))
        cpus = config.cluster.workers[1] * config.cluster.cpus_per_worker + 1
        ray.init(address="local", num_cpus=max(os.cpu_count() or 1, round(cpus)), include_dashboard=config.cluster.dashboard, **QUIET)
        return
    try:
        ray.init(address=None if address == "auto" else address, **QUIET)
    except (ConnectionError, ray.exceptions.RaySystemError) as error:
        where = os.environ.get("RAY_ADDRESS") if address == "auto" else address
        raise UserError(f"cluster.address: no Ray cluster answers at {where} ({str(error).splitlines()[0]}); start one, or use cluster.address=local") from error


def starts_its_own(config: Config) -> bool:
    """Whether a job makes a cluster of its own on this machine, where it is not connected to one."""
    return config.cluster.address == "local" or (config.cluster.address == "auto" and "RAY_ADDRESS" not in os.environ)


def uses_gpu(config: Config) -> bool:
    """Whether workers get a GPU each; needs a connection.

    Where the configuration names GPUs, a cluster without one may still be starting (on Kubernetes its head has none): that is waited for,
    `GPUS_S` at most. Raises UserError where none comes.
    """
    import ray

    settings, named = config.cluster, config.hardware.gpu != "cpu"
    end, told = time.monotonic() + (0 if starts_its_own(config) else GPUS_S), False
    while settings.device != "cpu" and not ray.cluster_resources().get("GPU", 0):
        if settings.device == "auto" and not named:
            return False
        if time.monotonic() >= end:
            why = "cluster.device: is gpu" if settings.device == "gpu" else f"hardware.gpu: is {config.hardware.gpu}"
            raise UserError(f"{why}, but the Ray cluster has no GPU; start its nodes with GPUs, or use cluster.device=cpu")
        if not told:
            print(f"the Ray cluster has no GPU yet; waiting for one, {GPUS_S / 60:.0f} minutes at most", flush=True)
        told = True
        time.sleep(2)
    return settings.device != "cpu"
