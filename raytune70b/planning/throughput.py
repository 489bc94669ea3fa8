"""Tokens per second per GPU, as a band, and what bounds it.

A step is a sum of physical parts: matrix products at the rate that the GPU sustains, attention at FlashAttention-2's share of
the peak, memory traffic of everything between the products, the host that launches kernels, FSDP's gathers and reductions over
the slower of NVLink and network (hidden behind compute but for a share), and the optimizer step. Nine constants, each with
what it means; `jobs/plan.py validate` fits them to published runs and says how well they predict sources they never saw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from raytune70b.planning import offload
from raytune70b.planning.hardware import Machine
from raytune70b.planning.memory import NF4_WEIGHT
from raytune70b.planning.workload import Workload


@dataclass(frozen=True)
class Constants:
    """Fitted by `validation.fit` to every source of tests/data/published_throughput.csv."""

    matrix: float = 1.04
    """Share of the GPU's sustained rate that matrix products reach where model and micro-batch are large."""
    half_hidden: float = 358.0
    """Hidden size at which products reach half of that: small matrices do not fill the GPU."""
    half_tokens: float = 685.0
    """Tokens of a micro-batch at which products reach half of that."""
    traffic: float = 6.76
    """Passes over the kept activations that the kernels between products make in a forward pass; backward makes twice as many."""
    attention: float = 0.568
    """What attention reaches of FlashAttention-2's published share of the peak."""
    host: float = 9.5e-4
    """Seconds in which the host launches one decoder layer's kernels in one direction."""
    link: float = 0.659
    """Share of a link's data-sheet rate that collectives reach."""
    exposed: float = 0.367
    """Share of the shorter of compute and communication that the other does not hide."""
    unpack: float = 16.9
    """Bytes of memory traffic to unpack one 4-bit weight, in each pass."""
    # The band: nine in ten runs of sources that a fit has not seen lie between these multiples of the likely value.
    low: float = 0.78
    high: float = 1.28


FITTED = Constants()

FEED_TOKENS_PER_S = 2e7
"""Tokens that one shared Ray Data stream deals to all workers: measured with two workers on two CPU cores. It runs ahead of training."""


@dataclass(frozen=True)
class Throughput:
    """The band in tokens/s per GPU; `seconds` by part of one optimizer step; `bound`: the part that decides."""

    low: float
    likely: float
    high: float
    seconds: dict[str, float]
    step_seconds: float
    bound: str
    mfu: float
    flops_per_token: float


def model_flops_per_token(workload: Workload) -> float:
    """Operations that one trained token needs, without recomputing: what MFU counts. Frozen weights need no weight gradient."""
    m = workload.model
    products = 2.0 * (m.linear_parameters + m.head_parameters)
    backward = 2.0 if workload.method == "full" else 1.0
    return (
        products * (1 + backward)
        + 3.5 * attention_flops_per_token(workload)
        + (0.0 if workload.method == "full" else 6.0 * workload.trained_parameters)
    )


def attention_flops_per_token(workload: Workload) -> float:
    """Scores and values of one forward pass, causal: half of the square."""
    m = workload.model
    return 4.0 * m.layers * m.heads * m.head_dim * workload.seq_len / 2


def predict(workload: Workload, machine: Machine, constants: Constants = FITTED) -> Throughput:
    """Throughput of a workload on a machine."""
    seconds = micro_batch_seconds(workload, machine, constants)
    compute = seconds["matrix units"] + seconds["attention"] + seconds["memory"]
    busy = max(compute, seconds["host"])
    transfer = communication_seconds(workload, machine, constants)
    waiting = offload.waiting_seconds(workload) if offload.offloads(workload, machine) else 0.0
    hidden = min(busy, max(transfer.values()))
    micro = max(busy, max(transfer.values())) + constants.exposed * hidden + waiting
    optimizer = optimizer_seconds(workload, machine, constants)
    data = workload.tokens_per_step / FEED_TOKENS_PER_S if workload.sharding == "fsdp2" else 0.0
    step = max(workload.micro_batches * micro + optimizer, data)
    likely = workload.tokens_per_step / step / workload.world_size
    parts = {name: workload.micro_batches * value for name, value in {**seconds, **transfer, "gradients to host memory": waiting}.items()}
    parts |= {"optimizer": optimizer, "data": data}
    flops = model_flops_per_token(workload)
    bound = max(parts, key=lambda name: parts[name])
    return Throughput(
        constants.low * likely, likely, constants.high * likely, parts, step, bound, likely * flops / machine.gpu.peak_flops, flops
    )


