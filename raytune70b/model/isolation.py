"""Whether the documents of a packed block are kept apart: seen in a gradient, on the model and the kernels that train.

Convolutions and recurrences carry a state from one document into the next unless they are told where documents begin, and some
architectures build their attention mask without it. Nothing fails then: the model only learns from what it must not see. No list
of names would stay true, so every start of a worker group asks the model itself. It costs a forward and a backward pass of 16 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raytune70b.config import UserError
from raytune70b.model.dryrun import random_batch
from raytune70b.model.loss import loss_sum

LENGTH = 8
"""Tokens of each of the two documents."""


def check_documents(model: Any, vocab_size: int, loss_chunk_tokens: int, device: torch.device) -> None:
    """Raises UserError where the loss of a block's second document depends on its first. All workers call it together.

    A gradient that must be zero is exactly zero; the logits themselves would differ by rounding in a mixture, whose experts
    multiply the tokens of all documents together. Leaves nothing behind but what a forward pass leaves gathered.
    """
    batch = random_batch(vocab_size, 2 * LENGTH, 1, device)
    batch["labels"][:, :LENGTH] = -100
    embedded: list[Tensor] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, args, output: embedded.append(output.requires_grad_()))
    try:
        with torch.compiler.set_stance("force_eager"):  # a length that training never has would make compiled layers general
            loss = loss_sum(model.eval(), batch, loss_chunk_tokens)
            (gradient,) = torch.autograd.grad(loss, embedded[:1])
    finally:
        hook.remove()
        model.train()
    if gradient.reshape(2 * LENGTH, -1)[:LENGTH].any():
        raise UserError(
            f"model: the documents of a block would see each other: {model.config.model_type} with attention {model.config._attn_implementation} "
            "does not heed where one ends (position_ids); take another architecture, or another model.attention"
        )
