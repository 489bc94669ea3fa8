"""The sharding engine under the training loop: FSDP2, or DeepSpeed ZeRO-3. The loop asks what `Engine` lists and does not know which one runs.

What they train, and what a checkpoint holds, is the same to rounding: gradients are sums over the workers in fp32, clipped and stepped
by the same formulas; weights and optimizer states are saved under the same names and shapes by torch.distributed.checkpoint. So one
engine continues what the other began, and what verifies, prunes and exports checkpoints serves both. (DeepSpeed's own checkpoints
load at another world_size only after a conversion to its universal format: a second format to check, and a wait at every resize.)
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raytune70b.model.buffers import restore_buffers
from raytune70b.model.isolation import check_documents
from raytune70b.model.load import build_model, check_libraries, fill, unsharded
from raytune70b.model.shard import make_mesh, reshard
from raytune70b.model.zero3 import as_forward, cut, import_deepspeed, piece_of
from raytune70b.planning import memory
from raytune70b.schema import Config
from raytune70b.training.optimizer import build_optimizer
from raytune70b.training.state import State, buffer_state, local_tensor, saved_parameters, state_dict

NORM_PIECE = 1 << 24
"""Elements of a gradient that are squared at once: their fp64 copy is 134 MB."""


class Engine(Protocol):
    """A model and its optimizer, cut over the workers. All workers call every method together."""

    model: nn.Module

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a worker's part of the loss to those of the global batch: they are summed over the workers."""

    def grad_norm(self) -> Tensor:
        """The global 2-norm, a plain fp32 scalar, the same on all workers; not finite where a gradient is not."""

    def update(self, norm: Tensor, max_norm: float, learning_rate: float) -> None:
        """Scales gradients of this norm down to `max_norm`, makes an optimizer step, and forgets the gradients."""

    def forget(self) -> None:
        """Drops the gradients."""

    def rest(self) -> None:
        """Frees what a forward pass without a backward pass leaves gathered."""

    def state(self) -> State:
        """The live tensors that a checkpoint holds: loading fills them in place."""

    def loaded(self) -> None:
        """To be called when `state` was filled."""


def build_engine(config: Config, vocab_size: int, device: torch.device, resumes: bool = False) -> Engine:
    """The engine of `model.sharding` with the model's weights, in training mode. Raises UserError.

    resumes: a checkpoint follows. One of full training holds every weight, so that none is read (138 GB at 70 B) or drawn before.
    """
    weights = not (resumes and config.model.method == "full")
    if config.model.sharding == "zero3":
        return Zero3(config, vocab_size, device, weights)
    model = build_model(config, vocab_size, make_mesh(dist.get_world_size(), config.model.replicate, device.type), device, weights)
    return Fsdp(model, build_optimizer(model, config))


def check_engine(engine: Engine, config: Config, vocab_size: int, device: torch.device) -> None:
    """Has a model that has its weights show that it keeps the documents of a block apart. All workers call it together. Raises UserError."""
    check_documents(engine.model, vocab_size, config.model.loss_chunk_tokens, device)
    engine.forget()
    engine.rest()


class Fsdp:
    """PyTorch's FSDP2, as `model.load.build_model` cuts it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def grad_norm(self) -> Tensor:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        mesh = next((g.device_mesh for g in grads if isinstance(g, DTensor)), None)
        total = sum_of_squares([local_tensor(g) for g in grads], torch.device(mesh.device_type) if mesh else grads[0].device)
        if mesh is not None:
            dist.all_reduce(total, group=mesh.get_group(mesh.ndim - 1))  # over the shards; copies of the model hold the same
        return total.sqrt().float()

    def update(self, norm: Tensor, max_norm: float, learning_rate: float) -> None:
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, norm)
        set_rate(self.optimizer, learning_rate)
        self.optimizer.step()
        self.forget()

    def forget(self) -> None:
        self.optimizer.zero_grad()

    def rest(self) -> None:
        reshard(self.model)  # or the root stays gathered, and a checkpoint would hold the gathered copies

    def state(self) -> State:
        return state_dict(self.model, self.optimizer)

    def loaded(self) -> None:
        pass


@torch.no_grad()
def sum_of_squares(gradients: list[Tensor], device: torch.device) -> Tensor:
    """An fp64 scalar on `device`: how shards are cut and in which order they are added then vanishes in the norm's rounding to fp32.

    Were the norm another in its last bit, clipping would change every gradient, and 16-bit states and weights would round other ways.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        for piece in gradient.flatten().split(NORM_PIECE):
            total += torch.linalg.vector_norm(piece, dtype=torch.float64).square().to(device, non_blocking=True)
    return total


def set_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Sets every group's rate; an optimizer that keeps it in a tensor (for torch.compile) keeps that tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate


