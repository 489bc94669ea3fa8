"""Fine-tune a model on token blocks, elastically and exactly; the same command again continues the run.

usage: python jobs/finetune.py [FILE.yaml ...] [key=value ...]

exit codes: 0 finished; 1 failed; 2 wrong input or configuration; 3 stopped by the budget with a checkpoint;
75 stopped with a checkpoint, run the same command again; 130 ended by Ctrl-C, likewise from the newest checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout or an uploaded copy, installed or not

from raytune70b.config import main_with_clear_errors
from raytune70b.places import check_places
from raytune70b.schema import Config
from raytune70b.storage import Folder

SECTIONS = ("run", "data", "model", "train", "validation", "evaluation", "checkpoint", "cluster", "tracking", "budget", "hardware")


def main(config: Config) -> int:
    from data_pipelines.sample_corpus import prepare_where_missing
    from raytune70b.training.prepared import prepare_run

    check_places(config, "run.path", Folder(config.run.path) / config.run.name)
    prepare_where_missing(config)
    prepared = prepare_run(config)
    questions = held_out_questions(config) if config.evaluation.every else None
    from raytune70b.training.trainer import run  # imports Ray and torch: wrong input is told before

    return run(prepared, questions)


def held_out_questions(config: Config) -> Callable[[Any, Any], dict[str, Any]]:
    """What the checkpoints of `evaluation.every` are asked."""
    from data_pipelines import held_out
    from data_pipelines.tokens import load_tokenizer
    from raytune70b.evaluation.beside import Questions, longest_prompt

    data = Folder(config.data.path)
    pairs, *_ = held_out.pairs(data, load_tokenizer(data / "tokenizer"), config.evaluation.every_conversations, longest_prompt(config))
    return Questions.of(config, pairs)


if __name__ == "__main__":
    sys.exit(main_with_clear_errors(__doc__ or "", SECTIONS, main))
