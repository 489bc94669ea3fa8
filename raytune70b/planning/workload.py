"""What is trained how, in numbers: the one input of the memory and the time model.

A `Workload` comes from a configuration (`from_config`) or from a row of a table of published runs (`published.py`), so that
both are judged by the same model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from raytune70b.config import UserError
from raytune70b.planning.parameters import ModelShape, Tensor, model_shape, read_config
from raytune70b.schema import Config

ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "Wqkv", "out_proj", "query_key_value", "c_attn")
"""Names of attention's linear layers in common families, for adapters on the attention only."""

PLAIN_LOGIT_BYTES = 12.0
"""Bytes that the plain loss keeps per token and vocabulary entry: log-softmax, its gradient and that of the logits, in fp32."""

RECOMPUTED = {"none": 0.0, "selective": 0.5, "full": 1.0}
"""Share of the layers that `activation_checkpointing` runs twice."""


class WorkloadError(UserError):
    """A run that contradicts itself."""


@dataclass(frozen=True)
class Workload:
    """One training run. `micro_batches` is per worker and optimizer step; sizes in blocks, tokens and bytes.

    global_batch_size: blocks of a step; None where every micro-batch of every worker is full. It is less where the micro-batches do not
    divide the workers: some workers then run one that holds nothing.

    sharding: `fsdp2` and `zero3` (DeepSpeed), as this trainer has them, `fsdp1` (torch's older wrapper, in published runs), `single`.
    optimizer: this trainer's names, or `torch` for states in the weights' type and one copy of the weights while it steps.
    fused_norm: a norm is one kernel and keeps no fp32 copy. fused_mlp: the MLP's activation and product are one kernel.
    """

    model: ModelShape
    method: str = "full"
    precision: str = "bf16_mixed"
    optimizer: str = "adamw"
    sharding: str = "fsdp2"
    world_size: int = 1
    replicate: int = 1
    seq_len: int = 2048
    micro_batch_size: int = 1
    micro_batches: int = 1
    global_batch_size: int | None = None
    activation_checkpointing: str = "none"
    flash_attention: bool = True
    fused_norm: bool = False
    fused_mlp: bool = False
    logit_bytes: float = PLAIN_LOGIT_BYTES
    loss_chunk_tokens: int = 0
    offload: str = "none"
    lora_rank: int = 16
    lora_targets: tuple[str, ...] = ()
    lora_saved: tuple[str, ...] = ()
    fp32_gradients: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.micro_batch_size * self.seq_len

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step trains, over all workers."""
        return self.slots_per_step if self.global_batch_size is None else self.global_batch_size * self.seq_len

    @property
    def slots_per_step(self) -> int:
        """Tokens that there is room for in the micro-batches of a step: `tokens_per_step` or more."""
        return self.tokens * self.micro_batches * self.world_size

    @property
    def shards(self) -> int:
        """Workers that share one copy of the model."""
        return 1 if self.sharding == "single" else self.world_size // self.replicate

    @property
    def steps_on_cpu(self) -> bool:
        """Whether offloading makes the CPU step: FSDP2's parameters in host memory, and whatever ZeRO-3 offloads."""
        return self.offload == "params" or (self.sharding == "zero3" and self.offload != "none")

    @property
    def recomputed(self) -> float:
        return RECOMPUTED[self.activation_checkpointing]

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element of a trained weight as it rests: fp32 master weights unless `precision` is bf16."""
        return 2 if self.precision == "bf16" else 4

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of a gradient while micro-batches add up."""
        return 4 if self.fp32_gradients else self.weight_bytes

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element of an activation, of a gathered weight and of a frozen one."""
        return 4 if self.precision == "fp32" else 2

    @cached_property
    def trained(self) -> tuple[Tensor, ...]:
        """The parameters that the optimizer updates: all, or LoRA's A [rank, in] and B [out, rank] of each target and trained copies."""
        if self.method == "full":
            return self.model.tensors
        found = []
        for tensor in self.model.tensors:
            module = tensor.name.rpartition(".")[0]
            name = module.rsplit(".", 1)[-1]
            if tensor.linear and tensor.layer is not None and (not self.lora_targets or name in self.lora_targets):
                out, width = tensor.shape
                found += [
                    Tensor(f"{module}.lora_A.weight", (self.lora_rank, width)),
                    Tensor(f"{module}.lora_B.weight", (out, self.lora_rank)),
                ]
            if set(module.split(".")) & set(self.lora_saved):
                found.append(Tensor(f"{module}.modules_to_save.weight", tensor.shape))
        return tuple(found)

    @cached_property
    def trained_parameters(self) -> int:
        return sum(t.numel for t in self.trained)

    @cached_property
    def trained_shard(self) -> int:
        """Trained elements that rank 0 holds."""
        return sum(self.held(t.shape) for t in self.trained)

    def held(self, shape: tuple[int, ...], rank: int = 0) -> int:
        """Elements of a tensor that a rank holds: rows, or under ZeRO-3 an equal flat piece with its padding."""
        if self.sharding == "zero3":
            return math.ceil(math.prod(shape) / self.shards)
        return shard_numel(shape, self.shards, rank)


