"""From "build the data" to the first batch, at 300,000 and at 30 million blocks. Promised: within twice; read tasks of less than 50 kB.

usage: python tests/benchmarks/size_first_batch.py [TURNS]

On a real local cluster of two workers' iterators, in turns, from the first step and from step 200,000 (of the larger one). The manifests are
made up and reading a row group gives zeros: what is measured is all but the disk, which reads one window in either case.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from data_texts import table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import ray  # noqa: E402
from ray import cloudpickle  # noqa: E402

from raytune70b.blocks.order import Order  # noqa: E402
from raytune70b.blocks.stream import ARRAYS, Feed, Reader, dataset, read_tasks, row_groups  # noqa: E402
from raytune70b.storage import Folder  # noqa: E402
from tests.size import made  # noqa: E402

WORKERS, SEQ_LEN = 2, 256


class Zeros(Reader):
    """A reader whose row groups hold zeros: no such data set lies on disk."""

    def rows(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return {name: np.zeros((len(ids), SEQ_LEN), np.int32) for name in ARRAYS}


def feed_of(blocks: int) -> Feed:
    made_up = made.manifest(blocks, seq_len=SEQ_LEN)
    order = Order(row_groups(made_up, "train"), 17, made.WINDOW, made.GLOBAL_BATCH)
    return Feed(Zeros(Folder("/nowhere"), made_up, "train"), order, 1, order.steps_per_epoch)


def first_batch(blocks: int, step: int) -> float:
    """Seconds; a new feed each time, as at the start of every worker group."""
    feed = feed_of(blocks)
    begin = time.monotonic()
    shards = dataset(feed, step, WORKERS).streaming_split(WORKERS, equal=False)

    @ray.remote(num_cpus=0)
    def first_step_of(shard: Any) -> int:
        return int(next(iter(shard.iter_batches(batch_size=None, batch_format="pyarrow"))).column("step")[0].as_py())

    steps = ray.get([first_step_of.remote(shard) for shard in shards])
    assert steps == [step] * WORKERS, steps
    return time.monotonic() - begin


def task_bytes(blocks: int) -> tuple[int, int]:
    """(read tasks, bytes of the largest one pickled)."""
    feed = feed_of(blocks)
    tasks = read_tasks(ray.put(feed), feed, 0, WORKERS)
    return len(tasks), max(len(cloudpickle.dumps(t)) for t in tasks)


def main() -> None:
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    ray.init(address="local", num_cpus=4, log_to_driver=False, include_dashboard=False, logging_level="error")
    cases = {"300,000 blocks": (300_000, 0), "30,000,000 blocks": (30_000_000, 0), "30,000,000 blocks, from step 200,000": (30_000_000, 200_000)}
    first_batch(1000, 0)  # starts the processes that all others find running
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(turns):
        for name, case in cases.items():
            seconds[name].append(first_batch(*case))
    base = seconds["300,000 blocks"]
    rows, worst, largest = [], 0.0, 0
    for name, (blocks, _) in cases.items():
        ratios = [a / b for a, b in zip(seconds[name], base, strict=True)]
        count, size = task_bytes(blocks)
        worst, largest = max(worst, statistics.median(ratios)), max(largest, size)
        rows.append((name, f"{statistics.median(seconds[name]):.2f}", f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} - {max(ratios):.2f}", str(count), f"{size:,}"))
    print(table(("data set", "first batch, s", "against the smallest", "lowest - highest", "read tasks", "bytes of the largest"), rows))
    ray.shutdown()
    if worst > 2 or largest > 50_000:
        raise SystemExit(f"missed: {worst:.2f} times the smallest, {largest:,} bytes")


if __name__ == "__main__":
    main()
