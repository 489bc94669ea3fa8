"""Find the learning rate, batch and warm-up for a full run by short trials on a share of its data.

usage: python jobs/sweep.py [FILE.yaml ...] [key=value ...]

Without a file it takes conf/sweep.yaml, the sweep of the embedded run.

Its last line is the command of the full run, with best.yaml among its files.
The same command again runs only what is missing.

exit codes: 0 there is an answer; 1 every trial failed; 2 wrong input or configuration; 3 every learning rate diverged, or
the sweep's limits are used up without an answer; 75 stopped, run the same command again.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout or an uploaded copy, installed or not

from raytune70b.config import main_with_clear_errors
from raytune70b.places import check_places
from raytune70b.schema import Config
from raytune70b.storage import Folder

SECTIONS = ("sweep", "run", "data", "model", "train", "validation", "checkpoint", "cluster", "tracking", "budget", "hardware")


def main(config: Config) -> int:
    from data_pipelines.sample_corpus import prepare_where_missing

    check_places(config, "run.path", Folder(config.run.path) / config.sweep.name)
    prepare_where_missing(config)
    from raytune70b.sweep.run import prepare_sweep, run

    return run(prepare_sweep(config), sys.argv[1:])


if __name__ == "__main__":
    given = sys.argv[1:]
    files = [a for a in given if "=" not in a and not a.startswith("-")]
    sys.exit(main_with_clear_errors(__doc__ or "", SECTIONS, main, given if files else ["sweep.yaml", *given]))
