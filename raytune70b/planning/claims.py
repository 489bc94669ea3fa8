"""A report's figures beside the plan's, and why some cannot be. Every number here is computed from the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from raytune70b.planning.plan import Plan
from raytune70b.planning.workload import Workload

INSTANCE_GPUS = 8
MEMORY_POINTS = 10
"""Per cent of the memory within which plan and claim agree."""


@dataclass(frozen=True)
class Claim:
    """One figure: what the report says, what the plan says, and `possible`: yes, unlikely or no, with the reason."""

    figure: str
    claimed: str
    planned: str
    possible: str
    why: str


def least_flops_per_token(workload: Workload) -> float:
    """2 operations a parameter forward, and as many again for gradients by activations and, in full training, by weights; attention
    and recomputing come on top. The usual 6 x parameters."""
    return (6.0 if workload.method == "full" else 4.0) * workload.model.parameters


def share_of_peak(plan: Plan, tokens_per_s_per_gpu: float) -> float:
    """Share of the GPU's dense bf16 peak that a speed needs at the very least."""
    return tokens_per_s_per_gpu * least_flops_per_token(plan.workload) / plan.machine.gpu.peak_flops


def needed_for_one_pass(plan: Plan, hours: float) -> float | None:
    """Tokens/s per GPU that see the whole corpus once in `hours`; None without a corpus."""
    tokens = plan.schedule.corpus_tokens
    return None if tokens is None else tokens / (hours * 3600 * plan.machine.gpus)


def share_seen(plan: Plan, tokens_per_s_per_gpu: float, hours: float) -> float | None:
    """Share of the corpus that a speed sees in `hours`."""
    needed = needed_for_one_pass(plan, hours)
    return None if needed is None else tokens_per_s_per_gpu / needed


def check_claims(plan: Plan) -> list[Claim]:
    """Every stated figure beside the plan's."""
    return [*_speed(plan), *_utilisation(plan), *_coverage(plan), *_memory(plan), *_money(plan)]


def _speed(plan: Plan) -> Iterator[Claim]:
    claimed, band = plan.config.claims.tokens_per_s_per_gpu, plan.throughput
    if claimed is None:
        return
    share, peak = share_of_peak(plan, claimed), plan.machine.gpu.peak_flops
    flops = claimed * least_flops_per_token(plan.workload) / 1e12
    sustained = plan.machine.gpu.sustained_flops / peak
    if share > 1:
        possible, why = "no", "no GPU computes faster than its peak"
    elif share > sustained:
        possible, why = "no", f"bare matrix products sustain {sustained:.0%}, without attention, recomputing or communication"
    elif claimed > band.high:
        possible, why = "unlikely", "above the band of published runs of this kind"
    elif claimed < band.low:
        possible, why = "yes", f"but below the band: {band.likely / claimed:.1f} times as much is likely, so something else bound that run"
    else:
        possible, why = "yes", "inside the band"
    planned = f"{band.likely:,.0f} ({band.low:,.0f} to {band.high:,.0f})"
    yield Claim(
        "tokens/s/GPU", f"{claimed:,.0f}", planned, possible, f"needs at least {flops:,.0f} TFLOP/s, {share:.0%} of the bf16 peak; {why}"
    )


def _utilisation(plan: Plan) -> Iterator[Claim]:
    claims, mfu = plan.config.claims, plan.throughput.mfu
    if claims.mfu_pct is not None:
        why = "what the plan expects" if abs(claims.mfu_pct / 100 / mfu - 1) < 0.25 else "not what published FSDP runs reach"
        possible = "yes" if claims.mfu_pct / 100 <= mfu * 1.25 else "unlikely"
        if claims.tokens_per_s_per_gpu is not None:
            own = share_of_peak(plan, claims.tokens_per_s_per_gpu)
            if abs(own / (claims.mfu_pct / 100) - 1) > 0.2:
                possible, why = "no", f"its own tokens/s are {own:.0%} of the peak: the two figures contradict each other"
        yield Claim("MFU", f"{claims.mfu_pct:g} %", f"{mfu:.0%}", possible, why)
    if claims.gpu_use_pct:
        yield Claim(
            "GPU use",
            _range(claims.gpu_use_pct),
            "near 100 %",
            "yes",
            f"it is the time in which any kernel ran; the same GPU then has {mfu:.0%} MFU",
        )


