"""The plan as a picture: memory of one GPU by part, and time and cost against the number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raytune70b.config import UserError
from raytune70b.planning.hardware import GIB
from raytune70b.planning.plan import Plan


def draw(plan: Plan, others: Sequence[Plan], path: Path) -> None:
    """Writes the picture; the type follows the name's ending. others: the same run on other numbers of GPUs. Raises UserError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_memory(left, [*others])
    _draw_time(right, plan, [*others])
    figure.suptitle(
        f"{plan.config.run.name}: {plan.workload.model.parameters / 1e9:.1f} B parameters, {plan.workload.method}, {plan.machine.gpu.name}"
    )
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"--picture {path}: cannot be written ({error})") from error


def _draw_memory(axes: Any, plans: list[Plan]) -> None:
    """Stacked bars by part, one for each number of GPUs, under the line of what a GPU has."""
    names, base = [str(p.machine.gpus) for p in plans], [0.0] * len(plans)
    for part in plans[0].memory.parts:
        sizes = [p.memory.parts[part] / GIB for p in plans]
        axes.bar(names, sizes, bottom=base, label=part)
        base = [a + b for a, b in zip(base, sizes, strict=True)]
    capacity = plans[0].memory.capacity / GIB
    axes.axhline(capacity, color="black", linestyle="--", label=f"usable {capacity:.0f} GiB")
    axes.set(xlabel="GPUs", ylabel="GiB of one GPU", title="Memory by part, at the worst moment", ylim=(0, 2 * capacity))
    axes.legend(fontsize=8)


def _draw_time(axes: Any, plan: Plan, plans: list[Plan]) -> None:
    """Hours, and USD where a price is known, for the whole run; hollow where it does not fit."""
    timed = [p for p in plans if p.schedule.hours is not None]
    if not timed:
        axes.text(0.5, 0.5, "no corpus or steps to time", ha="center", transform=axes.transAxes)
        return
    gpus, hours = [p.machine.gpus for p in timed], [p.schedule.hours or 0.0 for p in timed]
    axes.plot(gpus, hours, color="tab:blue", label="hours")
    for n, p in enumerate(timed):
        fits = p.verdict != "does not fit"
        axes.plot(gpus[n], hours[n], "o", color="tab:blue", fillstyle="full" if fits else "none")
    axes.set(
        xlabel="GPUs",
        ylabel="hours of the whole run",
        title="Time and cost (hollow: does not fit)",
        xscale="log",
        ylim=(0, 1.1 * max(hours)),
    )
    axes.set_xticks(gpus, [str(g) for g in gpus])
    axes.minorticks_off()
    if plan.config.budget.hours is not None:
        axes.axhline(plan.config.budget.hours, color="tab:blue", linestyle=":", label="budget, hours")
    price = plan.config.budget.price_per_gpu_hour
    if price is not None:
        usd = axes.twinx()
        usd.plot(gpus, [h * g * price for h, g in zip(hours, gpus, strict=True)], "s-", color="tab:red", label="USD")
        usd.set_ylabel(f"USD at {price:.2f} a GPU-hour", color="tab:red")
        usd.set_ylim(bottom=0)
    axes.legend(fontsize=8, loc="upper center")
