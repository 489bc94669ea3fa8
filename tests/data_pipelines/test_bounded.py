"""Memory while 15 and 60 MB of text go through the whole pipeline: the same for both, and nothing spilled from a small object store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data_pipelines.sample_corpus import write_sample
from data_pipelines.tokens import train_tokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DRIVER = """
import json, re, sys
import numpy as np, ray
from ray._private.internal_api import memory_summary
from data_pipelines.build import prepare
from raytune70b.config import compose

def spilled():
    return [line for line in memory_summary(stats_only=True).splitlines() if "Spilled" in line]

ray.init(address="local", num_cpus=2, object_store_memory=300_000_000, log_to_driver=False, include_dashboard=False)
manifest = prepare(compose(sys.argv[1:]))
peak, after_pipeline = int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]), spilled()
held = [ray.put(np.ones(100_000_000, np.uint8)) for _ in range(5)]
print(json.dumps({"tokens": manifest.lineage["tokens"]["in"], "peak_mb": peak / 1024, "spilled": after_pipeline, "spilled_by_500_mb": spilled()}))
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Rows of contracts and statutes, 62 MB."""
    folder = tmp_path_factory.mktemp("texts")
    write_sample(folder / "sample", scale=35)
    rows = [{"text": t} for t in pq.read_table(folder / "sample" / "statutes.parquet", columns=["text"]).column("text").to_pylist()]
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
    lines += [line for line in (folder / "sample" / "contracts.jsonl").read_bytes().splitlines() if line.startswith(b'{"id"') and b"\xff" not in line]
    path = folder / "texts.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.fixture(scope="module")
def tokenizer(texts, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    with texts.open() as lines:
        train_tokenizer((json.loads(line)["text"] for line in islice(lines, 2000)), 4000).save_pretrained(folder)
    return folder


def prepared(texts: Path, tokenizer: Path, data: Path) -> dict:
    """A run in processes of its own; the peaks of its driver and of its busiest worker, and what was spilled."""
    settings = [f"data.inputs=[{texts}]", f"data.path={data}", f"data.tokenizer={tokenizer}", "data.seq_len=512", "data.shard_mb=3", "data.keep_work=true", "run.quiet=true"]
    done = subprocess.run([sys.executable, "-c", DRIVER, *settings], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    found["worker_peak_mb"] = max(json.loads(p.read_text())["peak_mb"] for p in (data / "work").glob("*/*.json"))
    return found


@pytest.mark.timeout(600)
def test_nothing_is_spilled_and_memory_does_not_grow_with_the_corpus(texts, tokenizer, tmp_path):
    lines = texts.read_bytes().splitlines(keepends=True)
    part = tmp_path / "part.jsonl"
    part.write_bytes(b"".join(lines[::4]))
    assert texts.stat().st_size >= 60e6
    small, large = prepared(part, tokenizer, tmp_path / "small"), prepared(texts, tokenizer, tmp_path / "large")
    print(small, large, sep="\n")
    assert large["tokens"] > 3.5 * small["tokens"]
    assert large["spilled"] == small["spilled"] == [] and large["spilled_by_500_mb"], "Ray tells of spilling when there is some"
    for peak in ("peak_mb", "worker_peak_mb"):
        assert large[peak] < 1.1 * small[peak] + 20, (peak, small[peak], large[peak])
