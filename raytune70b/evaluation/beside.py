"""Answers of checkpoints while training goes on: what Ray Train's validation hook runs beside the workers.

A checkpoint is exported to a temporary folder of the machine that evaluates it, as `jobs/evaluate.py` would export it, and answers
some held-out questions; what they score goes to the journal, and so to MLflow and the report, at the checkpoint's step. Training
never waits: Ray Train keeps one evaluation going at a time and queues the others. The end of a run waits for those that are
queued, a run that is told to stop gives them up. Whatever goes wrong is a warning. Costs room for one model folder in TMPDIR.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raytune70b.blocks.held_out import Pair
from raytune70b.config import UserError
from raytune70b.schema import Config
from raytune70b.storage import Folder
from raytune70b.training.job import Job
from raytune70b.training.mailbox import STOP


class Stopped(Exception):
    """The run is told to stop: its end does not wait for scores."""


@dataclass(frozen=True)
class Questions:
    """Held-out questions for the checkpoints of a run; called with a job and a published checkpoint."""

    pairs: tuple[Pair, ...]

    @classmethod
    def of(cls, config: Config, pairs: Sequence[Pair]) -> Questions:
        """Raises UserError where there is nothing to ask."""
        if not pairs:
            raise UserError(f"evaluation.every: is {config.evaluation.every}, but {config.data.path} holds no held-out conversations; set it to 0")
        return cls(tuple(pairs))

    def __call__(self, job: Job, checkpoint: Any) -> dict[str, Any]:
        """The metrics of the answers; {} where there are none, and then the journal says why."""
        import ray

        step, begin = int(Folder(checkpoint.path).name.removeprefix("step-")), time.monotonic()
        try:
            found = self._scores(job, step, lambda: ray.get(job.mailbox.command.remote()) == STOP)
        except Stopped:
            return {}
        except Exception as error:  # training is not stopped for it
            text = f"the answers of step {step} were not evaluated: {type(error).__name__}: {(str(error) or 'no reason given').splitlines()[0]}"
            ray.get(job.mailbox.put.remote({"kind": "warning", "time": time.time(), "launch": job.launch, "text": text}))
            return {}
        record = {"kind": "evaluation", "time": time.time(), "launch": job.launch, "step": step, **found, "answers": len(self.pairs), "seconds": time.monotonic() - begin}
        ray.get(job.mailbox.put.remote(record))
        return found

    def _scores(self, job: Job, step: int, stopped: Callable[[], bool]) -> dict[str, float]:
        if stopped():
            raise Stopped
        import torch

        from raytune70b.evaluation.metrics import score
        from raytune70b.evaluation.model import Model
        from raytune70b.evaluation.work import settings_of

        settings = job.config.evaluation
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory(prefix="evaluation-") as home:
            folder = exported(job.config, step, Path(home) / "model")
            model = Model(folder, folder, settings_of(job.config), settings.gpus_per_model if torch.cuda.is_available() else 0)
            answers: dict[int, tuple[str, int, bool]] = {}
            for batch in batches(self.pairs, settings.batch_size):
                if stopped():
                    raise Stopped
                answers |= model.answers(batch)
        scores = score([answers[p.number][0] for p in self.pairs], [p.answer for p in self.pairs], [p.language for p in self.pairs])
        return {name: float(value[0]) for name, value in scores.values().items()}


def batches(pairs: Sequence[Pair], size: int) -> Iterator[list[Pair]]:
    """Questions of like length together, the longest first."""
    ordered = sorted(pairs, key=lambda p: (-len(p.prompt_ids), p.number))
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def exported(config: Config, step: int, target: Path) -> Path:
    """A checkpoint as a model folder, its checksums compared. Raises UserError."""
    from raytune70b.export.job import export_run

    export = dataclasses.replace(config.export, path=str(target), checkpoint=step, verify_logits=False, overwrite=False)
    export_run(dataclasses.replace(config, export=export))
    return target


def longest_prompt(config: Config) -> int:
    """Tokens of the longest prompt that leaves room for an answer in the context of the model that is trained. Raises UserError."""
    from raytune70b.evaluation.job import room_for_prompts
    from raytune70b.model.load import hf_config

    return room_for_prompts(config, [hf_config(config.model, config.data.vocab_size)])
