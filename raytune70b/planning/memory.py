"""Memory per GPU by part, at the worst moment of a step.

What rests (parameters, gradients, optimizer states) is counted exactly, tensor by tensor, with FSDP2's cut along the first
dimension. What comes and goes (activations, gathered layers, the loss, reduce buffers) is counted from the shapes of what
the layers keep. Three moments compete: the loss, the backward pass through a layer, and the optimizer step. On top comes a
reserve: the driver's context and what the allocator loses to fragments. Sizes are bytes.

The model is checked against published runs by `jobs/plan.py validate`; no part of it is fitted to a source.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from raytune70b.planning.parameters import Tensor
from raytune70b.planning.workload import Workload, with_micro_batch

CONTEXT = 1.0 * 2**30
"""CUDA context, cuBLAS workspaces and NCCL's channels of one process."""

FRAGMENTS = 0.12
"""Of what comes and goes, the share that the caching allocator loses to freed blocks of other sizes. Fitted to which published runs
ended out of memory; runs with memory to spare reserve more, but there the allocator gives back when it must."""

TIGHT = 0.92
"""Above this share of the usable memory a plan is called tight: one longer batch or one more library can break it."""

NF4_BITS = 4

ZERO3_REDUCE_BUCKET = 500_000_000
ZERO3_PREFETCH_BUCKET = 50_000_000
ZERO3_LIVE_PARAMETERS = 1_000_000_000
"""DeepSpeed's defaults, in elements: reduce_bucket_size, stage3_prefetch_bucket_size and stage3_max_live_parameters."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per GPU by part at the worst moment. `verdict`: fits, tight or does not fit."""

    parts: dict[str, float]
    moment: str
    capacity: float
    host: float

    @property
    def allocated(self) -> float:
        """What torch.cuda.max_memory_allocated reports."""
        return sum(size for part, size in self.parts.items() if part != "reserve")

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def verdict(self) -> str:
        share = self.total / self.capacity
        return "does not fit" if share > 1 else "tight" if share > TIGHT else "fits"


def shard_numel(shape: tuple[int, ...], shards: int) -> int:
    """Elements of one worker's shard: FSDP2 cuts the first dimension into ceil(d0 / shards) rows and pads the last shards to that."""
    return math.ceil(shape[0] / shards) * math.prod(shape[1:])


def sharded(tensors: Iterable[Tensor], shards: int) -> int:
    """Elements that one worker holds of tensors that are each cut."""
    return sum(shard_numel(t.shape, shards) for t in tensors)


def weight_bytes(workload: Workload) -> int:
    """Bytes of an element of a trained weight as it rests: fp32 master weights unless `precision` is bf16."""
    return 2 if workload.precision == "bf16" else 4


def compute_bytes(workload: Workload) -> int:
    return 4 if workload.precision == "fp32" else 2


def state_bytes(workload: Workload) -> float:
    """Bytes of optimizer state per trained element."""
    return {"adamw": 2.0 * weight_bytes(workload), "adamw_bf16": 4.0, "adamw_8bit": 2.0 + 8.0 / 256}[workload.optimizer]


def base_bytes(workload: Workload) -> float:
    """Bytes that one worker holds of the frozen base of an adapter run."""
    shards = 1 if workload.offload == "params" else workload.shards
    if workload.method == "full":
        return 0.0
    if workload.method == "lora":
        return sharded(workload.model.tensors, shards) * float(compute_bytes(workload))
    packed = [t for t in workload.model.tensors if t.linear and t.layer is not None]
    rest = [t for t in workload.model.tensors if not (t.linear and t.layer is not None)]
    scales = workload.model.linear_parameters * workload.scale_bytes  # bitsandbytes does not cut them
    return sharded(packed, shards) * NF4_BITS / 8 + sharded(rest, shards) * float(compute_bytes(workload)) + scales


