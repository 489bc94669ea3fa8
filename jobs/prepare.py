"""Turns raw documents into a data set of token blocks.

    python jobs/prepare.py [FILE.yaml ...] [key=value ...]
    python jobs/prepare.py data.inputs=[contracts.jsonl,statutes/] data.path=data/mine data.tokenizer=models/llama data.seq_len=4096

Run again with the same inputs it compares the data set with its checksums, and mends what is damaged; killed, it goes on where it stopped.

exit codes: 0 the data set is there; 1 failed; 2 wrong input or configuration; 75 stopped by SIGTERM, run the same command again.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout or an uploaded copy, installed or not

from raytune70b.config import main_with_clear_errors
from raytune70b.schema import Config


def run(config: Config) -> int:
    from data_pipelines.build import prepare

    prepare(config)
    return 0


if __name__ == "__main__":
    sys.exit(main_with_clear_errors(__doc__ or "", ("data", "cluster", "run"), run))
