"""The embedded default's sweep: how long it takes, and whether the rate that it names is worth it.

    python tests/benchmarks/sweep_default.py [FOLDER]

Runs `jobs/sweep.py` as a user does (the data is prepared before, for the clock to show the sweep alone), then full runs at the rate
that it carried over, at the default's own, and at both ends of the range. Prints a table; exit code 1 when the sweep took six
minutes or more, or another of the four is as good. A finished part is not run again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from raytune70b.config import compose
from raytune70b.storage import Folder
from raytune70b.sweep.points import Point
from raytune70b.sweep.run import prepare_sweep
from raytune70b.sweep.setting import space
from tests.benchmarks.sweep_vs_grid import full_runs

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 360.0


def job(name: str, *arguments: str) -> float:
    """Seconds that a job took."""
    begin = time.monotonic()
    subprocess.run([sys.executable, str(ROOT / f"jobs/{name}.py"), *arguments], check=True)
    return time.monotonic() - begin


def main(path: Path) -> int:
    from raytune70b import cluster

    settings = [f"data.path={path / 'data'}", f"run.path={path / 'runs'}", "cluster.dashboard=false"]
    if not (path / "data/manifest.json").is_file():
        job("prepare", *settings)
    seconds = job("sweep", "conf/sweep.yaml", *settings)
    prepared = prepare_sweep(compose(["sweep.yaml", *settings]))
    answer = json.loads(Folder(path / "runs/sweep").read("answer.json"))
    tried = space(prepared)
    points = {"the sweep's": Point(**answer["point"]), "the default's": tried.start,
              "lowest of the range": tried.at(tried.rates[0]), "highest of the range": tried.at(tried.rates[-1])}  # fmt: skip
    cluster.start(prepared.config)
    losses = {name: run.loss for name, run in zip(points, full_runs(prepared, list(points.values())), strict=True)}
    print("\n| full run | learning rate | global batch | validation loss |\n|---|---|---|---|")
    for name, point in points.items():
        print(f"| {name} | {point.learning_rate:.3g} | {point.global_batch_size} | {'none' if losses[name] is None else format(losses[name], '.4f')} |")
    wins = all(loss is None or name == "the sweep's" or losses["the sweep's"] < loss for name, loss in losses.items())
    print(f"\nthe sweep took {seconds:.0f} s (at most {LIMIT_S:.0f}); its rate {'is the best of the four' if wins else 'is not the best of the four'}")
    print(json.dumps({"benchmark": "sweep_default", "seconds": seconds, "rates": {name: p.learning_rate for name, p in points.items()}, "losses": losses, "holds": wins and seconds < LIMIT_S}))
    return int(not wins or seconds >= LIMIT_S)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/sweep-default").absolute()))
