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
    rates = {"the sweep's": answer["point"]["learning_rate"], "the default's": prepared.config.train.learning_rate}
    rates |= {"lowest of the range": space(prepared).rates[0], "highest of the range": space(prepared).rates[-1]}
    cluster.start(prepared.config)
    runs = full_runs(prepared, list(dict.fromkeys(rates.values())))
    losses = {name: runs[rate].loss for name, rate in rates.items()}
    print("\n| learning rate | | full run's validation loss |\n|---|---|---|")
    for name, rate in rates.items():
        print(f"| {rate:.3g} | {name} | {losses[name]:.4f} |" if losses[name] is not None else f"| {rate:.3g} | {name} | {runs[rate].status} |")
    wins = all(loss is None or name == "the sweep's" or losses["the sweep's"] < loss for name, loss in losses.items())
    print(f"\nthe sweep took {seconds:.0f} s (at most {LIMIT_S:.0f}); its rate {'is the best of the four' if wins else 'is not the best of the four'}")
    print(json.dumps({"benchmark": "sweep_default", "seconds": seconds, "rates": rates, "losses": losses, "holds": wins and seconds < LIMIT_S}))
    return int(not wins or seconds >= LIMIT_S)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/sweep-default").absolute()))
