"""The page of an evaluation: tables with intervals, and answers side by side. One file, no script, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raytune70b.evaluation.summary import EVERYTHING, Row
from raytune70b.schema import Config

if TYPE_CHECKING:
    from raytune70b.evaluation.job import Evaluated

TEMPLATE = Path(__file__).with_name("page.html")
LONGEST = 1200
"""Characters of a prompt that are shown, from its end."""


def page(config: Config, evaluated: Evaluated, answers: list[dict[str, Any]]) -> str:
    """The HTML. Everything that models or documents wrote is escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = lambda value: f"{value:.4g}"
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=evaluated.compared.title, models=evaluated.compared.folders, names=list(evaluated.results), confidence=config.evaluation.confidence,
        overall=[r for r in evaluated.rows if r.group == EVERYTHING], groups=grouped(evaluated.rows), samples=samples(answers, config.evaluation.samples),
        texts=len(evaluated.held_out.texts), answers=len(answers), too_long=evaluated.held_out.too_long, unusable=evaluated.held_out.unusable, data=config.data.path, public=evaluated.public,
    )  # fmt: skip


def grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each group but the whole, in order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.group != EVERYTHING:
            found.setdefault(row.group, []).append(row)
    return found


def samples(answers: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """So many answers, spread over all of them."""
    chosen = [answers[n] for n in np.linspace(0, len(answers) - 1, min(most, len(answers))).astype(int)]
    return [{**a, "prompt": a["prompt"] if len(a["prompt"]) <= LONGEST else "... " + a["prompt"][-LONGEST:]} for a in chosen]