def _coverage(plan: Plan) -> Iterator[Claim]:
    claims, schedule = plan.config.claims, plan.schedule
    hours = claims.hours or plan.config.budget.hours
    if hours is None or schedule.corpus_tokens is None:
        return
    needed = needed_for_one_pass(plan, hours) or 0.0
    times = share_of_peak(plan, needed)
    seen_claimed = share_seen(plan, claims.tokens_per_s_per_gpu, hours) if claims.tokens_per_s_per_gpu else None
    seen = share_seen(plan, plan.throughput.likely, hours) or 0.0
    reach = f"{times:.1f} times the GPU's peak" if times > 1 else f"{times:.0%} of the GPU's peak"
    why = f"one pass over {schedule.corpus_tokens / 1e9:,.0f} B tokens in {hours:g} h needs {needed:,.0f} tokens/s/GPU, {reach}"
    claimed = "the corpus" if seen_claimed is None else f"{seen_claimed:.1%} of it at the claimed speed"
    yield Claim("corpus seen", claimed, f"{seen:.1%}", "yes" if seen >= 1 else "no", why)


def _memory(plan: Plan) -> Iterator[Claim]:
    use = plan.config.claims.memory_use_pct
    if use:
        planned, resting = (100 * size / plan.memory.capacity for size in (plan.memory.total, sum(list(plan.memory.parts.values())[:3])))
        agrees = use[0] - MEMORY_POINTS <= planned <= use[-1] + MEMORY_POINTS
        possible = "yes" if agrees or planned < use[0] else "no"
        why = f"weights, gradients and optimizer states alone are {resting:.0f} %" + ("; the plan agrees" if agrees else "")
        yield Claim("GPU memory use", _range(use), f"{planned:.0f} %", possible, why)


def _money(plan: Plan) -> Iterator[Claim]:
    claims, gpus = plan.config.claims, plan.machine.gpus
    if claims.hours is None:
        return
    gpu_hours = gpus * claims.hours
    price = claims.price_per_gpu_hour or plan.config.budget.price_per_gpu_hour
    for name, claimed in (("compute cost", claims.compute_usd), ("cost", None if claims.compute_usd else claims.usd)):
        if claimed is not None and price is not None:
            planned = gpu_hours * price
            ratio = claimed / planned
            agrees = abs(ratio - 1) < 0.1
            why = f"{gpus} GPUs x {claims.hours:g} h x {price:.2f} USD is all of it" + (
                "" if agrees else f"; the claim is {ratio:.1f} times that"
            )
            if round(ratio, 1) == plan.machine.nodes > 1:
                why += ": it counts the machines twice"
            yield Claim(name, f"{claimed:,.0f} USD", f"{planned:,.0f} USD", "yes" if agrees else "no", why)
    rate = claims.comparison_usd_per_instance_hour
    if rate is not None:
        planned = rate * claims.hours * gpus / INSTANCE_GPUS
        whole = claims.comparison_usd
        why = f"{gpus / INSTANCE_GPUS:g} instances x {claims.hours:g} h x {rate:g} USD"
        if whole is not None and abs(whole / planned - 1) >= 0.1:
            why += f"; {abs(whole - planned):,.0f} USD of the difference are not GPU hours"
        agrees = whole is None or abs(whole / planned - 1) < 0.1
        yield Claim(
            "hyperscaler cost", "-" if whole is None else f"{whole:,.0f} USD", f"{planned:,.0f} USD", "yes" if agrees else "unlikely", why
        )


def _range(values: list[float]) -> str:
    return f"{values[0]:g} %" if values[0] == values[-1] else f"{values[0]:g} to {values[-1]:g} %"
