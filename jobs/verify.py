"""Prove that a run lost nothing: no step missing or repeated, no wrong block, no bad checkpoint.

usage: python jobs/verify.py [RUN | FILE.yaml ...] [run.name=NAME] [run.path=PATH] [data.path=PATH]

Without a folder it takes the run of run.path and run.name, with the data set that it was trained on.

exit codes: 0 proved; 1 a fault was found; 2 wrong input or configuration.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout or an uploaded copy, installed or not

from raytune70b.config import main_with_clear_errors
from raytune70b.runs import run_arguments_where_written
from raytune70b.schema import Config


def main(config: Config) -> int:
    from raytune70b.training.proof import prove_run

    verdict = prove_run(config)
    print("\n".join(verdict.lines()))
    return 1 if verdict.faults else 0


if __name__ == "__main__":
    sys.exit(main_with_clear_errors(__doc__ or "", ("run", "data"), main, expand=run_arguments_where_written))