class Zero3:
    """DeepSpeed ZeRO-3: 16-bit (or fp32) weights, fp32 master weights, gradients and AdamW states, each cut flat into equal pieces.

    DeepSpeed gathers and frees weights around each module's passes, reduces gradients and writes the weights back after a step. It
    divides gradients by world_size before it sums them, in fp32: that is taken back here, where they are clipped, and not in the
    loss, whose 16-bit gradients would round otherwise at every world_size. The optimizer that steps on the flat pieces is torch's
    fused AdamW, on the GPU or with `model.offload` on the CPU.
    """

    def __init__(self, config: Config, vocab_size: int, device: torch.device, weights: bool = True):
        check_libraries(config)
        deepspeed = import_deepspeed(device)
        self.device, self.world = device, dist.get_world_size()
        self.model = model = unsharded(config, vocab_size, device)
        settings = zero3_settings(config, sum(p.numel() for p in model.parameters() if p.requires_grad), device)
        cut(model, settings, device, torch.float32 if config.model.precision == "fp32" else torch.bfloat16)
        restore_buffers(model, device)
        self.optimizer = build_optimizer(model, config)
        self.deepspeed, *_ = deepspeed.initialize(model=model, optimizer=self.optimizer, config=settings)
        self.zero = self.deepspeed.optimizer
        as_forward(model.get_output_embeddings(), "head_loss")
        for name in ("packed_loss", "logits_error"):
            as_forward(model, name, self.deepspeed)
        for flat in self.zero.fp32_partitioned_groups_flat:  # AdamW makes them at its first step: too late for a checkpoint to fill
            self.optimizer.state[flat] = {"step": torch.zeros((), device=flat.device), "exp_avg": torch.zeros_like(flat), "exp_avg_sq": torch.zeros_like(flat)}
        if weights:
            with torch.no_grad():
                fill(model, config)
            self.loaded()
        model.train()

    def backward(self, loss: Tensor) -> None:
        self.deepspeed.backward(loss)

    def grad_norm(self) -> Tensor:
        total = sum_of_squares([self.zero.grad_partitions_flat_buffer], self.device)
        dist.all_reduce(total)
        return (total.sqrt() * self.world).float()

    def update(self, norm: Tensor, max_norm: float, learning_rate: float) -> None:
        gradients, clip = self.zero.grad_partitions_flat_buffer, torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        gradients.mul_(clip.to(gradients.device) * self.world)
        set_rate(self.optimizer, learning_rate)
        self.deepspeed.step()

    def forget(self) -> None:
        self.zero.zero_grad()

    def rest(self) -> None:
        pass

    def state(self) -> State:
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        kept = {f"{name}.{key}": piece_of(p, key) for name, p in trained.items() for key in ("exp_avg", "exp_avg_sq")}
        steps = {f"{name}.step": self._step_of(p) for name, p in trained.items()}
        return {"model": {name: piece_of(p) for name, p in saved_parameters(self.model).items()} | buffer_state(self.model), "optimizer": {**kept, **steps}}

    def _step_of(self, parameter: Any) -> Tensor:
        group = self.zero.grad_position[self.zero.get_param_id(parameter)][0]
        return self.optimizer.state[self.zero.fp32_partitioned_groups_flat[group]]["step"]

    @torch.no_grad()
    def loaded(self) -> None:
        self.zero.empty_partition_cache()  # small weights stay gathered, with the values from before
        for weights, masters in zip(self.zero.fp16_partitioned_groups_flat, self.zero.fp32_partitioned_groups_flat, strict=True):
            weights.copy_(masters)


def zero3_settings(config: Config, trained: int, device: torch.device) -> dict[str, Any]:
    """DeepSpeed's configuration. trained: elements that are trained. Gradients are reduced and summed up in fp32."""
    model = config.model
    in_host_memory = {"device": "cpu", "pin_memory": device.type == "cuda"}
    zero: dict[str, Any] = {
        "stage": 3, "reduce_bucket_size": min(memory.ZERO3_REDUCE_BUCKET, trained), "sub_group_size": memory.ZERO3_SUB_GROUP,
        "stage3_prefetch_bucket_size": memory.ZERO3_PREFETCH_BUCKET, "stage3_max_live_parameters": memory.ZERO3_LIVE_PARAMETERS,
        "stage3_max_reuse_distance": memory.ZERO3_LIVE_PARAMETERS, "stage3_param_persistence_threshold": memory.ZERO3_PERSISTENT,
    }  # fmt: skip
    if model.offload != "none":
        zero["offload_optimizer"] = in_host_memory
    if model.offload == "params":
        zero["offload_param"] = in_host_memory
    return {
        "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False, "bf16": {"enabled": model.precision != "fp32"},
        "communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"},
        "managed_gradient_accumulation": False, "gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 1,  # the loop counts
    }  # fmt: skip
