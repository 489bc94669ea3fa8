"""Texts for the data benchmarks: a .jsonl file of {"text": ...} rows that you name, else the sample corpus, enlarged."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pyarrow.parquet as pq

from data_pipelines.sample_corpus import write_sample

T = TypeVar("T")


def file_of_texts(megabytes: float = 60) -> Path:
    """The file on the command line, or one made of contracts and statutes."""
    if len(sys.argv) > 1:
        return Path(sys.argv[1])
    folder = Path(tempfile.mkdtemp())
    write_sample(folder / "sample", scale=megabytes / 1.8)
    path = folder / "texts.jsonl"
    rows = [line for line in (folder / "sample" / "contracts.jsonl").read_bytes().splitlines() if line.startswith(b'{"id"') and line.endswith(b'"}')]
    statutes = pq.read_table(folder / "sample" / "statutes.parquet", columns=["text"]).column("text").to_pylist()
    path.write_bytes(b"\n".join([r for r in rows if b"\xff" not in r] + [json.dumps({"text": t}, ensure_ascii=False).encode() for t in statutes]) + b"\n")
    return path


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
