"""An independent trainer for comparisons: one process, plain transformers, peft and torch, full logits, no sharding.

It shares no code with the package: models come from `AutoModelForCausalLM.from_pretrained`, documents of a packed block run
one by one through the model, the loss is `F.cross_entropy` on all logits, the optimizer is torch's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 2},
    "llama_tied": {"model_type": "llama", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 8, "head_dim": 16},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    "gemma3": {"model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "final_logit_softcapping": 5.0},
    "olmo2": {"model_type": "olmo2", "num_key_value_heads": 2},
    "phi3": {"model_type": "phi3", "num_key_value_heads": 2, "pad_token_id": 0},
    "mixtral": {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}
"""Tiny models of each architecture: 64 wide, 2 layers."""


def config_values(name: str) -> dict[str, Any]:
    """The values of `model.config` for a tiny model."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
    return {"tie_word_embeddings": False, **shape, **SIZES[name]}


def write_model(folder: Path, name: str, vocab_size: int, seed: int = 0, dtype: torch.dtype = torch.float32, spread: float = 0.1, max_shard_size: str = "5GB") -> Path:
    """Saves a tiny model with random weights as a Hugging Face folder; a large spread makes logits differ clearly."""
    values = config_values(name)
    config = AutoConfig.for_model(values.pop("model_type"), vocab_size=vocab_size, bos_token_id=None, eos_token_id=None, **{"pad_token_id": None, **values})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * spread + (parameter if parameter.ndim == 1 else 0))
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def batches(steps: int, rows: int, seq_len: int, vocab_size: int, seed: int = 1) -> list[dict[str, Tensor]]:
    """Global batches of packed rows: two documents and padding, part of the tokens untrained."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(steps):
        ids = torch.randint(1, vocab_size, (rows, seq_len), generator=generator)
        labels, positions = torch.full_like(ids, -100), torch.zeros_like(ids)
        for row in range(rows):
            cut = int(torch.randint(3, seq_len - 6, (), generator=generator))
            end = int(torch.randint(cut + 3, seq_len + 1, (), generator=generator))
            for first, last in ((0, cut), (cut, end), (end, seq_len)):
                positions[row, first:last] = torch.arange(last - first)
            for first, last in ((0, cut), (cut, end)):
                labels[row, first : last - 1] = ids[row, first + 1 : last]
            labels[row, cut : cut + int(torch.randint(0, end - cut, (), generator=generator))] = -100  # an untrained prompt
            ids[row, end:] = 0
        made.append({"input_ids": ids, "labels": labels, "position_ids": positions})
    return made


def documents(batch: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(input_ids, labels) of each document of a batch, alone."""
    found = []
    for ids, labels, positions in zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True):
        starts = (positions == 0).nonzero().flatten().tolist()
        found += [(ids[a:b], labels[a:b]) for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]
    return found


def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").train()


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross entropy over the trained tokens of a batch, every document alone in its forward pass."""
    total = torch.zeros(())
    for ids, labels in documents(batch):
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
        total = total + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return total / (batch["labels"] != -100).sum()


def optimizer(model: nn.Module, learning_rate: float, weight_decay: float, eps: float = 1e-8, betas: tuple[float, float] = (0.9, 0.95)) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=learning_rate, betas=betas, eps=eps)


def train(model: nn.Module, data: list[dict[str, Tensor]], learning_rate: float, weight_decay: float, max_norm: float) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of every step, and the gradients of the first step by parameter name."""
    opt, losses, first = optimizer(model, learning_rate, weight_decay), [], {}
    for step, batch in enumerate(data):
        loss = mean_loss(model, batch)
        loss.backward()
        if step == 0:
            first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, first
