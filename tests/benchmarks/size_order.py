"""What the order, the proof and the dealing cost as blocks, steps and workers grow. Promised: 0.5 ms a step at 30 million blocks, exponents up to 1.1.

usage: python tests/benchmarks/size_order.py

CPU seconds, which other work on the machine hardly touches. An exponent is the slope of log cost over log size between the
smallest and the largest size: 1 is linear. Data sets are made-up manifests, runs are made-up ledgers and journals.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from data_texts import table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from raytune70b.blocks.order import Order, share  # noqa: E402
from raytune70b.blocks.stream import ARRAYS, Feed, Reader, row_groups  # noqa: E402
from raytune70b.storage import Folder  # noqa: E402
from tests.size import made  # noqa: E402


def exponent(sizes: list[int], costs: list[float]) -> float:
    return math.log(costs[-1] / costs[0]) / math.log(sizes[-1] / sizes[0])


def order_costs(blocks: int) -> tuple[float, float, float]:
    """(ms a step, of 2,000 in mid-epoch; ms to the first of them, the epoch's windows included; seconds for a whole epoch)."""
    order = Order(row_groups(made.manifest(blocks), "train"), 17, made.WINDOW, made.GLOBAL_BATCH)
    begin, middle = time.process_time(), order.steps_per_epoch // 2
    next(order.step_ids(middle, middle + 1))
    first = time.process_time()
    count = sum(1 for _ in order.step_ids(middle, min(middle + 2000, order.steps_per_epoch)))
    steps = time.process_time()
    for _ in Order(order.row_groups, 17, made.WINDOW, made.GLOBAL_BATCH).step_ids(0, order.steps_per_epoch):
        pass
    return (steps - first) / count * 1e3, (first - begin) * 1e3, time.process_time() - steps


def proof_costs(steps: int) -> tuple[float, float, float]:
    """(CPU seconds, seconds by the clock, peak MB) of jobs/verify.py on a run of so many steps in one epoch."""
    with tempfile.TemporaryDirectory() as temporary:
        data, runs = Folder(Path(temporary) / "data"), Folder(Path(temporary) / "runs")
        blocks = made.manifest(steps * made.GLOBAL_BATCH)
        data.write("manifest.json", blocks.to_json().encode())
        made.run(runs / "long", blocks, steps)
        command = [sys.executable, str(ROOT / "jobs/verify.py"), "run.name=long", f"run.path={runs.uri}", f"data.path={data.uri}"]
        watched = f"import resource, subprocess, json; code = subprocess.call({command!r}, stdout=subprocess.DEVNULL); u = resource.getrusage(resource.RUSAGE_CHILDREN); print(json.dumps([code, u.ru_utime + u.ru_stime, u.ru_maxrss]))"
        begin = time.monotonic()
        code, seconds, peak = json.loads(subprocess.run([sys.executable, "-c", watched], capture_output=True, text=True, check=True).stdout)
        if code != 0:
            raise ValueError(f"a sound run of {steps} steps was not proved")
        return seconds, time.monotonic() - begin, peak / 1024


def dealing_costs(world: int, steps: int = 64) -> tuple[float, float]:
    """(ms a step to make the blocks of all workers, ms a step of one worker to know what it must have got); four rows a worker.

    A window is one row group, so that every block holds one step: of several small steps in a block the price is shared.
    """
    blocks = made.manifest(1_000_000, seq_len=8)
    order = Order(row_groups(blocks, "train"), 17, 1, 4 * world)

    class NoFiles(Reader):
        def rows(self, ids: np.ndarray) -> dict[str, np.ndarray]:
            return {name: np.zeros((len(ids), 8), np.int32) for name in ARRAYS}

    feed = Feed(NoFiles(Folder("/nowhere"), blocks, "train"), order, 1, order.steps_per_epoch)
    next(order.step_ids(0, 1))
    begin = time.process_time()
    sum(1 for _ in feed.read(0, steps, world))
    dealt = time.process_time()
    for _, ids in order.step_ids(0, steps):
        share(ids, 3, world, 1, 4)
    return (dealt - begin) / steps * 1e3, (time.process_time() - dealt) / steps * 1e3


def part(head: tuple[str, ...], sizes: list[int], costs: list[tuple[float, ...]], judged: tuple[int, ...], digits: int = 3) -> dict[str, float]:
    """Prints a table of costs by size with the exponents of the judged columns."""
    slopes = {head[n + 1]: exponent(sizes, [c[n] for c in costs]) for n in range(len(head) - 1)}
    rows = [(f"{size:,}", *(f"{value:,.{digits}f}" for value in cost)) for size, cost in zip(sizes, costs, strict=True)]
    print(table(head, [*rows, ("exponent", *(f"{slopes[name]:.2f}" for name in head[1:]))]) + "\n")
    return {head[n + 1]: slopes[head[n + 1]] for n in judged}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    blocks, steps, worlds = [300_000, 3_000_000, 30_000_000], [2_350, 23_500, 235_000], [16, 128, 1024]
    print(f"the order; row groups of {made.ROW_GROUP} blocks, {made.WINDOW} in a window, global batch {made.GLOBAL_BATCH}; CPU time\n")
    by_blocks = [order_costs(n) for n in blocks]
    judged = part(("blocks", "ms a step", "ms to the first step", "s for all steps of an epoch"), blocks, by_blocks, (0, 1, 2))
    print(f"jobs/verify.py; global batch {made.GLOBAL_BATCH}, one epoch, a checkpoint every 1,000 steps, journal included\n")
    judged |= part(("steps", "CPU s", "s by the clock", "peak MB"), steps, [proof_costs(n) for n in steps], (0,), 1)
    print("dealing a step out; four rows a worker, a block a worker and step\n")
    judged |= part(("workers", "ms a step, all workers' rows", "ms a step, one worker's check"), worlds, [dealing_costs(n) for n in worlds], (0, 1))
    late = [f"{name}: {value:.2f}" for name, value in judged.items() if value > 1.1]
    if late or by_blocks[-1][0] > 0.5:
        raise SystemExit(f"missed: {late}, {by_blocks[-1][0]:.2f} ms a step at {blocks[-1]:,} blocks")


if __name__ == "__main__":
    main()
