"""The whole plan of a configuration: memory, speed, what the budget buys, cost, checkpoints - one value that tables, JSON, the
picture and the trainer read.

Pure apart from the data set's manifest, which is read where it exists. A plan takes milliseconds.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from raytune70b.config import UserError
from raytune70b.planning import cost as money
from raytune70b.planning import memory as mem
from raytune70b.planning.hardware import Machine, machine
from raytune70b.planning.host import host_bytes
from raytune70b.planning.parameters import ModelShape
from raytune70b.planning.throughput import Throughput, predict
from raytune70b.planning.workload import Workload, config_shape, from_config, with_micro_batch
from raytune70b.schema import Config
from raytune70b.storage import Folder

BYTES_PER_TOKEN = 4.0
"""Bytes of raw text in a token, for a corpus that is not tokenised yet: English legal text with a 32,000 to 128,000 vocabulary."""


class PlanError(UserError):
    """A run that cannot be planned as it is."""


@dataclass(frozen=True)
class Schedule:
    """Steps, tokens and hours of the run, and what the budget buys of them. None where no corpus or budget is stated."""

    corpus_tokens: float | None
    corpus_from: str
    tokens_per_step: int
    steps: int | None
    hours: float | None
    budget_hours: float | None
    budget_steps: int | None
    budget_tokens: float | None
    budget_epochs: float | None
    end: str | None

    @property
    def within_budget(self) -> bool | None:
        if self.hours is None or self.budget_hours is None:
            return None
        return self.hours <= self.budget_hours


@dataclass(frozen=True)
class Plan:
    config: Config
    machine: Machine
    workload: Workload
    memory: mem.MemoryPlan
    throughput: Throughput
    schedule: Schedule
    checkpoint: money.CheckpointPlan
    validation: money.ValidationPlan
    losses: money.Losses
    costs: list[money.Cost]
    host_memory: float
    disk: float

    @property
    def verdict(self) -> str:
        """fits, tight or does not fit: GPU, host memory and disk."""
        short = [name for name, need, have in self.stores() if need > have]
        return "does not fit" if short else self.memory.verdict

    def stores(self) -> list[tuple[str, float, float]]:
        """(name, bytes needed, bytes there): memory of one GPU, of one machine, and disk."""
        return [
            ("GPU memory", self.memory.total, self.memory.capacity),
            ("host memory", self.host_memory, self.machine.host_memory),
            ("disk", self.disk, self.machine.disk),
        ]


def build_plan(config: Config, shape: ModelShape | None = None) -> Plan:
    """The plan of a configuration on its `hardware`. Raises UserError."""
    place = machine(config.hardware)
    shape = shape or config_shape(config)
    accounted = shape.linear_parameters + shape.root_parameters
    if accounted < 0.9 * shape.parameters:
        raise PlanError(
            f"model: {1 - accounted / shape.parameters:.0%} of its parameters are in no linear layer (a mixture of experts?); "
            "the plan cannot tell its speed"
        )
    workload = resolve_micro_batch(from_config(config, place.gpus, shape), config, place.gpu.memory)
    memory = mem.plan_memory(workload, place.gpu.memory)
    throughput = predict(workload, place)
    checkpoint = money.plan_checkpoints(
        workload, mem.resting_bytes(workload), place, throughput.step_seconds, config.cluster.mtbf_hours, config.checkpoint.every,
        kept_checkpoints(config), config.checkpoint.asynchronous,
    )  # fmt: skip
    validation = money.plan_validation(validation_blocks(config), config.validation.every, config.validation.at_start, workload, throughput.likely)
    schedule, losses = _schedule(config, place, workload, throughput, checkpoint, validation)
    data = (schedule.corpus_tokens or 0.0) * 1.1  # a block's bytes on disk, compressed
    disk = checkpoint.bytes * (checkpoint.kept + 1 + kept_for_ever(config, schedule)) + data
    return Plan(
        config, place, workload, memory, throughput, schedule, checkpoint, validation, losses,
        _costs(config, place, workload, schedule, losses, disk), host_bytes(workload) * place.gpus_per_node, disk,
    )  # fmt: skip


def kept_checkpoints(config: Config) -> int:
    return config.checkpoint.keep_last + config.checkpoint.keep_best


def kept_for_ever(config: Config, schedule: Schedule) -> int:
    """Checkpoints that `checkpoint.keep_every` has kept by the end of the run."""
    trained = min((n for n in (schedule.steps, schedule.budget_steps) if n is not None), default=0)
    return trained // config.checkpoint.keep_every if config.checkpoint.keep_every else 0


def resolve_micro_batch(workload: Workload, config: Config, gpu_memory: float) -> Workload:
    """With `train.micro_batch_size: auto` the largest micro-batch that the memory plan allows. Raises PlanError when not even 1 fits."""
    if config.train.micro_batch_size != "auto":
        return workload
    batch = config.train.global_batch_size
    limit = max(1, batch // workload.world_size)
    for size in sorted((n for n in range(1, limit + 1) if batch % n == 0), reverse=True):
        candidate = with_micro_batch(workload, size, batch)
        if mem.plan_memory(candidate, gpu_memory).total <= mem.TIGHT * gpu_memory:
            return candidate
    return with_micro_batch(workload, 1, batch)  # reported as tight or not fitting


def corpus(config: Config) -> tuple[float | None, str]:
    """(tokens of one epoch, where the figure comes from)."""
    folder = Folder(config.data.path)
    if folder.exists("manifest.json"):
        data = json.loads(folder.read("manifest.json"))
        blocks = sum(sum(file["row_groups"]) for file in data["splits"]["train"])
        return float(blocks * data["seq_len"]), f"{config.data.path}/manifest.json"
    if config.claims.corpus_tokens is not None:
        return config.claims.corpus_tokens, "claims.corpus_tokens"
    if config.claims.corpus_gb is not None:
        return config.claims.corpus_gb * 1e9 / BYTES_PER_TOKEN, f"claims.corpus_gb at {BYTES_PER_TOKEN:g} bytes a token"
    return None, "no data set at data.path, and no claims.corpus_tokens"


def validation_blocks(config: Config) -> int:
    """Blocks that one validation scores; 0 where neither a data set nor a corpus is there to tell."""
    folder, most = Folder(config.data.path), config.validation.max_blocks
    if folder.exists("manifest.json"):
        data = json.loads(folder.read("manifest.json"))
        found: float | None = sum(sum(file["row_groups"]) for file in data["splits"].get("validation", []))
    else:
        tokens, _ = corpus(config)
        found = None if tokens is None else tokens * config.data.validation_fraction / config.data.seq_len
    return round(min((n for n in (found, most) if n is not None), default=0))


def _schedule(
    config: Config, place: Machine, workload: Workload, throughput: Throughput, checkpoint: money.CheckpointPlan, validation: money.ValidationPlan
) -> tuple[Schedule, money.Losses]:
    tokens, source = corpus(config)
    per_step = config.train.global_batch_size * config.data.seq_len
    steps = config.train.steps or (None if tokens is None else max(1, math.ceil(config.train.epochs * tokens / per_step)))
    budget, bought, bought_tokens = budget_hours(config, place.gpus), None, None
    busy = None if steps is None else (steps * throughput.step_seconds + validation.total(steps)) / 3600
    losses = money.expected_losses(
        checkpoint, place, config.cluster.mtbf_hours, min((h for h in (busy, budget) if h is not None), default=0.0)
    )
    kept = max(losses.kept, 0.01)
    hours = None if busy is None else busy / kept
    if budget is not None:
        bought = validation.steps_in(budget * 3600 * kept, throughput.step_seconds)  # what is reserved is left out already
        bought_tokens = float(bought * per_step)
    trained = min((n for n in (steps, bought) if n is not None), default=None)
    if trained is not None:
        scored = validation.total(trained)
        losses = replace(losses, validation=losses.kept * scored / max(trained * throughput.step_seconds + scored, 1e-9))
    start = start_day(config)
    end = (
        None
        if hours is None or hours > 1e6
        else (datetime.datetime.combine(start, datetime.time()) + datetime.timedelta(hours=hours)).date().isoformat()
    )
    return Schedule(
        tokens, source, per_step, steps, hours, budget, bought, bought_tokens,
        None if bought_tokens is None or not tokens else bought_tokens / tokens, end,
    ), losses  # fmt: skip


def start_day(config: Config) -> datetime.date:
    """The day that the run begins. Raises PlanError."""
    try:
        return datetime.date.fromisoformat(config.budget.start) if config.budget.start else datetime.date.today()
    except ValueError as error:
        raise PlanError(f"budget.start: is {config.budget.start!r}; it takes a day as YYYY-MM-DD") from error


def budget_hours(config: Config, gpus: int) -> float | None:
    """Hours that `budget.hours` and `budget.usd` both allow, without the `budget.reserve_minutes` that a run leaves for its evaluation and export."""
    limits = [config.budget.hours]
    if config.budget.usd is not None and config.budget.price_per_gpu_hour:
        limits.append(config.budget.usd / (config.budget.price_per_gpu_hour * gpus))
    least = min((h for h in limits if h is not None), default=None)
    return None if least is None else max(0.0, least - config.budget.reserve_minutes / 60)


def offers(config: Config) -> list[money.Offer]:
    """The configuration's own price first, then the price list's."""
    own = config.budget
    path = Path(own.price_list) if own.price_list else money.PRICES
    listed = money.read_prices(path) if own.price_per_gpu_hour is not None or own.price_list else []
    if own.price_per_gpu_hour is None:
        return listed
    return [
        money.Offer(
            "this configuration", own.price_per_gpu_hour, own.price_date or "undated", own.price_source or "budget.price_per_gpu_hour"
        ),
        *listed,
    ]


def _costs(config: Config, place: Machine, workload: Workload, schedule: Schedule, losses: money.Losses, disk: float) -> list[money.Cost]:
    """What the run costs by each offer: all of it, or as much as the budget's hours allow where that ends first."""
    hours = planned_hours(schedule)
    if hours is None:
        return []
    model = workload.model.parameters * 2.0
    own = config.budget
    return [
        money.cost(o, place.gpus, hours, disk, model, own.storage_usd_per_gb_month, own.egress_usd_per_gb, losses) for o in offers(config)
    ]


