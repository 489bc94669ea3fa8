"""Memory per GPU by part, at the worst moment of a step.

What rests (parameters, gradients, optimizer states) is counted exactly, tensor by tensor, as the trainer cuts and stores it. What
comes and goes (activations, gathered layers, the loss, buffers) is counted from the shapes of what the layers keep. Four moments
compete: the loss, the two ends of the backward pass, and the optimizer step. On top comes a reserve: the driver's context and
what the allocator loses to fragments. Sizes are bytes.

`jobs/plan.py validate` holds it against published runs; one constant (FRAGMENTS) is fitted to them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from raytune70b.planning.parameters import Tensor
from raytune70b.planning.workload import Workload, shard_numel

CONTEXT = 1.0 * 2**30
"""CUDA context, cuBLAS workspaces and NCCL's channels of one process."""

FRAGMENTS = 0.12
"""Of what comes and goes, the share that the caching allocator loses to freed blocks of other sizes. Runs with memory to spare
reserve more, but the allocator gives back when it must."""

TIGHT = 0.92
"""Above this share of the usable memory a plan is called tight: one longer batch or one more library can break it."""

NF4_WEIGHT = 0.5
NF4_SCALE_BLOCK = 64
"""A 4-bit weight is half a byte, and 64 of them share a 16-bit scale."""

STATE_BLOCKS = (256, 128, 64)
"""Elements of an 8-bit optimizer state that share an fp32 scale: the first that divides a row; where none does the state is fp32."""

ZERO3_REDUCE_BUCKET = 500_000_000
ZERO3_PREFETCH_BUCKET = 50_000_000
ZERO3_LIVE_PARAMETERS = 1_000_000_000
ZERO3_SUB_GROUP = 1_000_000_000
ZERO3_PERSISTENT = 100_000
"""DeepSpeed's defaults, in elements, which the trainer sets: reduce_bucket_size, stage3_prefetch_bucket_size, stage3_max_live_parameters
(and stage3_max_reuse_distance), sub_group_size and stage3_param_persistence_threshold."""

COMING_AND_GOING = ("activations", "gathered layers", "loss")


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per GPU by part at the worst moment."""

    parts: dict[str, float]
    moment: str
    capacity: float

    @property
    def allocated(self) -> float:
        """What torch.cuda.max_memory_allocated reports."""
        return sum(size for part, size in self.parts.items() if part != "reserve")

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def verdict(self) -> str:
        """fits, tight or does not fit."""
        share = self.total / self.capacity
        return "does not fit" if share > 1 else "tight" if share > TIGHT else "fits"


def plan_memory(workload: Workload, capacity: float, fragments: float = FRAGMENTS) -> MemoryPlan:
    """Memory per GPU by part at the worst moment, against `capacity` bytes."""
    resting = on_gpu(workload, resting_bytes(workload))
    passing = moments(workload, resting["gradients"])
    moment = max(passing, key=lambda name: sum(passing[name].values()))
    plan = MemoryPlan({**resting, **passing[moment]}, moment, capacity)
    return with_fragments(plan, fragments)


def with_fragments(plan: MemoryPlan, fragments: float) -> MemoryPlan:
    """The plan with the reserve that follows from this share of fragments."""
    reserve = CONTEXT + fragments * sum(plan.parts[name] for name in COMING_AND_GOING)
    return replace(plan, parts={**plan.parts, "reserve": reserve})


def resting_bytes(workload: Workload, rank: int = 0) -> dict[str, float]:
    """Parameters, gradients and optimizer states of one worker between two micro-batches: exact for this trainer."""
    held = sum(workload.held(t.shape, rank) for t in workload.trained)
    weights = held * workload.weight_bytes
    if workload.sharding == "zero3":
        weights += held * workload.compute_bytes  # what computes, a copy of the master weights in fp32 too
    return {
        "parameters": float(weights + frozen_bytes(workload, rank)),
        "gradients": float(held * workload.gradient_bytes),
        "optimizer states": float(sum(state_bytes(workload, t, rank) for t in workload.trained)),
    }


def frozen_bytes(workload: Workload, rank: int = 0) -> float:
    """The frozen base of an adapter run on one worker."""
    if workload.method == "full":
        return 0.0
    total = 0.0
    for tensor in workload.model.tensors:
        total += workload.held(tensor.shape, rank) * frozen_element_bytes(workload, tensor)
    return total


def frozen_element_bytes(workload: Workload, tensor: Tensor) -> float:
    """Bytes of one frozen weight."""
    return sum(frozen_element_sizes(workload, tensor))


def frozen_element_sizes(workload: Workload, tensor: Tensor) -> list[float]:
    """Bytes of one frozen weight in each tensor that holds it: qlora packs the decoder's linear layers, all else rests in the compute type."""
    if workload.method == "qlora" and tensor.linear and tensor.layer is not None:
        return [NF4_WEIGHT, 2.0 / NF4_SCALE_BLOCK]
    return [float(workload.compute_bytes)]


