"""The learning rate of every optimizer step, a pure function: resuming or another worker count cannot shift it.

PyTorch's schedulers carry a position of their own, which goes wrong when a run is resumed (pytorch/pytorch#60265) or the
worker count changes (huggingface/accelerate#2926).
"""

from __future__ import annotations

import math

from raytune70b.schema import Train


def learning_rate(train: Train, step: int, total_steps: int) -> float:
    """The rate for the optimizer step with this number, counted from 0: linear warm-up, then the schedule to `min_lr_ratio`."""
    warmup = min(train.warmup_steps, total_steps)
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    return train.learning_rate * decay(train.schedule, train.min_lr_ratio, (step - warmup) / max(1, total_steps - warmup))


def decay(shape: str, floor: float, progress: float) -> float:
    """The share of the peak rate at `progress` in [0, 1] of the time after the warm-up."""
    progress = min(1.0, max(0.0, progress))
    if shape == "constant":
        return 1.0
    falling = 0.5 * (1 + math.cos(math.pi * progress)) if shape == "cosine" else 1 - progress
    return floor + (1 - floor) * falling
