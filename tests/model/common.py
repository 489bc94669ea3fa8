"""The package's side of comparisons: builds, trains and inspects a sharded model inside a process of `tests.distributed`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raytune70b.config import compose
from raytune70b.model.load import build_model
from raytune70b.model.loss import loss_sum
from raytune70b.model.shard import make_mesh
from raytune70b.schema import Config
from raytune70b.training.engine import Fsdp
from raytune70b.training.guards import Guard
from raytune70b.training.optimizer import build_optimizer
from raytune70b.training.step import train_step

CPU = torch.device("cpu")
VOCAB = 96


def config_for(folder: Path | str, method: str = "full", precision: str = "fp32", *overrides: str) -> Config:
    """A run on a saved model with chunks that do not divide the tokens."""
    return compose([f"model.path={folder}", f"model.method={method}", f"model.precision={precision}", "model.loss_chunk_tokens=10", *overrides])


def build(config: Config, vocab_size: int = VOCAB) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build_model(config, vocab_size, make_mesh(dist.get_world_size(), config.model.replicate, "cpu"), CPU)
    return model, build_optimizer(model, config)


def full(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def micro_batches(batch: dict[str, Tensor], micro: int = 2) -> list[dict[str, np.ndarray]]:
    """This rank's micro-batches: number a goes to rank a % world_size; where one is missing, rows of zero weight."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = [{name: t[i : i + micro].numpy() for name, t in batch.items()} for i in range(0, len(batch["labels"]), micro)]
    while len(parts) % world:
        parts.append({**parts[0], "labels": np.full_like(parts[0]["labels"], -100)})
    return parts[rank::world]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, data: list[dict[str, Tensor]], first: int = 0) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    results = []
    for step, batch in enumerate(data, start=first):
        result = train_step(
            Fsdp(model, optimizer), micro_batches(batch), trained_tokens=int((batch["labels"] != -100).sum()), learning_rate=config.train.learning_rate,
            max_grad_norm=config.train.max_grad_norm, loss_chunk_tokens=config.model.loss_chunk_tokens, seed=0, step=step, guard=Guard(0.0, 5), device=CPU,
        )  # fmt: skip
        results.append((result.loss, result.grad_norm))
    return results


def gradients(model: nn.Module, config: Config, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole gradient of the global mean loss by parameter name; forgotten by the model afterwards."""
    trained = int((batch["labels"] != -100).sum())
    for arrays in micro_batches(batch):
        tensors = {name: torch.from_numpy(a).long() for name, a in arrays.items()}
        (loss_sum(model, tensors, config.model.loss_chunk_tokens) / trained).backward()
    found = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found