def state_bytes(workload: Workload, tensor: Tensor, rank: int = 0) -> float:
    """AdamW's two moments and step counter of one tensor on one worker."""
    step = 0.0 if workload.sharding == "zero3" else 4.0  # ZeRO-3 steps on flat pieces of many tensors
    return sum(state_sizes(workload, tensor, rank)) + step


def state_sizes(workload: Workload, tensor: Tensor, rank: int = 0) -> list[float]:
    """Bytes of each tensor that holds the two moments. In 8 bits, where they have scales, and in bf16, vectors stay fp32."""
    held = float(workload.held(tensor.shape, rank))
    if workload.optimizer == "torch":
        return [held * workload.weight_bytes] * 2
    if workload.optimizer == "adamw" or len(tensor.shape) < 2:
        return [4 * held] * 2
    if workload.optimizer == "adamw_bf16":
        return [2 * held] * 2
    row = tensor.numel // tensor.shape[0]
    block = next((b for b in STATE_BLOCKS if row % b == 0), 0)
    return [held, 4 * held / block] * 2 if block else [4 * held] * 2


def on_gpu(workload: Workload, resting: dict[str, float]) -> dict[str, float]:
    """What of it `model.offload` leaves on the GPU."""
    kept = {"none": (1, 1, 1), "optimizer": (1, 1, 0), "params": (0, 0, 0)}[workload.offload]
    if workload.sharding == "zero3" and workload.offload == "optimizer":  # steps on the CPU: masters and gradients lie there too
        masters = workload.trained_shard * float(workload.weight_bytes)
        return {**dict.fromkeys(resting, 0.0), "parameters": resting["parameters"] - masters}
    return {part: size * share for (part, size), share in zip(resting.items(), kept, strict=True)}


def moments(workload: Workload, gradients: float) -> dict[str, dict[str, float]]:
    """What comes and goes at each moment that can be the worst."""
    kept, working = activation_bytes(workload)
    at_loss, in_backward = gathered_bytes(workload)
    resting = bucket_bytes(workload)
    held = gradients if workload.micro_batches > 1 or workload.sharding == "zero3" else 0.0  # from the micro-batches before; ZeRO-3 frees none
    backward = {"gathered layers": in_backward, "loss": 0.0, "buffers": resting + reduce_bytes(workload)}
    return {
        "loss": {"gradients": held, "activations": kept, "gathered layers": at_loss, "loss": loss_bytes(workload), "buffers": resting},
        "start of backward": {"gradients": held, "activations": kept + working, **backward},
        "end of backward": {"gradients": gradients, "activations": kept / workload.model.layers + working, **backward},
        "optimizer step": {
            "gradients": gradients,
            "activations": 0.0,
            "gathered layers": 0.0,
            "loss": 0.0,
            "buffers": resting + step_bytes(workload),
        },
    }


def activation_bytes(workload: Workload) -> tuple[float, float]:
    """(kept for the backward pass, working set of the layer in work) in bytes."""
    m, tokens = workload.model, workload.tokens
    saved, stream = saved_bytes_per_token(workload), float(m.hidden * workload.compute_bytes)
    recomputed, working = workload.recomputed, working_bytes_per_token(workload)
    kept = m.layers * tokens * (recomputed * stream + (1 - recomputed) * saved)
    if workload.sharding == "fsdp1" and workload.method != "full":
        working += m.layers * stream  # hooks of frozen layers hold inputs and their gradients until the backward pass ends
    return kept, tokens * (working + (saved if recomputed else 0.0))


