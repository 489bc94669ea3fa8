"""What is trained how, in numbers: the one input of the memory and the time model.

A `Workload` comes from a configuration (`from_config`) or from a row of a table of published runs (`published.py`), so that
both are judged by the same model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from raytune70b.config import Config, UserError
from raytune70b.planning.hardware import Machine
from raytune70b.planning.parameters import ModelShape, Tensor, model_shape, read_config

ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "Wqkv", "out_proj", "query_key_value", "c_attn")
"""Names that hold for attention's linear layers in common families; for adapters on the attention only."""


class WorkloadError(UserError):
    """A run that contradicts itself."""

DOUBLE_QUANTISED = (1 + 4 / 256) / 64
"""Bytes of scales per 4-bit weight: one byte for 64 weights, and a float for 256 of those bytes (QLoRA's double quantisation)."""


@dataclass(frozen=True)
class Workload:
    """One training run. Sizes in tokens, blocks and bytes; `micro_batches` is per worker and optimizer step.

    sharding: `fsdp2` (this trainer), `zero3` (DeepSpeed), `fsdp1` (torch's older wrapper, in published runs), `single`.
    logit_bytes: bytes that the loss keeps per token and vocabulary entry when it is not cut into chunks. fused_norm: one kernel a norm,
    which keeps no fp32 copy; fused_mlp: the MLP's activation and product are one kernel. scale_bytes: quantisation scales per weight.
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
    activation_checkpointing: str = "none"
    flash_attention: bool = True
    fused_norm: bool = False
    fused_mlp: bool = False
    logit_bytes: float = 12.0
    scale_bytes: float = DOUBLE_QUANTISED
    loss_chunk_tokens: int = 0
    foreach_optimizer: bool = False
    offload: str = "none"
    lora_rank: int = 16
    lora_targets: tuple[str, ...] = ()
    fp8: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.micro_batch_size * self.seq_len

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all workers."""
        return self.tokens * self.micro_batches * self.world_size

    @property
    def shards(self) -> int:
        """Workers that share one copy of the model."""
        return 1 if self.sharding == "single" else self.world_size // self.replicate

    def adapters(self) -> tuple[Tensor, ...]:
        """The LoRA matrices: A [rank, in] and B [out, rank] for each target layer."""
        if self.method == "full":
            return ()
        found = []
        for tensor in self.model.tensors:
            name = tensor.name.removesuffix(".weight")
            if tensor.linear and tensor.layer is not None and (not self.lora_targets or name.rsplit(".", 1)[-1] in self.lora_targets):
                out, width = tensor.shape
                found += [Tensor(f"{name}.lora_A", (self.lora_rank, width)), Tensor(f"{name}.lora_B", (out, self.lora_rank))]
        return tuple(found)

    def trained(self) -> tuple[Tensor, ...]:
        """The parameters that the optimizer updates."""
        return self.model.tensors if self.method == "full" else self.adapters()


def config_shape(config: Config) -> ModelShape:
    """The shape of the model a configuration trains. Raises ModelError."""
    if config.model.path:
        return model_shape(read_config(config.model.path))
    return model_shape({"vocab_size": config.data.vocab_size, **config.model.config})


def from_config(config: Config, machine: Machine, shape: ModelShape | None = None, **changes: Any) -> Workload:
    """The workload of a configuration on a machine, one worker a GPU. Raises WorkloadError.

    changes: fields to set otherwise, such as world_size. `train.micro_batch_size: auto` is worked out by `memory.resolve`.
    """
    shape = shape or config_shape(config)
    if config.data.seq_len > shape.context:
        raise WorkloadError(f"data.seq_len: is {config.data.seq_len}, the model's context is {shape.context}; use blocks of at most {shape.context}")
    world = changes.pop("world_size", machine.gpus)
    if world % config.model.replicate:
        raise WorkloadError(f"model.replicate: is {config.model.replicate}, which does not divide the {world} GPUs of hardware.nodes x hardware.gpus_per_node")
    gpu = machine.gpu.name != "cpu"
    workload = Workload(
        model=shape,
        method=config.model.method,
        precision=config.model.precision,
        optimizer=config.train.optimizer,
        sharding="zero3" if config.model.sharding == "zero3" else "fsdp2",
        world_size=world,
        replicate=config.model.replicate,
        seq_len=config.data.seq_len,
        activation_checkpointing=config.model.activation_checkpointing,
        flash_attention=config.model.attention in ("flash_attention_2", "sdpa") or (config.model.attention == "auto" and gpu),
        fused_norm=config.model.compile,
        fused_mlp=config.model.compile,
        loss_chunk_tokens=config.model.loss_chunk_tokens,
        offload=config.model.offload,
        lora_rank=config.model.lora.rank,
        lora_targets=tuple(config.model.lora.targets),
    )
    micro = config.train.micro_batch_size
    return with_micro_batch(replace(workload, **changes), micro if isinstance(micro, int) else 1, config.train.global_batch_size)


def with_micro_batch(workload: Workload, micro_batch_size: int, global_batch_size: int) -> Workload:
    """The same global batch cut into micro-batches of another size; each worker runs ceil(micro-batches / workers) of them."""
    total = math.ceil(global_batch_size / micro_batch_size)
    return replace(workload, micro_batch_size=micro_batch_size, micro_batches=math.ceil(total / workload.world_size))
