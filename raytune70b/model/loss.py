"""Cross entropy summed over trained tokens, without the full logits.

Full logits of one 4,096-token sequence at a vocabulary of 128,256 are 2.1 GB in fp32, and plain autograd keeps three such
tensors. Here the output head runs over `chunk_tokens` tokens at a time and computes the gradient of a chunk while its logits
are at hand, so one fp32 buffer of chunk_tokens x vocabulary is all that ever exists (plus an fp32 sum for the head's own
gradient where it is trained and there is more than one chunk). The price: nothing; the head's matrix products are those of
the plain loss. Value and gradients equal the plain loss to rounding. Gradients of gradients are refused.

Under FSDP2 the loss runs inside the root's and the head's forward hooks (`attach_loss`), so the head's weight is gathered.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PretrainedConfig

from raytune70b.model.attention import decoder_inputs

IGNORED = -100
"""The label of a token that is not trained."""


@dataclass(frozen=True)
class LogitShape:
    """What a model does with the head's output: logits = cap * tanh(scale * output / cap); a cap of 0 is none."""

    scale: float = 1.0
    cap: float = 0.0

    @classmethod
    def of(cls, hf: PretrainedConfig) -> LogitShape:
        """Read from the names that transformers uses: Cohere's logit_scale, Granite's logits_scaling, Gemma's soft cap."""
        text = hf.get_text_config()
        scale = float(getattr(text, "logit_scale", None) or 1.0) / float(getattr(text, "logits_scaling", None) or 1.0)
        return cls(scale, float(getattr(text, "final_logit_softcapping", None) or 0.0))

    def apply(self, output: Tensor) -> Tensor:
        logits = output.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    def backward_(self, gradient: Tensor, logits: Tensor | None) -> Tensor:
        """Gradient by the head's output, in place, from that by the logits; `logits` is needed with a cap."""
        if self.cap and logits is not None:
            gradient.mul_(1 - (logits / self.cap) ** 2)
        return gradient.mul_(self.scale) if self.scale != 1.0 else gradient


def loss_sum(model: nn.Module, batch: dict[str, Tensor], chunk_tokens: int) -> Tensor:
    """The sum of the cross entropy over the trained tokens of one micro-batch: an fp32 scalar.

    batch: `input_ids`, `labels` (shifted: labels[:, t] is the target of position t, -100 untrained) and `position_ids`
    (restart at 0 in each document), int64 [B, S]. chunk_tokens: tokens whose logits exist at once; 0 is all of them.
    """
    return model.packed_loss(batch, chunk_tokens)  # type: ignore[operator]


@torch.no_grad()
def logits_error(model: nn.Module, batch: dict[str, Tensor]) -> float:
    """Relative difference between the logits that the loss is made of and the model's own: large where a model does to its
    logits what `LogitShape` does not know."""
    return float(model.logits_error(batch))  # type: ignore[operator]


