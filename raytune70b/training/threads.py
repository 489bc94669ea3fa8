"""How many CPU threads a training worker computes with."""

from __future__ import annotations

from raytune70b import cpus
from raytune70b.schema import Config


def worker_threads(config: Config, device_type: str, workers_here: int) -> int:
    """`cluster.cpus_per_worker`; or, where a GPU's offloaded states make the CPU step, this worker's share of the machine's CPUs.

    workers_here: workers of the run on this machine. One thread updates some 40 million weights a second, and a shard has billions.
    """
    model, reserved = config.model, max(1, int(config.cluster.cpus_per_worker))
    on_cpu = model.offload == "params" or (model.sharding == "zero3" and model.offload != "none")
    return max(reserved, cpus.usable() // max(1, workers_here)) if device_type == "cuda" and on_cpu else reserved
