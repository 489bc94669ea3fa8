"""One GPU, a slice of Llama-70B: tokens/s, MFU and memory of what can be switched, in one table.

    python tests/benchmarks/gpu_slice.py            on a GPU: hidden 8192, as many layers as fit, sequence 4,096
    python tests/benchmarks/gpu_slice.py --toy      on a CPU, 64 wide: shows that it runs, its figures mean nothing

Each row builds the model of `raytune70b.model` on a mesh of one worker, warms up for one step and times three. MFU counts 6N
operations a token for full fine-tuning and 4N for adapters (N without the embedding table), plus 6 * layers * hidden *
seq_len for causal attention, recomputing not counted; the peak is that of raytune70b/planning/gpus.csv. Memory is torch's allocated peak. The stall is the copy of model and optimizer to host memory.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import tempfile
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from raytune70b.config import compose
from raytune70b.model.attention import choose_attention
from raytune70b.model.dryrun import random_batch
from raytune70b.model.load import build_model
from raytune70b.model.loss import loss_sum
from raytune70b.model.shard import make_mesh
from raytune70b.planning.hardware import HardwareError, find_gpu
from raytune70b.schema import Config
from raytune70b.training.optimizer import build_optimizer
from raytune70b.training.state import state_dict

STEPS = 3
COLUMNS = ("method", "layers", "attention", "loss", "compile", "tokens/s", "MFU %", "peak GB", "stall s")


@dataclass(frozen=True)
class Slice:
    """A width of the model; `bytes_a_weight` by method says how many layers fit."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    seq_len: int
    most_layers: int

    @property
    def layer_weights(self) -> int:
        head = self.hidden // self.heads
        return 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_heads * head + 3 * self.hidden * self.inner

    def layers(self, method: str, memory: float) -> int:
        """Layers that fit beside embedding, head and activations; full is counted with fp32 weights and bf16 moments."""
        weight, ends = {"full": (14.0, 14.0), "lora": (2.0, 2.0), "qlora": (4.25 / 8, 2.0)}[method]
        room = 0.7 * memory - ends * 2 * self.hidden * self.vocab
        return max(1, min(self.most_layers, int(room / (weight * self.layer_weights))))


LLAMA_70B = Slice(8192, 28672, 64, 8, 128256, 4096, most_layers=8)
TOY = Slice(64, 128, 4, 2, 512, 64, most_layers=2)


def cases(gpu: bool) -> list[tuple[str, dict[str, str]]]:
    """(method, what differs from chunked loss, attention auto, no compile)."""
    variations = [{}, {"model.loss_chunk_tokens": "0"}, {"model.attention": "sdpa" if gpu else "eager"}, {"model.compile": "true"}]
    return [("full", v) for v in variations] + [("lora", {}), ("qlora", {})]


def config_of(shape: Slice, method: str, layers: int, changes: dict[str, str]) -> Config:
    values = {
        "hidden_size": shape.hidden, "intermediate_size": shape.inner, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "num_hidden_layers": layers, "max_position_embeddings": shape.seq_len, "tie_word_embeddings": "false",
    }  # fmt: skip
    settings = {"model.activation_checkpointing": "full", "model.loss_chunk_tokens": "1024", "train.optimizer": "adamw_bf16", **changes}
    pairs = [*(f"model.config.{k}={v}" for k, v in values.items()), *(f"{k}={v}" for k, v in settings.items())]
    return compose([f"model.method={method}", "model.precision=bf16_mixed", *pairs])


def measure(shape: Slice, method: str, changes: dict[str, str], device: torch.device, memory: float, peak_flops: float | None) -> tuple[str, ...]:
    """One row of the table; a case that cannot run says why instead of a figure."""
    layers = shape.layers(method, memory)
    config = config_of(shape, method, layers, changes)
    loss = f"chunks of {config.model.loss_chunk_tokens}" if config.model.loss_chunk_tokens else "full logits"
    head = (method, str(layers), choose_attention(config.model, device), loss, "yes" if config.model.compile else "no")
    try:
        speed, gigabytes, stall = run_case(config, shape, device)
    except torch.OutOfMemoryError:
        return (*head, "out of memory", "-", "-", "-")
    flops = flops_per_token(shape, method, layers) * speed
    mfu = f"{100 * flops / peak_flops:.1f}" if peak_flops else "-"
    return (*head, f"{speed:,.0f}", mfu, f"{gigabytes:.1f}" if gigabytes else "-", f"{stall:.2f}")


def flops_per_token(shape: Slice, method: str, layers: int) -> float:
    weights = layers * shape.layer_weights + shape.hidden * shape.vocab
    return (6 if method == "full" else 4) * weights + 6.0 * layers * shape.hidden * shape.seq_len


def run_case(config: Config, shape: Slice, device: torch.device) -> tuple[float, float, float]:
    """(tokens/s, peak GB or 0 on a CPU, seconds of the copy to host memory)."""
    model = build_model(config, shape.vocab, make_mesh(1, 1, device.type), device)
    optimizer = build_optimizer(model, config)
    batch = random_batch(shape.vocab, shape.seq_len, 1, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = 0.0
    for step in range(1 + STEPS):
        if step == 1:
            start = now(device)
        (loss_sum(model, batch, config.model.loss_chunk_tokens) / shape.seq_len).backward()
        optimizer.step()
        optimizer.zero_grad()
    speed = STEPS * shape.seq_len / (now(device) - start)
    gigabytes = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    return speed, gigabytes, stall_seconds(state_dict(model, optimizer), device)


def stall_seconds(state: dict, device: torch.device) -> float:
    """The second of two copies: the first makes the host buffers, once in a run."""
    gpu = device.type == "cuda"
    stager = DefaultStager(StagingOptions(use_pinned_memory=gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=gpu))
    stager.stage(state)
    start = now(device)
    stager.stage(state)
    seconds = now(device) - start
    stager.close()
    return seconds


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def table(rows: list[tuple[str, ...]], title: str) -> str:
    lines = [title, "", f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def main(toy: bool) -> str:
    """Runs every case that fits and returns the table, which it also prints."""
    gpu = torch.cuda.is_available() and not toy
    device, shape = (torch.device("cuda", 0), LLAMA_70B) if gpu else (torch.device("cpu"), TOY)
    name = torch.cuda.get_device_name(0) if gpu else "CPU, toy size"
    memory = torch.cuda.get_device_properties(0).total_memory if gpu else 1e9
    try:
        peak = find_gpu(name.removeprefix("NVIDIA ")).peak_flops if gpu else None
    except HardwareError:
        peak = None
    rows = []
    for method, changes in cases(gpu):
        rows.append(measure(shape, method, changes, device, memory, peak))
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()
    title = f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {datetime.date.today()}, sequence {shape.seq_len}, hidden {shape.hidden}"
    text = table(rows, title)
    print(text)
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="64 wide, on the CPU")
    arguments = parser.parse_args()
    if not arguments.toy and not torch.cuda.is_available():
        parser.error("there is no GPU; --toy runs the same code at toy size")
    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        main(arguments.toy)
        dist.destroy_process_group()