def attach_loss(model: nn.Module) -> None:
    """Gives a causal language model the methods behind `loss_sum` and `logits_error`; call it before `fully_shard`, then `register_loss`."""
    shape = LogitShape.of(model.config)  # type: ignore[arg-type]

    def head_loss(head: nn.Module, hidden: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
        linear = trained_head(head)
        return linear_cross_entropy(hidden, linear.weight, linear.bias, labels, chunk_tokens, shape)

    def packed_loss(self: Any, batch: dict[str, Tensor], chunk_tokens: int) -> Tensor:
        inputs = decoder_inputs(batch, self.config._attn_implementation)
        hidden = self.get_decoder()(**inputs).last_hidden_state
        return self.get_output_embeddings().head_loss(hidden.flatten(0, 1), batch["labels"].flatten(), chunk_tokens)

    def logits_error(self: Any, batch: dict[str, Tensor]) -> Tensor:
        inputs = decoder_inputs(batch, self.config._attn_implementation)
        theirs = type(self).forward(self, **inputs).logits.float()
        ours = shape.apply(self.get_output_embeddings()(self.get_decoder()(**inputs).last_hidden_state))
        return (ours - theirs).norm() / theirs.norm()

    head = model.get_output_embeddings()  # type: ignore[operator]
    head.head_loss = types.MethodType(head_loss, head)
    model.packed_loss = types.MethodType(packed_loss, model)  # type: ignore[assignment]
    model.logits_error = types.MethodType(logits_error, model)  # type: ignore[assignment]


def register_loss(model: nn.Module) -> None:
    """Tells FSDP2 that the loss methods are forward passes: parameters are gathered when they run."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    register_fsdp_forward_method(model, "packed_loss")
    register_fsdp_forward_method(model, "logits_error")
    register_fsdp_forward_method(model.get_output_embeddings(), "head_loss")  # type: ignore[operator]


def trained_head(head: nn.Module) -> Any:
    """The linear layer that runs: peft keeps a trained copy of it beside the original."""
    copies = getattr(head, "modules_to_save", None)
    return head if copies is None else copies["default"]


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk_tokens: int, shape: LogitShape | None = None
) -> Tensor:
    """Summed cross entropy of `hidden` [N, H] through a head [V, H] against `labels` [N]; fp32 scalar."""
    shape = shape or LogitShape()
    if chunk_tokens == 0:
        return F.cross_entropy(shape.apply(F.linear(hidden, weight, bias)), labels, ignore_index=IGNORED, reduction="sum")
    if not torch.is_grad_enabled():  # a Function cannot tell: it always runs without
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    return _ChunkedLoss.apply(hidden, weight, bias, labels, chunk_tokens, shape)  # type: ignore[no-any-return]


class _ChunkedLoss(torch.autograd.Function):
    """Computes loss and gradients chunk by chunk in the forward pass; the backward pass scales them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: int, shape: LogitShape) -> Tensor:
        by_hidden, by_weight, by_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if by_hidden else None
        several = hidden.shape[0] > chunk  # rounding to 16 bits after every chunk would add up: sum those in fp32
        d_weight = torch.zeros_like(weight, dtype=torch.float32 if several else weight.dtype) if by_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if by_bias and bias is not None else None
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            loss, gradient = _chunk(hidden[part], weight, bias, labels[part], shape, any(ctx.needs_input_grad[:3]))
            total += loss
            if gradient is None:
                continue
            if d_bias is not None:
                d_bias += gradient.sum(0)
            gradient = gradient.to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(gradient, weight, out=d_hidden[part])
            if d_weight is not None and d_weight.dtype == hidden.dtype:
                d_weight.addmm_(gradient.T, hidden[part])
            elif d_weight is not None:
                d_weight += gradient.T @ hidden[part]
        ctx.gradients = [None if g is None or t is None else g.to(t.dtype) for g, t in ((d_hidden, hidden), (d_weight, weight), (d_bias, bias))]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss frees its gradients in the first backward pass; retain_graph does not keep them")
        gradients, ctx.gradients = ctx.gradients, None
        return (*(None if g is None else g.mul_(by_loss) for g in gradients), None, None, None)


def _chunk(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, shape: LogitShape, need_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Summed loss of a chunk and its gradient by the head's output, fp32 [chunk, V] in the buffer of the logits."""
    logits = shape.apply(F.linear(hidden, weight, bias))
    trained = labels != IGNORED
    target = labels.where(trained, 0).unsqueeze(1)
    picked = logits.gather(1, target).squeeze(1)
    kept = logits.clone() if shape.cap and need_gradient else None
    top = logits.max(dim=1, keepdim=True).values
    exponentials = logits.sub_(top).exp_()
    normaliser = exponentials.sum(dim=1, keepdim=True)
    loss = (normaliser.log().squeeze(1) + top.squeeze(1) - picked).where(trained, 0.0).sum()
    if not need_gradient:
        return loss, None
    probabilities = exponentials.div_(normaliser)
    probabilities.scatter_add_(1, target, probabilities.new_full((1, 1), -1.0).expand_as(target))
    gradient = probabilities.mul_(trained.unsqueeze(1))
    return loss, shape.backward_(gradient, kept)
