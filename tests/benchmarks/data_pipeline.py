"""The whole pipeline on a quarter of the texts and on all of them: tokens/s, and memory, which must not grow with the corpus.

usage: python tests/benchmarks/data_pipeline.py      (texts, tokenizer: see data_texts.py)

Each run is a driver of its own with a Ray of two CPUs and an object store of 300 MB. Memory is the most that one process held,
of all workers and of the driver. CPU seconds are those of the stages' units; the rest of the wall-clock is the driver's, Ray's
scheduling, and waiting where the machine has other work. Ray's own start is left out.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from data_texts import MEGABYTES, file_of_texts, table, tokenizer_folder


def first(source: Path, megabytes: float, target: Path) -> Path:
    left = megabytes * 1e6
    with source.open("rb") as lines, target.open("wb") as out:
        for line in lines:
            left -= len(line)
            if left < 0:
                break
            out.write(line)
    return target


def run(texts: str, tokenizer: str, data: str) -> dict[str, Any]:
    """One run in this process."""
    import ray
    from ray._private.internal_api import memory_summary

    from data_pipelines.build import prepare
    from raytune70b.config import compose

    ray.init(address="local", num_cpus=2, object_store_memory=300_000_000, log_to_driver=False, include_dashboard=False)
    started = time.monotonic()
    manifest = prepare(compose([
        f"data.inputs=[{texts}]", f"data.path={data}", f"data.tokenizer={tokenizer}", "data.seq_len=2048", "data.shard_mb=4", "data.file_blocks=2048",
        "data.keep_work=true", "run.quiet=true",
    ]))  # fmt: skip
    wall = time.monotonic() - started
    cpu: dict[str, float] = defaultdict(float)
    peak = 0.0
    for path in sorted((Path(data) / "work").glob("*/*.json")):
        unit = json.loads(path.read_text())
        cpu[path.parent.name.split("-")[0]] += unit["cpu_seconds"]
        peak = max(peak, unit["peak_mb"])
    spilled = [line for line in memory_summary(stats_only=True).splitlines() if "spilled" in line.lower()]
    ray.shutdown()
    return {
        "megabytes": Path(texts).stat().st_size / 1e6, "tokens": manifest.lineage["tokens"]["in"], "wall_s": wall, "cpu_s": cpu, "worker_peak_mb": peak,
        "driver_peak_mb": int(re.findall(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[0]) / 1024, "spilled": " ".join(spilled),
    }  # fmt: skip


def main() -> None:
    source = file_of_texts()
    tokenizer, runs = tokenizer_folder(source), []
    with tempfile.TemporaryDirectory() as folder:
        for part in (MEGABYTES / 4, MEGABYTES):
            texts = first(source, part, Path(folder) / f"{part:.0f}.jsonl")
            command = [sys.executable, __file__, "--one", str(texts), tokenizer, f"{folder}/data{part:.0f}"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr[-2000:])
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    head = ("MB", "tokens", "wall s", "tokens/s", "tokens per CPU s", "a worker's peak MB", "the driver's", "spilled", "CPU s by stage")
    print(table(head, [(
        f"{r['megabytes']:.0f}", f"{r['tokens']:,}", f"{r['wall_s']:.1f}", f"{r['tokens'] / r['wall_s']:,.0f}", f"{r['tokens'] / sum(r['cpu_s'].values()):,.0f}",
        f"{r['worker_peak_mb']:.0f}", f"{r['driver_peak_mb']:.0f}", r["spilled"] or "nothing", ", ".join(f"{k} {v:.1f}" for k, v in r["cpu_s"].items()),
    ) for r in runs]))  # fmt: skip
    print(json.dumps(runs))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(run(*sys.argv[2:])))
    else:
        main()
