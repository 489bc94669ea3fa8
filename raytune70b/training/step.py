"""One optimizer step: the whole arithmetic in one place.

The loss is summed over the trained tokens of this rank's micro-batches and divided once by the trained tokens of the
global batch, so gradients (summed over ranks) are those of the mean over all trained tokens, whatever the number of
workers, the micro-batch size or the packing (huggingface/transformers PR 34191 shows the mean of means going wrong).

In bf16, with kernels that repeat themselves, a step is the same bit for bit on any number of workers: gradients of micro-batches have
eight bits, so fp32 adds them up all but exactly in any order, and the norm, which scales every gradient, is summed in fp64.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from raytune70b.blocks.batch import Arrays
from raytune70b.model.loss import loss_sum
from raytune70b.training.engine import Engine
from raytune70b.training.guards import Guard


@dataclass
class StepResult:
    loss: float
    """Mean over the trained tokens of the global batch."""
    grad_norm: float
    """Global norm before clipping."""
    skipped: str | None
    """Why the update was not made."""
    seconds_by: dict[str, float]


def to_device(arrays: Arrays, device: torch.device) -> dict[str, torch.Tensor]:
    """int32 arrays [B, S] -> int64 tensors on the device."""
    return {name: torch.from_numpy(values.copy()).to(device, non_blocking=True).long() for name, values in arrays.items()}


def seed_micro_batch(seed: int, step: int, micro_batch: int) -> None:
    """Seeds dropout by what is computed, not by who computes it: the same masks at any world size and after any resume."""
    torch.manual_seed(((seed * 1_000_003 + step) * 65_537 + micro_batch) & (2**64 - 1))


def train_step(
    engine: Engine, micro_batches: list[Arrays], *, trained_tokens: int, learning_rate: float, max_grad_norm: float,
    loss_chunk_tokens: int, seed: int, step: int, guard: Guard, device: torch.device,
) -> StepResult:  # fmt: skip
    """Forward, backward and update on this rank's micro-batches. `trained_tokens` counts those of the global batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    begin = time.perf_counter()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for turn, arrays in enumerate(micro_batches):
        seed_micro_batch(seed, step, turn * world + rank)
        loss = loss_sum(engine.model, to_device(arrays, device), loss_chunk_tokens) / max(1, trained_tokens)
        engine.backward(loss)
        total += loss.detach()
    dist.all_reduce(total)
    forward_backward = time.perf_counter()
    norm = engine.grad_norm()
    result_loss, result_norm = total.item(), norm.item()
    skipped = guard.judge(result_loss, result_norm)
    if skipped is None:
        engine.update(norm, max_grad_norm, learning_rate)
    else:
        engine.forget()
    seconds = {"forward_backward": forward_backward - begin, "optimizer": time.perf_counter() - forward_backward}
    return StepResult(result_loss, result_norm, skipped, seconds)


@torch.no_grad()
def validation_sums(model: nn.Module, arrays: Arrays, loss_chunk_tokens: int, device: torch.device) -> tuple[float, int]:
    """(summed loss, trained tokens) of one micro-batch."""
    trained = int((arrays["labels"] >= 0).sum())
    return loss_sum(model, to_device(arrays, device), loss_chunk_tokens).item(), trained
