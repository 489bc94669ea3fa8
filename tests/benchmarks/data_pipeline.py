"""The whole pipeline on one and on four parts of the same texts: tokens/s, peak memory of the processes, nothing spilled.

    python tests/benchmarks/data_pipeline.py TEXTS.jsonl [TOKENIZER_FOLDER] [MEGABYTES]

Ray gets two CPUs and an object store of 300 MB; the second run reads four times as much. CPU seconds are those of the
stages' units; the rest of the wall time is Ray's start, and waiting where the machine has other work.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import ray
from ray._private.internal_api import memory_summary

from data_pipelines.build import prepare
from raytune70b.config import compose


def first(source: Path, megabytes: float, target: Path) -> Path:
    left = megabytes * 1e6
    with source.open("rb") as lines, target.open("wb") as out:
        for line in lines:
            left -= len(line)
            if left < 0:
                break
            out.write(line)
    return target


def run(texts: Path, tokenizer: str, data: Path) -> None:
    started = time.monotonic()
    manifest = prepare(compose([
        f"data.inputs=[{texts}]", f"data.path={data}", f"data.tokenizer={tokenizer}", "data.seq_len=2048", "data.shard_mb=8", "data.file_blocks=2048",
        "data.keep_work=true", "run.quiet=true",
    ]))  # fmt: skip
    wall = time.monotonic() - started
    tokens = manifest.lineage["tokens"]["in"]
    results = {p.parent.name.split("-")[0]: [] for p in sorted((data / "work").glob("*/*.json"))}
    for path in sorted((data / "work").glob("*/*.json")):
        results[path.parent.name.split("-")[0]].append(json.loads(path.read_text()))
    cpu = {stage: sum(u["cpu_seconds"] for u in units) for stage, units in results.items()}
    peak = max(u["peak_mb"] for units in results.values() for u in units)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    spilled = [line for line in memory_summary(stats_only=True).splitlines() if "spilled" in line.lower()]
    print(f"{texts.stat().st_size / 1e6:.0f} MB: {tokens:,} tokens, {wall:.1f} s wall, {tokens / wall:,.0f} tokens/s; {sum(cpu.values()):.1f} CPU s, "
          f"{tokens / sum(cpu.values()):,.0f} tokens/CPU s", {k: round(v, 1) for k, v in cpu.items()})  # fmt: skip
    print(f"  peak memory: a worker {peak:.0f} MB, the driver {own:.0f} MB; spilled: {spilled or 'nothing'}", flush=True)


def main() -> None:
    source, tokenizer = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "train"
    megabytes = float(sys.argv[3]) if len(sys.argv) > 3 else 60.0
    ray.init(address="local", num_cpus=2, object_store_memory=300_000_000, log_to_driver=False, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        for part in (megabytes / 4, megabytes):
            run(first(source, part, Path(folder) / f"{part:.0f}.jsonl"), tokenizer, Path(folder) / f"data{part:.0f}")
    ray.shutdown()


if __name__ == "__main__":
    main()
