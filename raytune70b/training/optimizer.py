"""Optimizers."""

from __future__ import annotations

import torch
from torch import nn

from raytune70b.schema import Config


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Trained parameters in two groups: matrices with weight decay, vectors (norms, biases) without."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """The optimizer of `train.optimizer`; the loop sets each group's `lr` before every step."""
    train = config.train
    groups = parameter_groups(model, train.weight_decay)
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=(train.beta1, train.beta2), eps=train.eps, fused=True)
