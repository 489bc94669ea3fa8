"""Joins the Ray cluster that is there, or starts one on this machine."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raytune70b import cpus, room
from raytune70b.errors import UserError
from raytune70b.schema import Config
from raytune70b.signals import end_on_sigterm

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
"""What workers print reaches the user through the run's own records."""

STARTED_AT_ONCE = 8
GPUS_S = 600.0
"""How long a cluster's first GPU is waited for: a node that starts, pulls its image."""
ANSWER_S = 8.0
"""How long a cluster may take to answer; Ray itself tries for minutes."""
STOP_WAIT_S = 1800
"""How long `ray job stop` waits for a job to save its checkpoint; Ray's own 3 seconds are too short for any."""


def before_import() -> None:
    """What Ray reads from the environment when it is imported."""
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # a late question after `ray.shutdown` would join the cluster again, and say so
    use_token()


def use_token() -> None:
    """Makes this process show Ray's token where there is one and RAY_AUTH_MODE does not say otherwise.

    `ray start` protects a cluster as soon as the machine has a token (the first local cluster makes one), but clients show it
    only when they are told to, and fail with "token is missing". A cluster without protection ignores it.
    """
    has = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ or (Path.home() / ".ray" / "auth_token").is_file()
    if has:
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def check(config: Config) -> None:
    """Raises UserError within seconds where `cluster.address` names a cluster that does not answer; does nothing where a job starts its own."""
    if starts_its_own(config):
        return
    named = os.environ["RAY_ADDRESS"] if config.cluster.address == "auto" else config.cluster.address
    host, _, port = named.rpartition(":")
    try:
        if port.isdecimal() and "/" not in host:  # before Ray is imported
            socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
        address = _resolved(named)
    except OSError as error:
        raise _unreachable(named, error.strerror or str(error)) from error
    if address is None or os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):  # with TLS, Ray's own certificates are needed to ask
        return
    import grpc

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=ANSWER_S)
        except grpc.FutureTimeoutError as error:
            raise _unreachable(named if named == address else f"{address} ({named})", f"no answer within {ANSWER_S:.0f} s") from error


def _resolved(named: str) -> str | None:
    """HOST:PORT of the cluster, None for a new one. Raises UserError, and ConnectionError where `auto` finds none."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return canonicalize_bootstrap_address(named)
    except ValueError as error:
        raise UserError(f"cluster.address: {named} is no HOST:PORT of a cluster's head; a dashboard's address is for `ray job submit --address`, a job joins at port 6379") from error
    except ConnectionError as error:
        raise ConnectionError("none runs on this machine") from error


def _unreachable(where: str | None, why: str) -> UserError:
    return UserError(f"cluster.address: no Ray cluster answers at {where} ({why}); start one, or use cluster.address=local")


def start(config: Config) -> None:
    """Connects this process to Ray; does nothing where it is connected.

    A cluster started here has a CPU for every worker, whatever the machine has: more workers than cores are slow, fewer CPUs than
    workers wait for ever. Raises UserError when `cluster.address` cannot be reached.
    """
    import ray

    if ray.is_initialized():
        return
    # The token that Ray makes for a new cluster is told of once a process; it is in Ray's documentation, not the user's business.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    if starts_its_own(config):
        _start_here(config)
    else:
        check(config)
        address = config.cluster.address
        try:
            ray.init(address=None if address == "auto" else address, **QUIET)
        except (ConnectionError, ray.exceptions.RaySystemError) as error:
            raise _unreachable(os.environ.get("RAY_ADDRESS") if address == "auto" else address, str(error).splitlines()[0]) from error
    end_on_sigterm()  # in place of Ray's handler
    let_stop_wait()


def _start_here(config: Config) -> None:
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # what a team trains is nobody else's business unless it says so
    # Ray warns of four times as many processes as it starts at once (a process a core), which on a small machine a sweep has always.
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(max(STARTED_AT_ONCE, os.cpu_count() or 1)))
    needed = math.ceil(config.cluster.workers[1] * config.cluster.cpus_per_worker)
    ray.init(address="local", num_cpus=max(os.cpu_count() or 1, needed), include_dashboard=config.cluster.dashboard, **QUIET)


def let_stop_wait() -> None:
    """Makes `ray job stop` wait `STOP_WAIT_S` for this submitted job, unless the cluster was started with RAY_JOB_STOP_WAIT_TIME_S.

    Ray's supervisor of the job reads that variable from its own environment when it stops the job.
    """
    seconds = str(STOP_WAIT_S)
    _ask_supervisor(lambda _: os.environ.setdefault("RAY_JOB_STOP_WAIT_TIME_S", seconds))


def held_by_entrypoint() -> dict[str, dict[str, float]]:
    """What Ray reserves for this submitted job's own process (`--entrypoint-num-cpus`), by node id; empty where it was not submitted."""

    def held(_: Any) -> dict[str, dict[str, float]]:
        context = ray.get_runtime_context()
        return {context.get_node_id(): context.get_assigned_resources()}

    import ray

    return _ask_supervisor(held) or {}


def _ask_supervisor(question: Callable[[Any], Any]) -> Any:
    """Runs a function in the process of Ray that started and stops this job; it must be a closure, since that process need not find our modules. None where there is none."""
    import ray
    from ray.dashboard.modules.job.common import JOB_ACTOR_NAME_TEMPLATE, JOB_ID_METADATA_KEY, SUPERVISOR_ACTOR_RAY_NAMESPACE

    job = json.loads(os.environ.get(cpus.SUBMITTED) or "{}").get("metadata", {}).get(JOB_ID_METADATA_KEY)
    if job is None:
        return None
    try:
        supervisor = ray.get_actor(JOB_ACTOR_NAME_TEMPLATE.format(job_id=job), namespace=SUPERVISOR_ACTOR_RAY_NAMESPACE)
    except ValueError:  # a process that has outlived its job
        return None
    return ray.get(supervisor.__ray_call__.remote(question), timeout=60)


def check_room(config: Config, worker: dict[str, float], least: int) -> None:
    """Raises UserError where `least` workers cannot ever run on this cluster; needs a connection.

    They may where machines may come: the group is elastic, `hardware` names more machines than there are, one was lost, or an autoscaler can add them.
    """
    import ray
    from ray._private.state import state

    known = ray.nodes()
    alive, taken = {node["NodeID"]: node["Resources"] for node in known if node["Alive"]}, held_by_entrypoint()
    nodes, held = list(room.left(alive, taken).values()), next(iter(taken.values()), {})
    lacking = room.shortage(nodes, held, worker, least)
    if lacking is None:
        return
    named = config.hardware.nodes if config.hardware.gpu != "cpu" else 0
    expected = config.cluster.workers[0] < config.cluster.workers[1] or len(known) > len(alive) or named > sum(node.get("GPU", 0.0) > 0 for node in nodes)
    grown = room.fits([state.get_max_resources_from_cluster_config() or {}], worker) >= least
    if starts_its_own(config) or not (expected or grown):
        raise UserError(f"cluster.workers: there is no room for {least}: {lacking}; {'submit without --entrypoint-num-cpus, ' if held.get('CPU') else ''}"
                        f"{room.way_out(nodes, worker, least, config.model.replicate)}")  # fmt: skip


def of_worker(config: Config, gpu: bool) -> dict[str, float]:
    """What Ray reserves for a worker."""
    return {"CPU": config.cluster.cpus_per_worker, **({"GPU": 1.0} if gpu else {})}


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
