"""What the table calls better: a lower loss and a higher score, beyond the change's interval."""

from __future__ import annotations

import pytest

from raytune70b.blocks.held_out import Pair, Text
from raytune70b.evaluation.metrics import Estimate
from raytune70b.evaluation.summary import Bootstrap, Row, rows

TEXTS = [Text(n, (1, 2, 3, 4, 5), (1, 5), "en", "file") for n in range(30)]
PAIRS = [Pair(n, (1,), "Who is bound?", f"The Supplier of clause {n}.", "question", "en", "file") for n in range(30)]


@pytest.mark.parametrize("tuned_is_better", [True, False])
def test_a_lower_loss_and_a_higher_score_are_better(tuned_is_better):
    good = {"losses": {t.number: (4.0 + 0.01 * t.number, 4) for t in TEXTS}, "answers": {p.number: (p.answer, 5, True) for p in PAIRS}}
    poor = {"losses": {t.number: (8.0 + 0.01 * t.number, 4) for t in TEXTS}, "answers": {p.number: ("Nobody at all is.", 5, True) for p in PAIRS}}
    found = rows({"base": poor, "tuned": good} if tuned_is_better else {"base": good, "tuned": poor}, TEXTS, PAIRS, Bootstrap(200, 0.95))
    assert {r.measure: r.better for r in found if r.group == "all"} == dict.fromkeys(
        ("loss", "perplexity", "exact_match", "token_f1", "rouge1", "rouge2", "rougeL", "bleu", "chrf"), tuned_is_better
    )


@pytest.mark.parametrize("change", [None, Estimate(-0.1, -0.3, 0.1), Estimate(0.1, -0.1, 0.3)])
def test_a_change_that_may_be_chance_is_neither(change):
    assert Row("all", "loss", 30, {}, change).better is None and Row("all", "bleu", 30, {}, change).better is None
