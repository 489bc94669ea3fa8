"""Texts for the data benchmarks, and how their results are shown.

BENCH_TEXTS names a .jsonl file of {"text": ...} rows, BENCH_TOKENIZER a Hugging Face tokenizer folder; without them the sample
corpus, enlarged, and a tokenizer trained on it stand in. All data benchmarks in one run then work on the same texts.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pyarrow.parquet as pq

from data_pipelines.sample_corpus import write_sample

T = TypeVar("T")


MEGABYTES = float(os.environ.get("BENCH_MEGABYTES", "60"))


def file_of_texts(megabytes: float = MEGABYTES) -> Path:
    """The file of BENCH_TEXTS, or one made of contracts and statutes."""
    if "BENCH_TEXTS" in os.environ:
        return Path(os.environ["BENCH_TEXTS"])
    folder = Path(tempfile.mkdtemp())
    write_sample(folder / "sample", scale=megabytes / 1.8)
    path = folder / "texts.jsonl"
    rows = [line for line in (folder / "sample" / "contracts.jsonl").read_bytes().splitlines() if line.startswith(b'{"id"') and line.endswith(b'"}')]
    statutes = pq.read_table(folder / "sample" / "statutes.parquet", columns=["text"]).column("text").to_pylist()
    path.write_bytes(b"\n".join([r for r in rows if b"\xff" not in r] + [json.dumps({"text": t}, ensure_ascii=False).encode() for t in statutes]) + b"\n")
    return path


def tokenizer_folder(texts: Path) -> str:
    """The folder of BENCH_TOKENIZER, or that of a tokenizer of 32,000 ids trained on the first of the texts."""
    if "BENCH_TOKENIZER" in os.environ:
        return os.environ["BENCH_TOKENIZER"]
    from data_pipelines.tokens import train_tokenizer

    folder = tempfile.mkdtemp()
    train_tokenizer(_some(texts, 10), 32_000).save_pretrained(folder)
    return folder


def shown(values: Sequence[float], digits: int = 2) -> str:
    """median (least to most)"""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def texts_of(path: Path, megabytes: float | None = None) -> list[str]:
    """The texts, the first so many megabytes of them."""
    return list(_some(path, megabytes))


def _some(path: Path, megabytes: float | None) -> Iterator[str]:
    left = (megabytes or 1e9) * 1e6
    with path.open("rb") as lines:
        for line in lines:
            if left <= 0:
                return
            text = json.loads(line)["text"]
            left -= len(text)
            yield text


def cpu_seconds(action: Callable[[], T]) -> tuple[float, T]:
    """CPU seconds of this process, all threads: what other work on the machine hardly changes."""
    started = time.process_time()
    result = action()
    return time.process_time() - started, result
