"""A table of published runs, row by row, as workloads that the plan's model can predict - or with the reason why it cannot.

Columns as in tests/data/published_throughput.csv. What a row's columns leave open is read from its note by rules that hold for
every source: adapter rank and targets, autocast, fused kernels, network, out-of-memory. No rule names a source.
"""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from raytune70b.config import UserError
from raytune70b.planning.hardware import HardwareError, Machine, find_gpu
from raytune70b.planning.parameters import ModelShape, model_shape
from raytune70b.planning.workload import ATTENTION_LAYERS, Workload

ARCHITECTURES = Path(__file__).with_name("architectures.json")
COLUMNS = ("source", "model", "params_b", "gpu", "n_gpus", "method", "parallelism", "precision", "seq_len", "micro_batch")
SHARDING = {"fsdp": "fsdp1", "fsdp2": "fsdp2", "zero3": "zero3", "single": "single"}


class TableError(UserError):
    """A table that is not one of published runs."""


@dataclass(frozen=True)
class Run:
    """One row that can be modelled. None where the row states nothing; memory in bytes.

    memory_is_allocated: the figure is torch's own count, without the driver's context and the allocator's reserve.
    """

    line: int
    source: str
    method: str
    workload: Workload
    machine: Machine
    tokens_per_s_per_gpu: float | None
    memory: float | None
    memory_is_allocated: bool
    out_of_memory: bool


@dataclass(frozen=True)
class Left:
    """One row that cannot be modelled, and why."""

    line: int
    source: str
    reason: str


def read_table(path: Path) -> tuple[list[Run], list[Left]]:
    """All rows of a table: those that can be modelled and those that cannot. Raises TableError."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: cannot be read ({error})") from error
    if not rows:
        raise TableError(f"{path}: holds no rows")
    missing = [column for column in COLUMNS if column not in rows[0]]
    if missing:
        raise TableError(f"{path}: has no column {missing[0]!r}; it takes {', '.join(COLUMNS)} and as many more as are known")
    runs, left = [], []
    for line, row in enumerate(rows, start=2):
        try:
            runs.append(_run(line, row))
        except (Unmodelled, HardwareError, ValueError) as reason:
            left.append(Left(line, row["source"], str(reason)))
    return runs, left


class Unmodelled(Exception):
    """Why a row cannot be modelled."""


def _number(row: dict[str, str], column: str) -> float | None:
    text = row.get(column) or ""
    return float(text) if text else None


def _run(line: int, row: dict[str, str]) -> Run:
    note, engine = row.get("note", ""), row["parallelism"]
    if engine not in SHARDING:
        stage = (
            "its ZeRO stage is not stated"
            if engine.startswith("zero")
            else "Megatron or tensor, pipeline or context parallelism, which this trainer does not run"
        )
        raise Unmodelled(stage)
    if row["precision"] not in ("bf16", "fp16"):
        raise Unmodelled(f"precision {row['precision']}, which this trainer does not compute in")
    seq_len, micro = _number(row, "seq_len"), _number(row, "micro_batch")
    if seq_len is None or micro is None:
        raise Unmodelled("sequence length or micro-batch is not stated")
    speed, memory = _number(row, "tokens_per_s_per_gpu"), _number(row, "peak_mem_gib_per_gpu")
    out_of_memory = bool(re.search(r"\bOOM\b", note)) and speed is None
    if speed is None and memory is None and not out_of_memory:
        raise Unmodelled("neither throughput nor memory is stated")
    gpus = int(float(row["n_gpus"]))
    workload = Workload(
        model=_shape(row),
        method=row["method"],
        world_size=gpus,
        seq_len=int(seq_len),
        micro_batch_size=int(micro),
        micro_batches=int(_number(row, "grad_accum") or 1),
        activation_checkpointing=row.get("activation_ckpt") or "full",  # fine-tuning scripts turn it on
        sharding="single" if gpus == 1 else SHARDING[engine],
    )
    return Run(
        line,
        row["source"],
        row["method"],
        _from_note(workload, row, note),
        _machine(row, gpus, note),
        speed,
        None if memory is None else memory * 2**30,
        "torch max allocated" in note,
        out_of_memory,
    )


@cache
def _architectures() -> dict[str, ModelShape]:
    return {name: model_shape(config) for name, config in json.loads(ARCHITECTURES.read_text()).items()}


def _shape(row: dict[str, str]) -> ModelShape:
    shape = _architectures().get(row["model"])
    if shape is None:
        raise Unmodelled(f"model {row['model']}: not in {ARCHITECTURES.name}")
    stated = float(row["params_b"]) * 1e9
    if abs(shape.parameters / stated - 1) > 0.12:
        raise Unmodelled(
            f"model {row['model']}: {ARCHITECTURES.name} counts {shape.parameters / 1e9:.2f} B parameters, the row states {row['params_b']}"
        )
    return shape


def _from_note(workload: Workload, row: dict[str, str], note: str) -> Workload:
    """What only the note tells."""
    sharded = workload.sharding != "single"
    autocast = re.search(r"autocast flag=(True|False)", note)
    pure = autocast is not None and (autocast[1] == "False" or not sharded)  # one process trains the 16-bit weights it loaded
    framework = (re.search(r"framework=([\w-]+)", note) or ["", ""])[1]
    fused = "liger" in framework or "foak" in framework or row.get("compiled") == "yes"
    attention_only = re.search(r"LoRA r(\d+) on (attention|q,k,v,o)", note)
    return replace(
        workload,
        precision="bf16" if pure else "bf16_mixed",
        fused_norm=fused or not workload.model.gated or workload.sharding == "fsdp2",
        fused_mlp=fused,
        logit_bytes=_logit_bytes(workload, framework),
        loss_chunk_tokens=1024 if "liger" in framework else 0,
        optimizer="torch" if workload.sharding in ("single", "fsdp1") else "adamw",
        lora_rank=int(attention_only[1]) if attention_only else 64,
        lora_targets=ATTENTION_LAYERS if attention_only else (),
    )


def _logit_bytes(workload: Workload, framework: str) -> float:
    """Bytes per token and vocabulary entry of the losses in use: MPT's own code runs flash-attention's fused loss on 16-bit logits and
    their gradient; fused fp32 losses hold logits and gradient; torchtitan's plain one the 16-bit and fp32 logits and the log-softmax;
    transformers of the time one more copy, shifted by a token."""
    if workload.model.model_type == "mpt":
        return 4.0
    if "foak" in framework:
        return 8.0
    return 10.0 if workload.sharding == "fsdp2" else 14.0


def _machine(row: dict[str, str], gpus: int, note: str) -> Machine:
    gpu = find_gpu(row["gpu"])
    nodes = int(_number(row, "n_nodes") or math.ceil(gpus / 8))
    family = gpu.name.split("-")[0]
    ports = re.search(rf"(\d+)x(\d+)GbE \({family}\)", note)
    network = int(ports[1]) * float(ports[2]) * 1e9 / 8 / (gpus / nodes) if ports else gpu.network
    return Machine(gpu, nodes, gpus // nodes, network, host_memory=2e12, disk=1e13, storage_bandwidth=1e9)