def shard_numel(shape: tuple[int, ...], shards: int, rank: int = 0) -> int:
    """Elements that a rank holds: the first dimension is cut into ceil(d0 / shards) rows; the last ranks may hold fewer, or none."""
    rows = math.ceil(shape[0] / shards)
    return max(0, min(rows, shape[0] - rank * rows)) * math.prod(shape[1:])


def config_shape(config: Config, vocab_size: int | None = None) -> ModelShape:
    """The shape of the model a configuration trains. vocab_size: the tokenizer's, where it is known. Raises ModelError."""
    if config.model.path:
        return model_shape(read_config(config.model.path))
    keys = {"vocab_size": config.data.vocab_size, **config.model.config}
    return model_shape({**keys, "vocab_size": vocab_size} if vocab_size else keys)


def from_config(config: Config, world_size: int, shape: ModelShape | None = None) -> Workload:
    """The workload of a configuration on so many workers; `train.micro_batch_size: auto` is taken as 1. Raises WorkloadError."""
    shape = shape or config_shape(config)
    if config.data.seq_len > shape.context:
        raise WorkloadError(
            f"data.seq_len: is {config.data.seq_len}, the model's context is {shape.context}; use blocks of at most {shape.context}"
        )
    if world_size % config.model.replicate:
        raise WorkloadError(f"model.replicate: is {config.model.replicate}, which does not divide {world_size} workers")
    model = config.model
    workload = Workload(
        model=shape,
        method=model.method,
        precision=model.precision,
        optimizer=config.train.optimizer,
        sharding="zero3" if model.sharding == "zero3" else "fsdp2",
        world_size=world_size,
        replicate=model.replicate,
        seq_len=config.data.seq_len,
        activation_checkpointing=model.activation_checkpointing,
        flash_attention=model.attention != "eager",
        fused_norm=model.compile,
        fused_mlp=model.compile,
        loss_chunk_tokens=model.loss_chunk_tokens,
        offload=model.offload,
        lora_rank=model.lora.rank,
        lora_targets=tuple(model.lora.targets),
        lora_saved=tuple(model.lora.modules_to_save),
        fp32_gradients=model.gradients == "fp32" and model.sharding == "fsdp",
    )
    micro = config.train.micro_batch_size
    return with_micro_batch(workload, micro if isinstance(micro, int) else 1, config.train.global_batch_size)


def with_micro_batch(workload: Workload, micro_batch_size: int, global_batch_size: int) -> Workload:
    """The same global batch cut into micro-batches of another size; each worker runs ceil(micro-batches / workers) of them."""
    total = math.ceil(global_batch_size / micro_batch_size)
    each = math.ceil(total / workload.world_size)
    return replace(workload, micro_batch_size=micro_batch_size, micro_batches=each, global_batch_size=global_batch_size)
