"""Runs an evaluation's units on the cluster as a Ray Data job: a pool of actors, one model each, as many as there is work for.

Every unit's result is a file of its own, so a killed evaluation, or one whose node died, repeats at most one unit an actor.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raytune70b import cluster
from raytune70b.config import UserError
from raytune70b.evaluation.work import Settings, Unit, pending, write_result
from raytune70b.schema import Config
from raytune70b.storage import Folder


class Worker:
    """An actor with a model; it takes units and writes their results."""

    def __init__(self, folder: Path, tokenizer: Path, settings: Settings, devices: int, threads: int, out: Folder):
        import torch

        from raytune70b.evaluation.model import Model

        torch.set_num_threads(threads)
        self.model, self.out = Model(folder, tokenizer, settings, devices), out

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for content in batch["unit"]:
            unit: Unit = pickle.loads(content)
            write_result(self.out, unit, self.model.run(unit))
        return {"done": [len(batch["unit"])]}


def run_units(config: Config, folder: Path, tokenizer: Path, units: Sequence[Unit], out: Folder, settings: Settings) -> int:
    """Runs the units that have no result yet and returns how many those were. Raises UserError when the workers fail."""
    left = pending(units, out)
    if not left:
        return 0
    os.environ.setdefault("RAY_DATA_LOG_LEVEL", "WARNING")
    import ray.data

    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)
    cluster.start(config)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars, context.print_on_execution_start = False, False
    gpus = config.evaluation.gpus_per_model if cluster.uses_gpu(config) else 0
    cpus, copies = config.cluster.cpus_per_worker, min(len(left), config.cluster.workers[1])
    cluster.check_room(config, {"CPU": cpus, **({"GPU": float(gpus)} if gpus else {})}, 1)
    dataset = ray.data.from_items([{"unit": pickle.dumps(u)} for u in left], override_num_blocks=len(left))
    done = dataset.map_batches(
        Worker, batch_size=1, num_cpus=cpus, num_gpus=gpus, compute=ray.data.ActorPoolStrategy(min_size=1, max_size=copies), zero_copy_batch=True,
        fn_constructor_args=(folder, tokenizer, settings, gpus, max(1, int(cpus)), out.make()),
    )  # fmt: skip
    try:
        for _ in done.iter_batches(batch_size=None):
            pass
    except ray.exceptions.RayError as error:
        cause = [line for line in str(error).splitlines() if line.strip()][-1]
        raise UserError(f"evaluation of {folder}: {cause}; the same command goes on from the {len(units) - len(pending(units, out))} of {len(units)} finished units") from error
    return len(left)
