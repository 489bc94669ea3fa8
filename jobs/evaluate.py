"""Evaluates a run or a model folder: validation loss by source and language, answers on held-out questions, tuned beside base.

    python jobs/evaluate.py [RUN | MODEL] [key=value ...]
    python jobs/evaluate.py runs/default evaluation.max_conversations=200
    python jobs/evaluate.py models/legal data.path=data/mine evaluation.base=models/llama

Without a folder it takes the run of run.path and run.name. Results, answers and an HTML page go to `evaluation/` in the run's
or the model's folder and to MLflow; the same command again goes on where it stopped.

exit codes: 0 evaluated; 1 failed; 2 wrong input or configuration; 75 stopped by SIGTERM, run the same command again.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout or an uploaded copy, installed or not

from raytune70b import cpus
from raytune70b.config import main_with_clear_errors
from raytune70b.places import check_places
from raytune70b.runs import run_or_model_arguments
from raytune70b.schema import Config
from raytune70b.storage import Folder


def main(config: Config) -> int:
    given = config.evaluation.model
    check_places(config, "evaluation.model" if given else "run.path", Folder(given or f"{config.run.path}/{config.run.name}") / "evaluation")
    from data_pipelines import held_out
    from data_pipelines.tokens import load_tokenizer
    from raytune70b.blocks.manifest import read_manifest
    from raytune70b.evaluation.job import HeldOut, evaluate, summary
    from raytune70b.evaluation.tracking import track

    def load(data: Folder, texts: int | None, conversations: int | None, longest_prompt: int) -> HeldOut:
        tokenizer, manifest = load_tokenizer(data / "tokenizer"), read_manifest(data)
        pairs, too_long, unusable = held_out.pairs(data, tokenizer, conversations, longest_prompt)
        return HeldOut(held_out.texts(data, tokenizer, manifest.seq_len, texts), pairs, too_long, unusable, tokenizer, manifest.answer_ends)

    cpus.take_all()
    evaluated = evaluate(config, load)
    print(summary(evaluated), flush=True)
    track(config, evaluated)
    return 0


if __name__ == "__main__":
    sys.exit(main_with_clear_errors(__doc__ or "", ("evaluation", "export", "run", "data", "cluster", "tracking"), main, expand=run_or_model_arguments))