def planned_hours(schedule: Schedule) -> float | None:
    """Hours of the run: until its last step, or until the budget stops it."""
    return min((h for h in (schedule.hours, schedule.budget_hours) if h is not None), default=None)


def record(plan: Plan) -> dict[str, Any]:
    """The plan as plain numbers, for `--json`, the journal and tests. Sizes in bytes, prices in USD."""
    w, t, gpu = plan.workload, plan.throughput, plan.machine.gpu
    return {
        "run": plan.config.run.name,
        "hardware": {"gpu": gpu.name, "nodes": plan.machine.nodes, "gpus": plan.machine.gpus, "source": gpu.source},
        "model": {"parameters": w.model.parameters, "trained": w.trained_parameters, "method": w.method},
        "verdict": plan.verdict,
        "memory": {"parts": plan.memory.parts, "total": plan.memory.total, "capacity": plan.memory.capacity, "moment": plan.memory.moment,
                   "host": plan.host_memory, "disk": plan.disk, "micro_batch_size": w.micro_batch_size, "micro_batches": w.micro_batches},
        "throughput": {"tokens_per_s_per_gpu": [t.low, t.likely, t.high], "mfu": t.mfu, "bound": t.bound, "step_seconds": t.step_seconds,
                       "seconds": t.seconds, "flops_per_token": t.flops_per_token, "peak_flops": plan.machine.gpu.peak_flops},
        "schedule": asdict(plan.schedule),
        "checkpoint": asdict(plan.checkpoint),
        "validation": asdict(plan.validation),
        "losses": {**asdict(plan.losses), "goodput": plan.losses.goodput},
        "costs": [{**asdict(c), "total": c.total} for c in plan.costs],
    }  # fmt: skip


def with_nodes(config: Config, nodes: int) -> Config:
    """The same run on another number of machines."""
    return replace(config, hardware=replace(config.hardware, nodes=nodes))


def by_gpu_count(config: Config, counts: Sequence[int] = (1, 2, 3, 4, 6, 8, 12, 16)) -> list[Plan]:
    """Plans on other numbers of machines, those that the global batch and `model.replicate` allow."""
    shape, found = config_shape(config), []
    for nodes in counts:
        if nodes * config.hardware.gpus_per_node % config.model.replicate == 0:
            found.append(build_plan(with_nodes(config, nodes), shape))
    return found
