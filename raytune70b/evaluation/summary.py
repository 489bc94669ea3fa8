"""From results to a table: each measure by task, language and source, base beside tuned, and the change with its interval.

Intervals are percentile bootstraps over answers (over texts for the loss). The same resamples are drawn for both models, so the
change is compared answer by answer: its interval is far narrower than the two models' own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raytune70b.blocks.held_out import Pair, Text
from raytune70b.evaluation.metrics import NAMES, Array, Estimate, estimate, resampling, score

SMALLER_IS_BETTER = ("loss", "perplexity")
EVERYTHING = "all"


@dataclass(frozen=True)
class Row:
    """One measure of one group."""

    group: str
    measure: str
    items: int
    values: dict[str, Estimate]
    """By model: base, tuned."""
    change: Estimate | None
    """tuned - base."""

    @property
    def better(self) -> bool | None:
        """Whether tuned beats base beyond the change's interval; None without a clear change."""
        if self.change is None or not self.change.beyond_chance:
            return None
        return (self.change.value < 0) == (self.measure in SMALLER_IS_BETTER)


@dataclass(frozen=True)
class Bootstrap:
    resamples: int
    confidence: float
    seed: int = 0


Results = dict[str, dict[str, dict[int, Any]]]
"""Model name -> what `work.read_results` found."""


def rows(results: Results, texts: Sequence[Text], pairs: Sequence[Pair], bootstrap: Bootstrap) -> list[Row]:
    """All measures of all groups."""
    found = []
    for group, members in groups([(t.language, t.source, "") for t in texts]).items():
        found += loss_rows(group, [texts[n] for n in members], results, bootstrap)
    for group, members in groups([(p.language, p.source, p.task) for p in pairs]).items():
        found += answer_rows(group, [pairs[n] for n in members], results, bootstrap)
    return found


def groups(labels: Sequence[tuple[str, str, str]]) -> dict[str, list[int]]:
    """Group name -> members: all; each language, source and task; each task in each language."""
    found: dict[str, list[int]] = defaultdict(list)
    for number, (language, source, task) in enumerate(labels):
        names = [EVERYTHING, f"language {language}", f"source {source}"]
        names += [f"task {task}", f"task {task}, language {language}"] if task else []
        for name in names:
            found[name].append(number)
    return dict(sorted(found.items(), key=lambda item: (item[0] != EVERYTHING, item[0])))


def loss_rows(group: str, texts: Sequence[Text], results: Results, bootstrap: Bootstrap) -> list[Row]:
    """Loss over trained tokens and perplexity."""
    weights = resampling(len(texts), bootstrap.resamples, bootstrap.seed)
    tokens = np.array([t.trained_tokens for t in texts], np.float64)
    if not tokens.sum():
        return []
    drawn = np.maximum(weights @ tokens, 1.0)
    sums = {model: np.array([r["losses"][t.number][0] for t in texts]) for model, r in results.items()}
    losses = {model: (s.sum() / tokens.sum(), weights @ s / drawn) for model, s in sums.items()}
    perplexities = {model: (float(np.exp(value)), np.exp(samples)) for model, (value, samples) in losses.items()}
    return [_row(group, "loss", len(texts), losses, bootstrap), _row(group, "perplexity", len(texts), perplexities, bootstrap)]


def answer_rows(group: str, pairs: Sequence[Pair], results: Results, bootstrap: Bootstrap) -> list[Row]:
    """Every metric of the answers."""
    weights = resampling(len(pairs), bootstrap.resamples, bootstrap.seed)
    values: dict[str, dict[str, tuple[float, Array]]] = {name: {} for name in NAMES}
    for model, result in results.items():
        scores = score([result["answers"][p.number][0] for p in pairs], [p.answer for p in pairs], [p.language for p in pairs])
        own, samples = scores.values(), scores.values(weights)
        for name in NAMES:
            values[name][model] = (float(own[name][0]), samples[name])
    return [_row(group, name, len(pairs), values[name], bootstrap) for name in NAMES]


def _row(group: str, measure: str, items: int, values: dict[str, tuple[float, NDArray[np.float64]]], bootstrap: Bootstrap) -> Row:
    interval: Callable[[float, Array], Estimate] = lambda value, samples: estimate(value, samples, bootstrap.confidence)  # noqa: E731
    change = None
    if {"base", "tuned"} <= values.keys():
        (base, base_samples), (tuned, tuned_samples) = values["base"], values["tuned"]
        change = interval(tuned - base, tuned_samples - base_samples)
    return Row(group, measure, items, {model: interval(*v) for model, v in values.items()}, change)