def saved_bytes_per_token(workload: Workload) -> float:
    """Bytes that autograd keeps of one decoder layer per token when nothing is recomputed.

    Two norms (16-bit input and output; the plain ones also an fp32 copy and the normalised value), queries, keys, values and
    attention's output, and the MLP's inner tensors: gate, its activation, up and their product, or up and its activation.
    """
    m, size = workload.model, compute_bytes(workload)
    norms = 2 * m.hidden * size * (2 if workload.fused_norm else 2 + 4 / size)
    attention = (2 * m.heads + 2 * m.kv_heads) * m.head_dim * size
    if not workload.flash_attention:
        attention += m.heads * workload.seq_len * (4 + size)  # the softmax in fp32 and its copy
    inner = (3 if workload.fused_mlp else 4) if m.gated else 2
    return norms + attention + inner * m.intermediate * size


def working_bytes_per_token(workload: Workload) -> float:
    """Gradients of activations that live while one layer's backward pass runs: of the MLP's two widest tensors and of the stream."""
    m = workload.model
    return ((2 if m.gated else 1) * m.intermediate + m.hidden) * float(compute_bytes(workload))


def activation_bytes(workload: Workload) -> tuple[float, float]:
    """(kept for the backward pass, working set of the layer in work) in bytes."""
    m, tokens = workload.model, workload.tokens
    saved, stream = saved_bytes_per_token(workload), float(m.hidden * compute_bytes(workload))
    working = working_bytes_per_token(workload)
    recomputed = {"none": 0.0, "selective": 0.5, "full": 1.0}[workload.activation_checkpointing]
    kept = m.layers * tokens * (recomputed * stream + (1 - recomputed) * saved)
    if workload.sharding == "fsdp1" and workload.method != "full":
        working += m.layers * stream  # hooks of frozen layers hold inputs and their gradients until the backward pass ends
    return kept, tokens * (working + (saved if recomputed else 0.0))


def loss_bytes(workload: Workload) -> float:
    """The loss: logits of one chunk in the compute type and in fp32 with their gradient, and an fp32 sum for a trained head."""
    if not workload.loss_chunk_tokens:
        return workload.tokens * workload.model.vocab * workload.logit_bytes
    chunk = min(workload.loss_chunk_tokens, workload.tokens)
    head = workload.model.head_parameters * (4.0 if workload.method == "full" and chunk < workload.tokens else 0.0)
    return chunk * workload.model.vocab * (2.0 * compute_bytes(workload) + 4) + head


def gathered_bytes(workload: Workload) -> dict[str, float]:
    """Whole weights that a worker holds for a while: at the `loss`, in the `backward` pass, and at the `optimizer` step."""
    m, size = workload.model, compute_bytes(workload)
    if workload.sharding == "single":
        return {"loss": 0.0, "backward": 0.0, "optimizer": 0.0}
    root, layer = float(m.root_parameters * size), float(m.layer_parameters * size)
    if workload.sharding == "zero3":
        live = min(ZERO3_LIVE_PARAMETERS + ZERO3_PREFETCH_BUCKET, m.parameters) * float(size)
        return {"loss": live, "backward": live, "optimizer": 0.0}
    dequantised = 0.0
    if workload.method == "qlora":  # layers are gathered in 4 bits; one matrix at a time is unpacked
        layer, dequantised = m.layer_parameters * NF4_BITS / 8, max(t.numel for t in m.layer_tensors) * float(size)
    head = root if workload.sharding == "fsdp1" else float(m.head_parameters * size)
    return {"loss": head + layer, "backward": head + 2 * layer + dequantised, "optimizer": 0.0}


def reduce_bytes(workload: Workload) -> float:
    """Whole gradients of the layer in work and the buffers that sum them over the workers."""
    if workload.sharding == "single":
        return 0.0
    if workload.sharding == "zero3":
        return min(ZERO3_REDUCE_BUCKET, sum(t.numel for t in workload.trained())) * 2.0 * compute_bytes(workload)
    layer = workload.model.layer_parameters if workload.method == "full" else sum(t.numel for t in workload.adapters()) / workload.model.layers
    return layer * (compute_bytes(workload) + 4.0)


