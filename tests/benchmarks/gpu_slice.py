"""One GPU, a slice of Llama-70B: tokens/s, MFU and memory of what can be switched, in one table.

    python tests/benchmarks/gpu_slice.py            on a GPU: hidden 8192, as many layers as fit, sequence 4,096
    python tests/benchmarks/gpu_slice.py --toy      on a CPU, 64 wide: shows that it runs, its figures mean nothing

Each row builds the model of `raytune70b.model` on a mesh of one worker, makes two steps (forward, backward, norm, clip, update) to
warm up and times three more. A row holds one block of two documents, as packed data does. MFU counts 6N operations
a token for full fine-tuning and 4N for adapters (N without the embedding table), plus 6 * layers * hidden * seq_len / 2 for
causal attention within documents of half the block; recomputing is not counted. The peak is that of raytune70b/planning/gpus.csv.
Memory is torch's allocated peak in the steps. The stall is the copy of the trained state to host memory, the second time: the first
makes the buffers. Rows are printed as they come; one that fails says why, and the others go on; none begins after LIMIT_S.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from raytune70b.config import compose
from raytune70b.model.attention import choose_attention
from raytune70b.model.dryrun import random_batch
from raytune70b.model.load import build_model
from raytune70b.model.loss import loss_sum
from raytune70b.model.shard import make_mesh
from raytune70b.planning.hardware import HardwareError, find_gpu
from raytune70b.schema import Config
from raytune70b.training.optimizer import build_optimizer
from raytune70b.training.staging import HostCopy
from raytune70b.training.state import local_tensor, state_dict

LIMIT_S = 150.0
"""No row begins after that: imports come before it, and the longest row takes about a minute."""
WARM = 2
STEPS = 3
CARDS = {
    "H100 80GB HBM3": "H100-SXM-80GB", "H100 PCIe": "H100-PCIe-80GB", "H100 NVL": "H100-NVL-94GB", "H200": "H200-SXM-141GB", "H200 NVL": "H200-NVL-141GB",
    "A100-SXM4-80GB": "A100-SXM-80GB", "A100-SXM4-40GB": "A100-SXM-40GB",
}  # fmt: skip
"""CUDA's names of cards, without the maker, and those of gpus.csv."""
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
    """(method, what differs from chunked loss, attention auto, no compile); the most telling first."""
    plain = [("full", {}), ("lora", {}), ("qlora", {})]
    flash = gpu and choose_attention(compose([]).model, torch.device("cuda")) != "sdpa"
    changes = [{"model.loss_chunk_tokens": "0"}, {"model.attention": "sdpa" if flash else "eager"}, {"model.compile": "true"}]
    return plain + [("full", change) for change in changes]


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
        speed, gigabytes, stall = run_case(config, shape, device, with_stall=not changes)
    except torch.OutOfMemoryError:
        return (*head, "out of memory", "-", "-", "-")
    except Exception as error:  # the machine may be ours once: the other rows count
        traceback.print_exc()
        return (*head, f"failed: {type(error).__name__}", "-", "-", "-")
    flops = flops_per_token(shape, method, layers) * speed
    mfu = f"{100 * flops / peak_flops:.1f}" if peak_flops else "-"
    return (*head, f"{speed:,.0f}", mfu, f"{gigabytes:.1f}" if gigabytes else "-", "-" if stall is None else f"{stall:.2f}")


def flops_per_token(shape: Slice, method: str, layers: int) -> float:
    weights = layers * shape.layer_weights + shape.hidden * shape.vocab
    return (6 if method == "full" else 4) * weights + 6.0 * layers * shape.hidden * shape.seq_len / 2


def run_case(config: Config, shape: Slice, device: torch.device, with_stall: bool) -> tuple[float, float, float | None]:
    """(tokens/s, peak GB or 0 on a CPU, seconds of the copy to host memory)."""
    model = build_model(config, shape.vocab, make_mesh(1, 1, device.type), device)
    optimizer = build_optimizer(model, config)
    batch = random_batch(shape.vocab, shape.seq_len, 1, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = 0.0
    for step in range(WARM + STEPS):
        if step == WARM:
            start = now(device)
        (loss_sum(model, batch, config.model.loss_chunk_tokens) / shape.seq_len).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    speed = STEPS * shape.seq_len / (now(device) - start)
    gigabytes = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    return speed, gigabytes, stall_seconds(state_dict(model, optimizer), device) if with_stall else None


def stall_seconds(state: dict, device: torch.device) -> float | None:
    """The second of two copies: the first makes the host buffers, once in a run. None where host memory does not suffice."""
    size = sum(local_tensor(tensor).nbytes for part in state.values() for tensor in part.values())
    if size > 0.7 * psutil.virtual_memory().available:
        return None
    copy = HostCopy(device.type)
    copy.of(state)
    start = now(device)
    copy.of(state)
    seconds = now(device) - start
    copy.close()
    return seconds


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def line(row: tuple[str, ...]) -> str:
    return f"| {' | '.join(row)} |"


def card(gpu: bool) -> tuple[str, float, float | None]:
    """(name, bytes of memory, peak operations a second where the card is known)."""
    if not gpu:
        return "CPU, toy size", 1e9, None
    name = torch.cuda.get_device_name(0)
    short = name.removeprefix("NVIDIA ")
    try:
        peak = find_gpu(CARDS.get(short, short)).peak_flops
    except HardwareError:
        peak = None
    return name, torch.cuda.get_device_properties(0).total_memory, peak


def main(toy: bool) -> list[tuple[str, ...]]:
    """Prints the table row by row, and returns its rows."""
    gpu, begin = torch.cuda.is_available() and not toy, time.monotonic()
    device, shape = (torch.device("cuda", 0), LLAMA_70B) if gpu else (torch.device("cpu"), TOY)
    name, memory, peak = card(gpu)
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {datetime.date.today()}, sequence {shape.seq_len}, hidden {shape.hidden}\n")
    print(f"{line(COLUMNS)}\n|{'---|' * len(COLUMNS)}", flush=True)
    rows = []
    for method, changes in cases(gpu):
        if time.monotonic() - begin > LIMIT_S:
            print(f"{method} {changes}: not run, {LIMIT_S:.0f} s are over")
            continue
        rows.append(measure(shape, method, changes, device, memory, peak))
        print(line(rows[-1]), flush=True)
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="64 wide, on the CPU")
    arguments = parser.parse_args()
    if not arguments.toy and not torch.cuda.is_available():
        parser.error("there is no GPU; --toy runs the same code at toy size")
    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        found = main(arguments.toy)
        dist.destroy_process_group()
    raise SystemExit(any(row[5].startswith("failed") for row in found))
