"""What a job costs beside the arithmetic: tokens/s of `jobs/finetune.py` against loops that do nothing but train.

    python tests/benchmarks/training_step.py [TURNS, default 3] [--small] [--workers N ...]

Each turn trains the same random Llama, on the same blocks in the same order, with N workers of one thread, in four ways: the job (Ray Train
and Ray Data, ledger, watch and tracking at their defaults); its model and step in a bare loop with the batches in memory; a bare FSDP2
loop of plain transformers and torch; and Hugging Face's Trainer with DDP (its FSDP trains unsharded on a CPU). The bar holds
against the faster of the two bare loops where the workers leave cores to everything else, as GPUs do (the first default); where they
take all cores (the second), Ray's own idle processes, about fifteen that each poll a hundred times a second, slow them. All compute in bf16 on fp32 weights with fused
AdamW and clip at 1. Timed from the WARM-th step on, by the wall-clock between two steps' ends; nothing is saved or validated
in between. Losses are compared, so that all do the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests import distributed
from tests.running import ROOT

GLOBAL, MICRO, WARM = 4, 2, 4
LEARNING_RATE, VOCAB = 1e-3, 4096
SMALL = {"hidden": 64, "seq_len": 64, "steps": 12}
LARGE = {"hidden": 256, "seq_len": 512, "steps": 20}
BAR = 0.97
OWN, BARE, TRAINER = "its step, bare", "plain FSDP2, bare", "HF Trainer, DDP"


def shape(size: dict[str, int]) -> dict[str, Any]:
    hidden = size["hidden"]
    return {"model_type": "llama", "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": False}  # fmt: skip


def job_settings(size: dict[str, int], folder: Path) -> list[str]:
    values = [f"model.config.{key}={str(value).lower()}" for key, value in shape(size).items()]
    return [
        *values, f"data.path={folder}/data", f"run.path={folder}/runs", f"train.steps={size['steps']}", f"train.global_batch_size={GLOBAL}",
        f"train.micro_batch_size={MICRO}", f"train.learning_rate={LEARNING_RATE}", "train.warmup_steps=0", "train.schedule=constant",
        "validation.at_start=false", "validation.every=0", "validation.max_blocks=2", "checkpoint.every=100000", "checkpoint.at_end=false",
        "cluster.dashboard=false", "cluster.address=local", f"cluster.workers=[{size['workers']},{size['workers']}]",
    ]  # fmt: skip


def write_data(size: dict[str, int], folder: Path) -> list[dict[str, np.ndarray]]:
    """Writes the blocks, and returns the global batch of every step as the job will see it."""
    from raytune70b.blocks.order import Order
    from raytune70b.blocks.stream import Reader, row_groups
    from raytune70b.config import compose
    from raytune70b.storage import Folder
    from tests.conftest import write_blocks

    data = Folder(folder / "data")
    manifest = write_blocks(data, {"train": [size["steps"] * GLOBAL], "validation": [2]}, seq_len=size["seq_len"], group=16, vocab=VOCAB)
    config = compose(job_settings(size, folder))
    order = Order(row_groups(manifest, "train"), config.run.seed, config.data.shuffle_window, GLOBAL)
    reader = Reader(data, manifest, "train")
    return [reader.rows(ids) for _, ids in order.step_ids(0, size["steps"])]


def time_job(size: dict[str, int], folder: Path, turn: int) -> tuple[list[float], list[float]]:
    """(the times at which the steps ended, their losses)."""
    from raytune70b.storage import Folder
    from raytune70b.tracking.journal import read_journal

    name = f"turn{turn}"
    command = [sys.executable, str(ROOT / "jobs" / "finetune.py"), *job_settings(size, folder), f"run.name={name}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the job failed:\n{done.stdout}\n{done.stderr}")
    steps = [record for record in read_journal(Folder(folder / "runs") / name) if record["kind"] == "step"]
    return [s["time"] for s in steps], [s["loss"] for s in steps]


def make_model(size: dict[str, int], dtype: Any = None) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = shape(size)
    config = AutoConfig.for_model(values.pop("model_type"), vocab_size=VOCAB, **values)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype or torch.float32).train()


def bare_loop(rank: int, world: int, size: dict[str, int], batches: list[dict[str, np.ndarray]]) -> tuple[list[float], list[float]]:
    """FSDP2 as its tutorial has it: no checks, no records, no data pipeline; the loss of a global batch is divided by its trained tokens."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, mesh = make_model(size), init_device_mesh("cpu", (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in [*model.model.layers, model.model.embed_tokens, model.lm_head, model]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ends, losses = [], []
    for batch in batches:
        trained, total = int((batch["labels"] >= 0).sum()), torch.zeros(())
        for first in range(rank * MICRO, GLOBAL, world * MICRO):
            part = {name: torch.from_numpy(values[first : first + MICRO]).long() for name, values in batch.items()}
            logits = model(input_ids=part["input_ids"], position_ids=part["position_ids"], use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), part["labels"].flatten(), reduction="sum") / trained
            (loss * world).backward()  # FSDP averages
            total += loss.detach()
        dist.all_reduce(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
        ends.append(time.time())
    return ends, losses


def own_loop(rank: int, world: int, size: dict[str, int], batches: list[dict[str, np.ndarray]], settings: list[str]) -> tuple[list[float], list[float]]:
    """The package's model, optimizer and step, and nothing around them."""
    import torch

    from raytune70b.config import compose
    from tests.model import common

    config = compose(settings)
    model, optimizer = common.build(config, VOCAB)
    ends, losses = [], []
    for step, batch in enumerate(batches):
        tensors = {name: torch.from_numpy(values) for name, values in batch.items()}
        losses += [loss for loss, _ in common.train(model, optimizer, config, [tensors], first=step)]
        ends.append(time.time())
    return ends, losses


def hugging_face(rank: int, world: int, size: dict[str, int], batches: list[dict[str, np.ndarray]], folder: str) -> tuple[list[float], list[float]]:
    """transformers' Trainer over DDP with the same rows in memory."""
    import torch
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    # accelerate asks for an address, though the process group is there, and would take all cores for each worker
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    rows = []
    for batch in batches:
        for n in range(GLOBAL):
            row = {name: torch.from_numpy(values[n]).long() for name, values in batch.items()}
            rows.append({**row, "labels": row["labels"].roll(1)})  # the model shifts them itself
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.time())

    arguments = TrainingArguments(
        folder, per_device_train_batch_size=MICRO, gradient_accumulation_steps=GLOBAL // (world * MICRO), max_steps=size["steps"], learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant", adam_beta2=0.95, weight_decay=0.1, optim="adamw_torch_fused", max_grad_norm=1.0, bf16=True, use_cpu=True, ddp_backend="gloo",
        ddp_find_unused_parameters=False, logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True, train_sampling_strategy="sequential", remove_unused_columns=False,
    )  # fmt: skip
    trainer = Trainer(make_model(size), arguments, train_dataset=rows, callbacks=[Clock()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return ends, []


def rate(ends: list[float], size: dict[str, int]) -> tuple[float, float]:
    """Tokens/s from the WARM-th step to the last, and by the median step: other work on the machine disturbs it less."""
    tokens = GLOBAL * size["seq_len"]
    intervals = [b - a for a, b in pairwise(ends[WARM - 1 :])]
    return tokens * len(intervals) / sum(intervals), tokens / statistics.median(intervals)


def compare(turns: int, size: dict[str, int], folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Tokens/s (in the whole, by the median step) by way and turn; the order within a turn alternates."""
    batches = write_data(size, folder)
    rates: dict[str, list[tuple[float, float]]] = {"job": [], OWN: [], BARE: [], TRAINER: []}
    for turn in range(turns):
        losses = {}
        for way in list(rates)[:: 1 if turn % 2 else -1]:
            if way == "job":
                ends, losses[way] = time_job(size, folder, turn)
            elif way == OWN:
                ends, losses[way] = distributed.run(own_loop, size["workers"], size, batches, job_settings(size, folder))[0]
            elif way == BARE:
                ends, losses[way] = distributed.run(bare_loop, size["workers"], size, batches)[0]
            else:
                ends, _ = distributed.run(hugging_face, size["workers"], size, batches, str(folder))[0]
            assert len(ends) == size["steps"], f"{way}: {len(ends)} steps of {size['steps']}"
            rates[way].append(rate(ends, size))
            print(f"turn {turn}: {way}: {rates[way][-1][0]:,.0f} tokens/s, {rates[way][-1][1]:,.0f} by the median step", file=sys.stderr, flush=True)
        assert abs(losses["job"][-1] - losses[OWN][-1]) < 1e-3, f"the job's last loss is {losses['job'][-1]}, that of its step alone {losses[OWN][-1]}"
        assert abs(losses["job"][0] - losses[BARE][0]) < 0.1, f"the job's first loss is {losses['job'][0]}, the plain loop's {losses[BARE][0]}"
    return rates


def show(rates: dict[str, list[tuple[float, float]]], size: dict[str, int], turns: int) -> dict[str, float]:
    """Prints a table; returns the job's speed by each way's."""
    print(f"\nhidden {size['hidden']}, 4 layers, sequence {size['seq_len']}, global batch {GLOBAL}, {size['workers']} workers, {os.cpu_count()} cores, {turns} turns\n")
    print("| way | tokens/s | job against it | lowest - highest | by the median step |\n|---|---|---|---|---|")
    found = {}
    for way, ours in rates.items():
        whole, typical = ([job[n] / other[n] for job, other in zip(rates["job"], ours, strict=True)] for n in (0, 1))
        found[way] = statistics.median(whole)
        speed = statistics.median(r[0] for r in ours)
        print(f"| {way} | {speed:,.0f} | {found[way]:.3f} | {min(whole):.3f} - {max(whole):.3f} | {statistics.median(typical):.3f} |")
    return found


def main() -> int:
    cores = os.cpu_count() or 2
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("turns", type=int, nargs="?", default=3)
    parser.add_argument("--small", action="store_true", help="a minute instead of eight")
    parser.add_argument("--workers", type=int, nargs="*", default=[max(cores // 2, 1), cores])
    args = parser.parse_args()
    ratios = []
    for workers in args.workers:
        size = {**(SMALL if args.small else LARGE), "workers": workers}
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            rates = compare(args.turns, size, Path(folder))
        ratios.append(show(rates, size, args.turns))
        print(json.dumps({"benchmark": "training_step", "size": size, "tokens_per_s": rates, "ratios": ratios[-1]}))
    return 0 if min(ratios[0][OWN], ratios[0][BARE]) >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