def plan_memory(workload: Workload, capacity: float, fragments: float = FRAGMENTS) -> MemoryPlan:
    """Memory per GPU by part at the worst moment, against `capacity` bytes."""
    resting = resting_bytes(workload)
    kept, working = activation_bytes(workload)
    gathered, reduce, loss = gathered_bytes(workload), reduce_bytes(workload), loss_bytes(workload)
    gradients = resting["gradients"]
    held = gradients if workload.micro_batches > 1 else 0.0  # from the micro-batches before
    moments = {
        "loss": {"gradients": held, "activations": kept, "gathered layers": gathered["loss"], "loss": loss, "buffers": 0.0},
        "start of backward": {"gradients": held, "activations": kept + working, "gathered layers": gathered["backward"], "loss": 0.0, "buffers": reduce},
        "end of backward": {"gradients": gradients, "activations": kept / workload.model.layers + working,
                            "gathered layers": gathered["backward"], "loss": 0.0, "buffers": reduce},
        "optimizer step": {"gradients": gradients, "activations": 0.0, "gathered layers": 0.0, "loss": 0.0, "buffers": optimizer_temporaries(workload)},
    }  # fmt: skip
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    parts = {**resting, **moments[moment]}
    parts["reserve"] = CONTEXT + fragments * (parts["activations"] + parts["gathered layers"] + parts["loss"])
    return MemoryPlan(parts, moment, capacity, host_bytes(workload))


def resting_bytes(workload: Workload) -> dict[str, float]:
    """Parameters, gradients and optimizer states of one worker: exact, the worker of rank 0."""
    elements = sharded(workload.trained(), workload.shards)
    trained, states = elements * float(weight_bytes(workload)), elements * state_bytes(workload)
    if workload.sharding == "zero3":  # a 16-bit copy for compute beside the fp32 master weights
        trained = elements * (4.0 + compute_bytes(workload) if workload.precision == "bf16_mixed" else float(weight_bytes(workload)))
    gradients = elements * float(weight_bytes(workload))
    on_gpu = {"none": (1, 1), "optimizer": (1, 0), "params": (0, 0)}[workload.offload]
    base = base_bytes(workload)
    return {"parameters": (trained + base) * on_gpu[0], "gradients": gradients * on_gpu[0], "optimizer states": states * on_gpu[1]}


def optimizer_temporaries(workload: Workload) -> float:
    """torch's foreach optimizers hold one more copy of the parameters while they step; fused ones nothing."""
    return sharded(workload.trained(), workload.shards) * float(weight_bytes(workload)) if workload.foreach_optimizer else 0.0


def host_bytes(workload: Workload) -> float:
    """Host memory of one worker: a process with torch and Ray, the checkpoint's copy of its shards, and what is offloaded."""
    elements = sharded(workload.trained(), workload.shards)
    states = elements * (weight_bytes(workload) + state_bytes(workload))
    offloaded = {"none": 0.0, "optimizer": states, "params": states + elements * 4.0 + base_bytes(workload)}[workload.offload]
    return 4e9 + states + offloaded


def auto_micro_batch(workload: Workload, capacity: float, global_batch_size: int) -> int:
    """The largest micro-batch that divides the global batch, leaves every worker one, and is not tight; 0 when none fits."""
    limit = max(1, global_batch_size // workload.world_size)
    for size in sorted((n for n in range(1, limit + 1) if global_batch_size % n == 0), reverse=True):
        if plan_memory(with_micro_batch(workload, size, global_batch_size), capacity).total <= TIGHT * capacity:
            return size
    return 0


def minimum_workers(workload: Workload, capacity: float, global_batch_size: int, most: int) -> int | None:
    """The fewest workers, in steps of `replicate`, on which the workload fits; None when not even `most` are enough."""
    for workers in range(workload.replicate, most + 1, workload.replicate):
        candidate = with_micro_batch(replace(workload, world_size=workers), workload.micro_batch_size, global_batch_size)
        if plan_memory(candidate, capacity).total <= capacity:
            return workers
    return None
