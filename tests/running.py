"""Runs the jobs as a user does: a process, its exit code, what it printed; and reads what a run left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from raytune70b.blocks.ledger import lineage
from raytune70b.storage import Folder
from raytune70b.training.checkpoint import newest

ROOT = Path(__file__).resolve().parent.parent
TINY = [
    "model.config.model_type=llama", "model.config.hidden_size=32", "model.config.intermediate_size=64", "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=2", "model.config.num_key_value_heads=2", "model.config.max_position_embeddings=512",
    "model.precision=fp32", "train.warmup_steps=4", "validation.at_start=false", "validation.every=0",
]  # fmt: skip
"""A model of 32 dimensions in fp32, for exact comparisons."""


def start_job(name: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen:
    """A job in a process group of its own; its output is text."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "jobs" / f"{name}.py"), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}, start_new_session=True,
    )  # fmt: skip


def run_job(name: str, *arguments: str, env: dict[str, str] | None = None, timeout: float = 240) -> tuple[int, str]:
    """(exit code, output)."""
    process = start_job(name, *arguments, env=env)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"jobs/{name}.py took longer than {timeout} s:\n{process.communicate()[0]}") from None
    return process.returncode, output


def wait_for(what: Callable[[], object], timeout: float = 120) -> None:
    """Waits until `what` is true."""
    end = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def committed(run: Path) -> list[dict]:
    """The committed optimizer steps of a run, from its ledger."""
    folder = Folder(run)
    cursor = newest(folder / "checkpoints")
    assert cursor is not None, f"{run} has no checkpoint"
    return lineage(folder / "ledger", cursor.ledger)[0].to_pylist()
