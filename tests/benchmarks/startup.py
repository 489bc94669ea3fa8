"""Seconds until each job says what it has to say: `--help`, and the one line for a wrong key. No job may need a second.

usage: python tests/benchmarks/startup.py [rounds, default 5]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CASES = {"--help": 0, "run.nmae=x": 2}
"""Argument: the exit code that belongs to it."""


def seconds(job: Path, argument: str) -> float:
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, str(job), argument], capture_output=True)
    assert done.returncode == CASES[argument], done
    return time.perf_counter() - begin


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    found = {}
    for job in sorted((ROOT / "jobs").glob("*.py")):
        times = {argument: [seconds(job, argument) for _ in range(rounds)] for argument in CASES}
        found[job.stem] = {argument: statistics.median(t) for argument, t in times.items()}
        print(f"jobs/{job.name:14}", ", ".join(f"{argument} {statistics.median(t):.2f} s (worst {max(t):.2f})" for argument, t in times.items()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