def micro_batch_seconds(workload: Workload, machine: Machine, c: Constants) -> dict[str, float]:
    """Seconds of one micro-batch on one GPU by part, before communication."""
    m, tokens, gpu = workload.model, workload.tokens, machine.gpu
    again, backward = workload.recomputed, 2.0 if workload.method == "full" else 1.0
    adapters = 0 if workload.method == "full" else workload.trained_parameters
    products = 2.0 * m.linear_parameters * (1 + again + backward) + 2.0 * m.head_parameters * (1 + backward) + 2.0 * adapters * (3 + again)
    rate = gpu.sustained_flops * c.matrix * m.hidden / (m.hidden + c.half_hidden) * tokens / (tokens + c.half_tokens)
    attention = (
        attention_flops_per_token(workload) * (1 + again + 2.5) * tokens / (gpu.peak_flops * gpu.flash_attention_share * c.attention)
    )
    kept = activation_traffic(workload)
    logits = m.vocab * (workload.logit_bytes or 8.0)
    traffic = tokens * (c.traffic * m.layers * kept * (3 + again) + 3 * logits)
    if workload.method == "qlora":
        traffic += m.linear_parameters * c.unpack * (2 + again)
    passes = m.layers * (3 + again) * (1.5 if workload.method != "full" else 1.0)
    return {
        "matrix units": tokens * products / rate,
        "attention": attention,
        "memory": traffic / gpu.memory_bandwidth,
        "host": passes * c.host,
    }


def activation_traffic(workload: Workload) -> float:
    """Bytes per token that the kernels between a layer's products write once: norms, rotary, activation, product and residuals."""
    m, size = workload.model, workload.compute_bytes
    norms = m.hidden * size * (4 if workload.fused_norm else 10)
    inner = m.intermediate * size * ((1 if workload.fused_mlp else 2) if m.gated else 1)
    return norms + inner + (m.heads + m.kv_heads) * m.head_dim * size * (1 if workload.fused_mlp else 2)


def communication_seconds(workload: Workload, machine: Machine, c: Constants) -> dict[str, float]:
    """Seconds of one micro-batch by link: gathers of the weights and a reduction of the trained gradients, and what is offloaded."""
    found = collective_seconds(workload, machine, c)
    if offload.offloads(workload, machine):
        found["PCIe"] = found.get("PCIe", 0.0) + offload.pcie_bytes(workload, weight_gathers(workload)) / (machine.gpu.pcie * c.link)
    return found


def collective_seconds(workload: Workload, machine: Machine, c: Constants) -> dict[str, float]:
    """Seconds of one micro-batch's collectives by link."""
    if workload.shards == 1 and workload.world_size == 1:
        return {"NVLink": 0.0, "network": 0.0}
    m, size = workload.model, workload.compute_bytes
    base = m.parameters * float(size)
    if workload.method == "qlora":
        base = m.linear_parameters * NF4_WEIGHT + (m.parameters - m.linear_parameters) * float(size)
    trained = workload.trained_parameters
    volume = weight_gathers(workload) * base + trained * (4.0 if workload.precision != "bf16" else 2.0)
    inside = min(workload.shards, machine.gpus_per_node)
    nodes = math.ceil(workload.shards / machine.gpus_per_node)
    near = volume * (inside - 1) / inside / (machine.node_link * c.link) if inside > 1 else 0.0
    far = volume * (nodes - 1) / nodes / (machine.network * inside * c.link) if nodes > 1 else 0.0
    if workload.replicate > 1:  # once a step, the replicas add up their shards
        far += 2.0 * trained * 4.0 / workload.shards / (machine.network * c.link) / workload.micro_batches if machine.nodes > 1 else 0.0
    return {"NVLink" if machine.gpu.nvlink_gpus >= machine.gpus_per_node else "PCIe": near, "network": far}


def weight_gathers(workload: Workload) -> int:
    """How often a worker gathers every weight in a micro-batch: for the forward and the backward pass.

    DeepSpeed keeps a layer between its recomputation and its backward pass, but not where its weights are frozen: counted on its collectives.
    """
    again = workload.sharding == "zero3" and workload.activation_checkpointing != "none" and workload.method != "full"
    return 3 if again else 2


def optimizer_seconds(workload: Workload, machine: Machine, c: Constants) -> float:
    """One optimizer step: weights and states are read and written, gradients read.

    FSDP2's offloaded states come over PCIe and go back. Where the CPU steps it takes its time, and ZeRO-3 sends the new weights to the GPU.
    """
    elements = workload.trained_shard
    states = {"adamw": 8.0, "torch": 2.0 * workload.weight_bytes, "adamw_bf16": 4.0, "adamw_8bit": 2.0}[workload.optimizer]
    passes = 1 if workload.optimizer == "adamw" and workload.weight_bytes == 4 else 3  # unfused kernels write what lies between
    moved = elements * (3.0 * workload.weight_bytes + 2 * states) * passes
    on_gpu, pcie = moved / machine.gpu.memory_bandwidth, machine.gpu.pcie * c.link
    if not offload.offloads(workload, machine):
        return on_gpu
    if not workload.steps_on_cpu:
        return on_gpu + elements * 2 * states / pcie
    weights = workload.compute_bytes if workload.offload == "optimizer" else 0
    return offload.cpu_step_seconds(workload) + elements * weights / pcie


def as_record(throughput: Throughput) -> dict[str, Any]:
    """The figures that a run's journal keeps to say its MFU."""
    return {"flops_per_token": throughput.flops_per_token, "tokens_per_s_per_gpu": [throughput.low, throughput.likely, throughput.high]}
