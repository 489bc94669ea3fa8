"""An evaluation from model folders to results: `results.json` (every row), `answers.jsonl` and `page.html` beside the run."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raytune70b.blocks.held_out import Pair, Text
from raytune70b.config import UserError
from raytune70b.evaluation.models import Compared, compared
from raytune70b.evaluation.page import page
from raytune70b.evaluation.pipeline import run_units
from raytune70b.evaluation.public import Score, public_measures, public_scores, public_table
from raytune70b.evaluation.summary import EVERYTHING, Bootstrap, Results, Row, rows
from raytune70b.evaluation.tokenizers import check_tokenizer
from raytune70b.evaluation.work import plan, read_results, settings_of
from raytune70b.schema import Config
from raytune70b.storage import Folder


@dataclass(frozen=True)
class HeldOut:
    """What is scored and asked; numbers are places in the lists."""

    texts: list[Text]
    pairs: list[Pair]
    too_long: int
    """Answers left out because their prompt and answer exceed the context."""
    unusable: int
    """Conversations left out because the tokenizer's chat template cannot write them."""
    tokenizer: Any
    """The data set's, which encoded them."""
    ends: tuple[int, ...] = ()
    """Ids that training ended answers with: the base model is stopped there too."""


@dataclass(frozen=True)
class Evaluated:
    compared: Compared
    held_out: HeldOut
    results: Results
    rows: list[Row]
    public: list[Score]
    """Of `evaluation.tasks`."""
    seconds: float


Load = Callable[[Folder, int | None, int | None, int], HeldOut]
"""(data set, most texts, most conversations, longest prompt) -> the items."""


def evaluate(config: Config, load: Load) -> Evaluated:
    """Evaluates and writes the results. Raises UserError."""
    begin = time.monotonic()
    models = compared(config)
    held_out = load(Folder(config.data.path), config.evaluation.max_texts, config.evaluation.max_conversations, longest_prompt(config, models))
    if not held_out.texts:
        raise UserError(f"data.path: {config.data.path} holds no held-out documents; raise data.validation_fraction and prepare it again")
    for name, key in (("tuned", "evaluation.model"), ("base", "evaluation.base" if config.evaluation.base else "model.path")):
        if name in models.folders:
            check_tokenizer(key, models.folders[name], config.data.path, held_out.tokenizer)
    results = {name: run_model(config, models, name, held_out) for name in models.folders}
    table = rows(results, held_out.texts, held_out.pairs, Bootstrap(config.evaluation.resamples, config.evaluation.confidence))
    public = public_scores(config, models) if config.evaluation.tasks else []
    evaluated = Evaluated(models, held_out, results, table, public, time.monotonic() - begin)
    write(config, evaluated)
    return evaluated


def longest_prompt(config: Config, models: Compared) -> int:
    """Tokens of the longest prompt that leaves room for an answer in every model's context. Raises UserError where there is none."""
    from transformers import AutoConfig

    return room_for_prompts(config, [AutoConfig.from_pretrained(f, local_files_only=True) for f in models.folders.values()])


def room_for_prompts(config: Config, models: Sequence[Any]) -> int:
    """The same for models by their Hugging Face configs."""
    contexts = [getattr(m.get_text_config(), "max_position_embeddings", None) for m in models]
    room = min([c for c in contexts if c is not None], default=1 << 30) - config.evaluation.max_new_tokens
    if room < 1:
        raise UserError(f"evaluation.max_new_tokens: is {config.evaluation.max_new_tokens}, the model's context {room + config.evaluation.max_new_tokens}; make it smaller")
    return room


def run_model(config: Config, models: Compared, name: str, held_out: HeldOut) -> dict[str, dict[int, Any]]:
    """One model's results; units that an earlier evaluation finished are read."""
    settings = settings_of(config, held_out.ends)
    units = plan(models.fingerprints()[name], held_out.texts, held_out.pairs, settings)
    out = models.home / "units"
    run_units(config, models.folders[name], models.folders["tuned"], units, out, settings)
    return read_results(units, out)


def write(config: Config, evaluated: Evaluated) -> None:
    """The files of an evaluation."""
    home = evaluated.compared.home
    values = {"models": {k: str(v) for k, v in evaluated.compared.folders.items()}, "fingerprints": evaluated.compared.fingerprints(),
              "settings": dataclasses.asdict(config.evaluation), "left_out_for_length": evaluated.held_out.too_long, "left_out_for_the_template": evaluated.held_out.unusable, "public": [dataclasses.asdict(s) for s in evaluated.public],
              "rows": [dataclasses.asdict(r) for r in evaluated.rows]}  # fmt: skip
    home.write("results.json", (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode())
    home.write("answers.jsonl", "".join(json.dumps(a, ensure_ascii=False) + "\n" for a in answers(evaluated)).encode())
    home.write("page.html", page(config, evaluated, answers(evaluated)).encode())


def answers(evaluated: Evaluated) -> list[dict[str, Any]]:
    """Every question with its reference and each model's answer."""
    return [
        {"task": p.task, "language": p.language, "source": p.source, "prompt": p.prompt, "reference": p.answer,
         **{name: r["answers"][p.number][0] for name, r in evaluated.results.items()}}
        for p in evaluated.held_out.pairs
    ]  # fmt: skip


def summary(evaluated: Evaluated) -> str:
    """The table of all items, for the console."""
    lines = [f"{'':<14}" + "".join(f"{name:>40}" for name in evaluated.results) + (f"{'change':>40}" if len(evaluated.results) > 1 else "")]
    for row in (r for r in evaluated.rows if r.group == EVERYTHING):
        cells = [*row.values.values(), *([row.change] if row.change else [])]
        lines.append(f"{row.measure:<14}" + "".join(f"{f'{e.value:,.4f} [{e.low:,.4f}, {e.high:,.4f}]':>40}" for e in cells) + _mark(row))
    ended = {name: sum(a[2] for a in r["answers"].values()) for name, r in evaluated.results.items()}
    total = len(evaluated.held_out.pairs)
    lines.append(f"{len(evaluated.held_out.texts):,} texts, {total:,} answers ({_left_out(evaluated.held_out)}); ended by themselves: "
                 + ", ".join(f"{name} {n}" for name, n in ended.items()) + f"; {evaluated.seconds:.1f} s")  # fmt: skip
    lines += [public_table(evaluated.public)] if evaluated.public else []
    return "\n".join([*lines, f"{evaluated.compared.home.uri}/page.html"])


def _left_out(held_out: HeldOut) -> str:
    text = f"{held_out.too_long} left out for length"
    return text + (f", {held_out.unusable} conversations that the chat template cannot write" if held_out.unusable else "")


def _mark(row: Row) -> str:
    return {True: "  better", False: "  worse", None: ""}[row.better]


def measures(table: Sequence[Row], public: Sequence[Score] = ()) -> dict[str, float]:
    """Metric name -> value of everything, for MLflow: tuned and base values, changes with bounds."""
    found: dict[str, float] = public_measures(public)
    for row in table:
        stem = f"evaluation/{row.group}/{row.measure}".replace(",", "").replace(" ", "_")
        found |= {f"{stem}/{name}": e.value for name, e in row.values.items()}
        if row.change is not None:
            found |= {f"{stem}/change": row.change.value, f"{stem}/change_low": row.change.low, f"{stem}/change_high": row.change.high}
    return found
