"""Seconds from a fault to the next trained step: here, with a plain TorchTrainer of default settings, and with torchrun.

usage: python tests/benchmarks/recovery.py [rounds, default 1]     (a few minutes a round)

Promise at tiny size: a worker killed <= 15 s, a node killed hard (W 4 -> 2) <= 30 s, a node that joins (W 2 -> 4) <= 15 s of
pause. On a busy machine only the ratios mean something: starting processes is most of what is measured.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from raytune70b.storage import Folder
from tests.benchmarks.recovery_torchrun import Agents
from tests.conftest import write_blocks
from tests.faults.fleet import ROOT, Fleet

PATIENCE_S = 240
FAULTS = ("worker killed, W 4", "node killed, W 4 -> 2", "worker killed, W 2", "node joined, W 2 -> 4")

Steps = Callable[[], list[dict[str, Any]]]


def wait(steps: Steps, world: int, since: float) -> float:
    """Waits for a step of `world` workers after the longest pause that began after `since`; returns the time of the step."""
    end = time.time() + PATIENCE_S
    while time.time() < end:
        found = [s["time"] for s in steps() if s["world_size"] == world and s["time"] > since]
        if len(found) > 3:
            return found[0]
        time.sleep(0.2)
    raise TimeoutError(f"no step of {world} workers in {PATIENCE_S} s")


def longest_pause(steps: Steps, since: float) -> float:
    times = sorted(s["time"] for s in steps() if s["time"] > since - 1)
    return max(b - a for a, b in itertools.pairwise(times))


def hurt(steps: Steps, victim: Callable[[], int], lose: Callable[[], None], join: Callable[[], None]) -> list[float]:
    """The four faults, one after the other; seconds without a step for each, infinite from the one on that a side did not get over."""
    def kill() -> None:
        os.kill(victim(), signal.SIGKILL)

    found = []
    for fault, world in ((kill, 4), (lose, 2), (kill, 2), (join, 4)):
        time.sleep(3)
        begin = time.time()
        fault()
        settled = time.time() + 2 if fault is kill else begin  # steps of the group that was killed do not count
        try:
            wait(steps, world, settled)
        except TimeoutError:
            return [*found, *[math.inf] * (len(FAULTS) - len(found))]
        time.sleep(2)
        found.append(longest_pause(steps, begin))
    return found


def ours(fleet: Fleet, folder: Path) -> list[float]:
    write_blocks(Folder(folder / "data"), {"train": [20_000], "validation": [16]}, seq_len=16, group=64)
    fleet.misbehave(pace=0.1)
    run = fleet.start("ours", folder, folder / "data", folder, "cluster.workers=[2,4]", "checkpoint.every=10", "validation.every=0",
                      "validation.max_blocks=4", "cluster.resize_check_s=5", "tracking.mlflow=null", "tracking.report=false", "run.quiet=true")  # fmt: skip
    try:
        wait(lambda: run.records("step"), 4, 0)
        return hurt(lambda: run.records("step"), lambda: run.workers()[-1]["pid"], lambda: fleet.lose(fleet.nodes[-1].node_id), fleet.join)
    finally:
        run.stop()


def plain(fleet: Fleet, folder: Path) -> list[float]:
    log = folder / "steps.jsonl"
    command = [sys.executable, str(ROOT / "tests/benchmarks/recovery_plain.py"), fleet.cluster.address, str(folder)]
    with (folder / "plain.txt").open("w") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)

    try:
        wait(lambda: logged(log), 4, 0)
        return hurt(lambda: logged(log), lambda: logged(log)[-1]["pid"], lambda: fleet.lose(fleet.nodes[-1].node_id), fleet.join)
    finally:
        process.kill()
        process.wait()


def logged(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def torchrun(fleet: Fleet, folder: Path) -> list[float]:
    log, agents = folder / "steps.jsonl", Agents(folder)
    try:
        wait(lambda: logged(log), 4, 0)
        return hurt(lambda: logged(log), lambda: logged(log)[-1]["pid"], agents.lose, agents.join)
    finally:
        agents.close()


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    sides = {"ours": ours, "torchrun": torchrun, "plain": plain}
    results: dict[str, list[list[float]]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as top:
        fleet = Fleet(Path(top))
        for n in range(rounds):
            for name, side in sides.items():
                fleet.size(2)
                folder = Path(top) / f"{name}{n}"
                folder.mkdir()
                results[name].append(side(fleet, folder))
                print(f"{name}: {[round(s, 1) for s in results[name][-1]]}, load {os.getloadavg()[0]:.1f}", flush=True)
                if n + 1 < rounds and name == "plain":
                    time.sleep(190)  # a killed driver's reservation holds the machines for three minutes
        fleet.close()
    print("| fault | here, s | plain Ray Train, s | torchrun, s | here / plain |\n|---|---|---|---|---|")
    for n, fault in enumerate(FAULTS):
        a, b, c = (statistics.median(r[n] for r in results[name]) for name in ("ours", "plain", "torchrun"))
        print(f"| {fault} | {a:.1f} | {b:.1f} | {c:.1f} | {a / b:.2f} |")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
