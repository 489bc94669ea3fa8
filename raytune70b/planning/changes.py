"""What would make a run fit, or meet its budget: settings tried one by one and in useful pairs, ranked, each with its effect."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from raytune70b.config import UserError, get
from raytune70b.contradictions import problems
from raytune70b.planning.hardware import GIB
from raytune70b.planning.plan import Plan, build_plan
from raytune70b.schema import Config

SETTINGS: tuple[dict[str, Any], ...] = (
    {"model.loss_chunk_tokens": 1024},
    {"model.activation_checkpointing": "full"},
    {"model.activation_checkpointing": "selective"},
    {"model.activation_checkpointing": "none"},
    {"train.micro_batch_size": "auto"},
    {"train.optimizer": "adamw_bf16"},
    {"train.optimizer": "adamw_8bit"},
    {"model.gradients": "bf16"},
    {"model.precision": "bf16"},
    {"model.precision": "bf16", "train.optimizer": "adamw_bf16"},
    {"model.sharding": "fsdp"},
    {"model.sharding": "fsdp", "train.optimizer": "adamw_bf16"},
    {"model.sharding": "fsdp", "train.optimizer": "adamw_8bit"},
    {"model.sharding": "fsdp", "model.precision": "bf16"},
    {"model.sharding": "fsdp", "model.precision": "bf16", "train.optimizer": "adamw_bf16"},
    {"model.compile": True},
    {"model.offload": "optimizer"},
    {"model.offload": "params"},
    {"model.method": "lora"},
    {"model.method": "qlora"},
)
MORE_MACHINES = (2, 3, 4, 8)


@dataclass(frozen=True)
class Change:
    """`settings` as key=value; the plan that they give; what they do in words."""

    settings: dict[str, Any]
    plan: Plan
    effect: str

    @property
    def command(self) -> str:
        return " ".join(f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in self.settings.items())


def with_settings(config: Config, settings: dict[str, Any]) -> Config:
    """A copy with some values at dotted keys set otherwise."""
    for key, value in settings.items():
        section, name = key.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def useful_changes(plan: Plan, most: int = 8) -> list[Change]:
    """Changes that make a run fit that does not, or finish within a budget that it overruns, best first; none where all is well.

    Ranked by whether the run then fits, whether it then ends within its budget, and the GPU hours it then needs. Changes that alter
    what the run learns say so: adapters, fewer steps, other optimizer states.
    """
    fits, in_time = plan.verdict != "does not fit", plan.schedule.within_budget is not False
    if fits and in_time:
        return []
    found = [change for settings in _candidates(plan) if (change := _try(plan, settings))]
    if fits:
        found = [
            c for c in found if c.plan.verdict != "does not fit" and (_hours(c.plan) < 0.97 * _hours(plan) or c.plan.schedule.within_budget)
        ]
    else:
        found = [c for c in found if c.plan.memory.total < 0.99 * plan.memory.total]
    found.sort(
        key=lambda c: (
            c.plan.verdict == "does not fit",
            c.plan.schedule.within_budget is False,
            _hours(c.plan) * c.plan.machine.gpus,
            c.plan.memory.total,
        )
    )
    return found[:most]


def _candidates(plan: Plan) -> list[dict[str, Any]]:
    config = plan.config
    tried: list[dict[str, Any]] = []
    for settings in SETTINGS:
        new = {key: value for key, value in settings.items() if get(config, key) != value}
        tried += [new] if new and new not in tried else []
    tried += [{"hardware.nodes": config.hardware.nodes * factor} for factor in MORE_MACHINES]
    schedule = plan.schedule
    if schedule.within_budget is False and schedule.budget_steps:
        tried.append({"train.steps": schedule.budget_steps})
        needed = machines_in_time(plan)
        if needed:
            tried.append({"hardware.nodes": needed})
    return tried


def machines_in_time(plan: Plan, most: int = 4096) -> int | None:
    """The fewest machines that finish the run within `budget.hours`, whatever that costs; None without such a limit or answer."""
    limit, hours = plan.config.budget.hours, plan.schedule.hours
    if limit is None or hours is None or hours <= limit:
        return None
    per_machine = plan.machine.gpus_per_node
    needed = plan.config.hardware.nodes * math.ceil(hours / limit)
    if needed * per_machine > min(most, plan.config.train.global_batch_size):
        return None
    return needed


def _try(plan: Plan, settings: dict[str, Any]) -> Change | None:
    config = with_settings(plan.config, settings)
    try:
        if any(problems(config)):
            return None
        other = build_plan(config, plan.workload.model)
    except UserError:
        return None
    return Change(settings, other, _effect(plan, other, settings))


def _hours(plan: Plan) -> float:
    return plan.schedule.hours if plan.schedule.hours is not None else 1 / plan.throughput.likely


def _effect(before: Plan, after: Plan, settings: dict[str, Any]) -> str:
    parts = [f"{before.memory.total / GIB:.0f} -> {after.memory.total / GIB:.0f} GiB a GPU ({after.verdict})"]
    parts.append(f"{before.throughput.likely:,.0f} -> {after.throughput.likely:,.0f} tokens/s/GPU")
    if before.schedule.hours is not None and after.schedule.hours is not None:
        parts.append(f"{before.schedule.hours:,.0f} -> {after.schedule.hours:,.0f} h")
        price = before.config.budget.price_per_gpu_hour
        if price is not None:
            usd = [plan.schedule.hours * plan.machine.gpus * price for plan in (before, after) if plan.schedule.hours]
            parts.append(f"{usd[0]:,.0f} -> {usd[-1]:,.0f} USD")
    if "train.steps" in settings and after.schedule.corpus_tokens:
        seen = settings["train.steps"] * after.schedule.tokens_per_step / after.schedule.corpus_tokens
        parts.append(f"sees {seen:.1%} of the corpus")
    if settings.get("model.method") in ("lora", "qlora"):
        parts.append("trains adapters, not all weights")
    if settings.get("train.optimizer") in ("adamw_bf16", "adamw_8bit"):
        parts.append("optimizer states lose precision")
    return "; ".join(parts)
