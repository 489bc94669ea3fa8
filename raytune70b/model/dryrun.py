"""One full-length micro-batch before the loop: out-of-memory, compile errors and a loss that does not fit the model show in
the first minute, not after the data has started. It costs one forward and backward pass; nothing is trained by it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raytune70b.config import UserError
from raytune70b.model.loss import logits_error, loss_sum
from raytune70b.schema import Config

TOLERANCE = {"fp32": 1e-4, "bf16_mixed": 0.03, "bf16": 0.03}
"""Relative difference of logits that rounding explains."""


@dataclass(frozen=True)
class DryRun:
    seconds: float
    """Of one forward and backward pass, the second one: the first compiles."""
    first_seconds: float
    peak_bytes: int
    """Device memory at the worst moment; 0 on a CPU."""


def dry_run(model: nn.Module, config: Config, vocab_size: int, seq_len: int, micro_batch_size: int, device: torch.device, plan: str = "") -> DryRun:
    """Runs two random micro-batches of full length through forward and backward and forgets their gradients.

    All workers call it together, with the optimizer's states in memory already. plan: a line of the memory plan for the
    message. Raises UserError when memory does not suffice, or when the loss does not fit the model.
    """
    batch = random_batch(vocab_size, seq_len, micro_batch_size, device)
    short = {name: values[:1, :16] for name, values in batch.items()}
    try:
        with torch.compiler.set_stance("force_eager"):  # a length that training never has would make compiled layers general
            error = logits_error(model.eval(), short)
        if not error <= TOLERANCE[config.model.precision]:
            raise UserError(f"model: its logits differ from the loss's by {error:.2g} of their size; this architecture changes them in a way that is not supported")
        model.train()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        times = [_timed_pass(model, config, batch, device) for _ in range(2)]
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as failure:
        if isinstance(failure, RuntimeError) and not isinstance(failure, torch.OutOfMemoryError) and "allocate memory" not in str(failure):
            raise
        raise UserError(advice(config, seq_len, micro_batch_size, str(failure), plan)) from failure
    finally:
        model.train()
        for parameter in model.parameters():
            parameter.grad = None
    return DryRun(times[1], times[0], torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0)


def random_batch(vocab_size: int, seq_len: int, rows: int, device: torch.device) -> dict[str, Tensor]:
    """Random rows of two documents each, all trained: packing takes the path (and the mask's memory) that the data takes."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (rows, seq_len), generator=generator)
    half = seq_len // 2
    positions = torch.cat([torch.arange(half), torch.arange(seq_len - half)]).expand(rows, -1)
    return {name: t.to(device) for name, t in {"input_ids": ids, "labels": ids.roll(-1, 1), "position_ids": positions.contiguous()}.items()}


def _timed_pass(model: nn.Module, config: Config, batch: dict[str, Tensor], device: torch.device) -> float:
    start = time.perf_counter()
    (loss_sum(model, batch, config.model.loss_chunk_tokens) * 0.0).backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def advice(config: Config, seq_len: int, micro_batch_size: int, failure: str, plan: str = "") -> str:
    """What to change when memory does not suffice, what costs least first; settings that are made already are left out."""
    model, train = config.model, config.train
    options = [
        ("model.loss_chunk_tokens=1024", model.loss_chunk_tokens == 0 or model.loss_chunk_tokens > 1024),
        ("model.activation_checkpointing=full", model.activation_checkpointing != "full"),
        (f"train.micro_batch_size={max(1, micro_batch_size // 2)}", micro_batch_size > 1),
        ("train.optimizer=adamw_8bit", train.optimizer != "adamw_8bit" and model.method == "full" and model.precision != "fp32"),
        ("model.precision=bf16", model.precision != "bf16" and model.method == "full"),
        ("model.gradients=bf16", model.precision == "bf16" and model.gradients != "bf16"),
        ("model.offload=optimizer", model.offload == "none" and model.method == "full"),
        ("model.offload=params", model.offload != "params"),
        ("model.method=lora", model.method == "full"),
        ("more workers (cluster.workers)", True),
    ]
    what = ", then ".join(text for text, useful in options if useful)
    first = failure.strip().splitlines()[0]
    return f"train.micro_batch_size: {micro_batch_size} blocks of {seq_len} tokens do not fit in memory ({first}); {plan + '; ' if plan else ''}try {what}"