def saved_bytes_per_token(workload: Workload) -> float:
    """Bytes that autograd keeps of one decoder layer per token when nothing is recomputed.

    Two norms (input and output; plain ones also an fp32 copy and the normalised value), queries, keys, values and attention's
    output, and the MLP's inner tensors: gate, its activation, up and their product, or up and its activation.
    """
    m, size = workload.model, workload.compute_bytes
    norms = 2 * m.hidden * size * (2 if workload.fused_norm else 2 + 4 / size)
    attention = float((2 * m.heads + 2 * m.kv_heads) * m.head_dim * size)
    if not workload.flash_attention:
        attention += m.heads * workload.seq_len * (4 + size)  # the softmax in fp32 and its copy
    inner = (3 if workload.fused_mlp else 4) if m.gated else 2
    return norms + attention + inner * m.intermediate * size


def working_bytes_per_token(workload: Workload) -> float:
    """Gradients of activations while one layer's backward pass runs: of the MLP's two widest tensors and of the stream."""
    m = workload.model
    return ((2 if m.gated else 1) * m.intermediate + m.hidden) * float(workload.compute_bytes)


def loss_bytes(workload: Workload) -> float:
    """The loss: the logits of one chunk with their gradient, and the whole gradient of a trained head, in fp32 while chunks add up."""
    if not workload.loss_chunk_tokens:
        return workload.tokens * workload.model.vocab * workload.logit_bytes
    chunk = min(workload.loss_chunk_tokens, workload.tokens)
    head = workload.model.head_parameters * (4.0 + workload.compute_bytes) if workload.method == "full" else 0.0
    return chunk * workload.model.vocab * (2.0 * workload.compute_bytes + 4) + head


def gathered_bytes(workload: Workload) -> tuple[float, float]:
    """Whole weights that a worker holds for a while: (at the loss, in the backward pass).

    FSDP holds the layer in work and the next one; at the loss the head and the last layer. 4-bit layers are gathered packed, and one
    matrix at a time is unpacked. ZeRO-3 keeps what it has gathered up to a limit, which it counts in elements, packed or not.
    """
    m, size = workload.model, float(workload.compute_bytes)
    if workload.sharding == "single":
        return 0.0, 0.0
    layer, unpacked = m.layer_parameters * size, 0.0
    if workload.method == "qlora":
        layer = sum(t.numel * frozen_element_bytes(workload, t) for t in m.layer_tensors)
        unpacked = max(t.numel for t in m.layer_tensors) * size
    if workload.sharding == "zero3":
        limit = float(ZERO3_LIVE_PARAMETERS + ZERO3_PREFETCH_BUCKET)
        if workload.method == "qlora":  # two packed weights are one element of a byte
            live = min(limit, layer * m.layers) + min(limit, m.head_parameters) * size
        else:
            live = min(limit, m.parameters) * size
        return live, live + unpacked
    head = m.head_parameters * size
    root = m.root_parameters * size if workload.sharding == "fsdp1" else 0.0  # freed after its part of the backward pass by FSDP2
    return max(root, head) + layer, root + 2 * layer + unpacked


def bucket_bytes(workload: Workload) -> float:
    """The fp32 buffer in which ZeRO-3 collects whole gradients until it reduces them; it is never freed."""
    return min(ZERO3_REDUCE_BUCKET, workload.trained_parameters) * 4.0 if workload.sharding == "zero3" else 0.0


def reduce_bytes(workload: Workload) -> float:
    """Whole gradients of the layer in work and the fp32 buffer that sums them over the workers."""
    if workload.sharding == "single":
        return 0.0
    if workload.sharding == "zero3":
        return bucket_bytes(workload)  # the bucket again, sorted by worker
    layer = workload.model.layer_parameters if workload.method == "full" else workload.trained_parameters / workload.model.layers
    return layer * (workload.compute_bytes + 4.0)


def step_bytes(workload: Workload) -> float:
    """Temporaries of the optimizer step: torch's foreach holds one more copy of the weights; compact states are unpacked one by one."""
    if workload.sharding == "zero3" and workload.offload == "none":  # the gradients of a sub-group, put together
        return min(ZERO3_SUB_GROUP, workload.trained_shard) * 4.0
    if workload.optimizer == "torch":
        return workload.trained_shard * float(workload.weight_bytes)
    if workload.optimizer == "adamw" and workload.precision != "bf16":
        return 0.0
    return 20.0 * max((shard_numel(t.shape, workload.shards) for t in workload.trained), default=0)
