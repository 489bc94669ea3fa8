"""Attention: which kernel runs, and how the documents of a packed block are kept apart.

The batch says where documents begin by `position_ids` that restart at 0. `sdpa` and `eager` get a block-diagonal mask that
transformers derives from them; it does so only without an `attention_mask` and without a cache, so neither is ever passed.
FlashAttention-2 detects packing for a single row only, so its rows are joined into one and their bounds passed explicitly:
without that, documents of a batch with more than one row would see each other and no error would be raised.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils import is_flash_attn_2_available

from raytune70b import schema
from raytune70b.config import UserError

FLASH = "flash_attention_2"


def choose_attention(model: schema.Model, device: torch.device) -> str:
    """The attention implementation for `model.attention` on a device. Raises UserError when the one asked for cannot run."""
    wanted = model.attention
    obstacle = _flash_obstacle(model, device)
    if wanted == "auto":
        return "sdpa" if obstacle else FLASH
    if wanted == FLASH and obstacle:
        raise UserError(f"model.attention: is {FLASH}, but {obstacle}; use auto or sdpa")
    return wanted


def kernels(model: schema.Model, device: torch.device) -> list[str]:
    """The attention implementations to try, in order: with `auto` an architecture that lacks the best one takes the next. Raises UserError."""
    chosen = choose_attention(model, device)
    return [FLASH, "sdpa", "eager"][[FLASH, "sdpa", "eager"].index(chosen) :] if model.attention == "auto" else [chosen]


def repeat_backward() -> None:
    """Has FlashAttention-2's backward pass add in a fixed order, so that a resumed run gets the same bits; else it adds as its blocks end.

    It costs a part of attention's backward pass, and memory for a few more copies of one layer's query gradient in fp32. transformers reads
    the variable at every call; FLASH_ATTENTION_DETERMINISTIC=0 in the workers' environment leaves it off.
    """
    os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")


def fallback(model: schema.Model, device: torch.device, built: Any) -> str | None:
    """What to tell where `model.attention: auto` would have taken a faster kernel than the one that the model was built with."""
    used = built.config._attn_implementation
    if model.attention != "auto" or used == FLASH or (wanted := choose_attention(model, device)) == used:
        return None
    return f"attention is {used}: transformers does not run this architecture with {wanted}"


def _flash_obstacle(model: schema.Model, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"the device is {device.type}"
    if not is_flash_attn_2_available():
        return "flash-attn is not installed (pip install --no-build-isolation 'flash-attn>=2.8', with torch there already)"
    if model.precision == "fp32":
        return "model.precision is fp32 and it computes in 16 bits"
    return None


def decoder_inputs(batch: dict[str, Tensor], implementation: str) -> dict[str, Any]:
    """Arguments of the decoder for a packed batch of `input_ids` and `position_ids` [B, S].

    For FlashAttention-2 the rows are joined to [1, B * S]; the order of tokens stays that of `labels.flatten()`.
    """
    input_ids, position_ids = batch["input_ids"], batch["position_ids"]
    if implementation != FLASH:
        return {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
    bounds = document_bounds(position_ids)
    longest = position_ids.shape[1]  # an upper bound is enough, and a constant spares a synchronisation and recompilations
    return {
        "input_ids": input_ids.reshape(1, -1), "position_ids": position_ids.reshape(1, -1), "use_cache": False,
        "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


def document_bounds(position_ids: Tensor) -> Tensor:
    """Starts of the documents in the joined rows, then the number of tokens: int32 [documents + 1]."""
    flat = position_ids.flatten()
    starts = (flat == 0).nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([flat.numel()])]).to(torch.int32)


def supports_flash(model_class: type, hf: PretrainedConfig) -> None:
    """Raises UserError when an architecture has no FlashAttention-2 path."""
    if not getattr(model_class, "_supports_flash_attn", False):
        raise UserError(f"model.attention: {FLASH} is not available for {hf.model_type}; use sdpa")
