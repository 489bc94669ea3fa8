"""Buffers that no checkpoint holds: rotary tables, embedding scales, causal masks. They are computed anew when a model gets its memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from raytune70b.config import UserError
from raytune70b.model.weights import full_parameters, owned_modules


def restore_buffers(model: Any, device: torch.device) -> None:
    """Computes the buffers that `to_empty` has left as garbage, as transformers does; in fp32 where they are not whole numbers.

    Raises UserError when an architecture leaves one uncomputed.
    """
    for name, module, owner in owned_modules(model):
        if not any(True for _ in module.named_buffers(recurse=False)):
            continue
        try:
            first, again = (_computed(module, owner, device, filling) for filling in (0, 1))
        except (AttributeError, TypeError, NotImplementedError, RuntimeError) as error:
            raise UserError(f"model: {model.config.model_type} cannot be trained: transformers does not compute the buffers of {name} ({error})") from error
        for key, buffer in again.items():
            saved = key not in module._non_persistent_buffers_set and not buffer.is_floating_point()
            if not saved and not torch.equal(first[key], buffer):  # NaN, or what it was filled with
                raise UserError(f"model: {model.config.model_type} cannot be trained: transformers does not compute its buffer {name}.{key}")


def _computed(module: nn.Module, owner: Any, device: torch.device, filling: int) -> dict[str, Tensor]:
    """The module's own buffers as its model computes them; those that it does not compute are NaN, or `filling` where that cannot be."""
    for key, buffer in module.named_buffers(recurse=False):
        module._buffers[key] = torch.full_like(buffer, float("nan") if buffer.is_floating_point() else filling, device=device)
    with full_parameters(module, "meta"), torch.no_grad():
        owner._init_weights(module)
    return dict(module.named_buffers(recurse=False))
