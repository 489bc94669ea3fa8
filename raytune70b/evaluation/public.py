"""Public benchmarks beside the held-out data, by EleutherAI's lm-eval (the extra `lm-eval`), for tasks whose data is on disk.

Nothing is downloaded: `evaluation.tasks` are names of lm-eval, whose data must lie in the caches of Hugging Face, or of task files in
`evaluation.tasks_path`. Runs in this process, one model after the other; the numbers and their standard errors are lm-eval's own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raytune70b.config import UserError
from raytune70b.evaluation.models import Compared
from raytune70b.schema import Config


@dataclass(frozen=True)
class Score:
    """One metric of one task for one model."""

    task: str
    metric: str
    model: str
    value: float
    stderr: float | None
    items: int


def public_scores(config: Config, models: Compared) -> list[Score]:
    """Scores every model on `evaluation.tasks`. Raises UserError."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})  # read when the libraries are imported
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(f"evaluation.tasks: lm-eval cannot be imported ({error}); install it by pip install 'raytune70b[lm-eval]', or leave evaluation.tasks empty") from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=config.evaluation.tasks_path)
    unknown = [name for name in config.evaluation.tasks if name not in manager.all_tasks]
    if unknown:
        raise UserError(f"evaluation.tasks: lm-eval knows no task {unknown[0]}; give evaluation.tasks_path=FOLDER of its task file")
    scores = []
    for name, folder in models.folders.items():
        scores += list(_scores(name, _run(lm_eval, config, str(folder), str(models.folders["tuned"]), manager)))
    return scores


def _run(lm_eval: Any, config: Config, folder: str, tokenizer: str, manager: Any) -> dict[str, Any]:
    import torch

    settings = config.evaluation
    dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "auto": "auto"}[settings.dtype]
    model = {"pretrained": folder, "tokenizer": tokenizer, "dtype": dtype, "parallelize": settings.gpus_per_model > 1 and torch.cuda.is_available()}
    try:
        return lm_eval.simple_evaluate(
            model="hf", model_args=model, tasks=list(settings.tasks), task_manager=manager, limit=settings.tasks_limit, batch_size=settings.batch_size,
            device="cuda" if torch.cuda.is_available() else "cpu", log_samples=False, bootstrap_iters=settings.resamples,
        )  # fmt: skip
    except Exception as error:  # whatever a task, its data or its model raises
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"evaluation.tasks: {', '.join(settings.tasks)} on {folder}: {type(error).__name__}: {first}; their data must be on disk, nothing is downloaded") from error


def _scores(model: str, results: dict[str, Any]) -> Iterator[Score]:
    """lm-eval's table: metrics are named `METRIC,FILTER`, their errors `METRIC_stderr,FILTER`."""
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, _, kept = key.partition(",")
            if kept and not metric.endswith("_stderr") and isinstance(value, (int, float)):
                error = values.get(f"{metric}_stderr,{kept}")
                name = metric if kept == "none" else f"{metric} ({kept})"
                yield Score(task, name, model, float(value), float(error) if isinstance(error, (int, float)) else None, results["n-samples"][task]["effective"])


def public_table(scores: list[Score]) -> str:
    """For the console: a row a metric, a column a model."""
    models = list(dict.fromkeys(s.model for s in scores))
    by = {(s.task, s.metric, s.model): s for s in scores}
    lines = [f"{'public task, metric':<40}" + "".join(f"{m:>20}" for m in models)]
    for task, metric in dict.fromkeys((s.task, s.metric) for s in scores):
        cells = [by[task, metric, m] for m in models]
        lines.append(f"{f'{task}, {metric}':<40}" + "".join(f"{f'{c.value:.4f}' + (f' +- {c.stderr:.4f}' if c.stderr is not None else ''):>20}" for c in cells))
    return "\n".join(lines)


def public_measures(scores: Sequence[Score]) -> dict[str, float]:
    """Metric name -> value, for MLflow."""
    return {f"evaluation/public {s.task}/{s.metric}/{s.model}".replace(" ", "_"): s.value for s in scores}
