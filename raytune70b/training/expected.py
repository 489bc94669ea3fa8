"""What the plan expects of a run: kept in its journal beside what happens, and used to fit a schedule to a budget."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from raytune70b.blocks.manifest import Manifest
from raytune70b.config import UserError
from raytune70b.planning import hardware, memory, throughput, workload
from raytune70b.planning.cost import ValidationPlan, plan_validation
from raytune70b.schema import Config
from raytune70b.storage import Folder
from raytune70b.training.budget import affordable_steps
from raytune70b.training.checkpoint import newest

SETUP_S = 120.0
"""Seconds that a fitted schedule leaves for the start, and again for the end."""


def expectation(config: Config, manifest: Manifest, total_steps: int) -> dict[str, Any]:
    """Figures of the plan for the most workers: tokens_per_s, step_seconds, validation_s (each), mfu, flops_per_token, peak_flops (a worker), memory_bytes
    (a worker), hours, usd.

    `hardware.gpu` names the machine; with `cpu` they are an order of magnitude, and nothing is expected of GPUs that it does not name.
    """
    if config.hardware.gpu == "cpu" and (config.cluster.device == "gpu" or (config.cluster.device == "auto" and torch.cuda.is_available())):
        return {}
    workers = config.cluster.workers[1]
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=manifest.seq_len))
    load = workload.from_config(config, workers, workload.config_shape(config, manifest.vocab_size))
    machine = hardware.machine(config.hardware)
    predicted = throughput.predict(load, machine)
    validation = expected_validation(config, manifest, load, predicted.likely)
    hours = (total_steps * predicted.step_seconds + validation.total(total_steps)) / 3600
    price = config.budget.price_per_gpu_hour
    return {
        "tokens_per_s": predicted.likely * workers, "step_seconds": predicted.step_seconds, "validation_s": validation.seconds, "mfu": predicted.mfu, "flops_per_token": predicted.flops_per_token,
        "peak_flops": machine.gpu.peak_flops, "memory_bytes": memory.plan_memory(load, machine.gpu.memory).total, "hours": hours,
        **({"usd": hours * workers * price} if price is not None else {}),
    }  # fmt: skip


def expected_validation(config: Config, manifest: Manifest, load: workload.Workload, tokens_per_s_per_gpu: float) -> ValidationPlan:
    """What the validations of a run on this data set take by the plan."""
    every, there = config.validation.every, manifest.rows("validation")
    return plan_validation(min(there, config.validation.max_blocks or there), every, config.validation.at_start, load, tokens_per_s_per_gpu)


def fitted(config: Config, run: Folder, manifest: Manifest, total_steps: int) -> Config:
    """With `budget.fit_schedule`, a configuration whose `train.steps` the budget pays for; a run that has a checkpoint keeps the steps it started with."""
    if not config.budget.fit_schedule:
        return config
    begun = newest(run / "checkpoints")
    if begun is not None:
        steps = begun.fingerprint["train.steps"]
    else:
        plan = expectation(config, manifest, total_steps)
        if not plan:
            raise UserError("budget.fit_schedule: is true, but hardware.gpu is cpu and the run is on GPUs; name the GPU in hardware.gpu")
        scored = plan["validation_s"] / config.validation.every if config.validation.every else 0.0
        affordable = affordable_steps(config.budget, config.cluster.workers[1], plan["step_seconds"] + scored, SETUP_S, SETUP_S + 2 * plan["validation_s"])
        steps = min(total_steps, affordable or total_steps)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))
