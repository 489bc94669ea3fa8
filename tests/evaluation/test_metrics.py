"""Every metric against its reference library, called by hand on answers with accents, and empty ones."""

from __future__ import annotations

import re
import string
from collections import Counter

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from raytune70b.evaluation.metrics import NAMES, estimate, exact_match, normalised_words, resampling, score, token_f1

FIXED = [
    ("Within thirty days of written notice.", "Within thirty days of written notice.", "en"),
    ("", "The Lender.", "en"),
    ("The Borrower shall pay all amounts due under this agreement.", "the borrower must pay any amount due under the agreement", "en"),
    ("L'été dernier, la Cour a jugé l'affaire.", "L’été dernier, la Cour jugea l’affaire à Québec.", "fr"),
    ("Le Prêteur doit livrer les biens décrits à l'annexe.", "Le Prêteur doit livrer les biens décrits à l'annexe", "fr"),
    ("e\u0301te\u0301", "été", "fr"),
]
ANSWERS, REFERENCES, LANGUAGES = (list(column) for column in zip(*FIXED, strict=True))


def squad_f1(answer: str, reference: str) -> float:
    """The metric of the SQuAD 1.1 evaluation script (Rajpurkar et al. 2016), written out."""

    def words(text: str) -> list[str]:
        text = "".join(c for c in text.lower() if c not in set(string.punctuation))
        return re.sub(r"\b(a|an|the)\b", " ", text).split()

    got, wanted = words(answer), words(reference)
    if not got or not wanted:
        return float(got == wanted)
    same = sum((Counter(got) & Counter(wanted)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(got), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def test_bleu_and_chrf_are_sacrebleu():
    values = score(ANSWERS, REFERENCES, LANGUAGES).values()
    assert values["bleu"][0] == pytest.approx(sacrebleu.corpus_bleu(ANSWERS, [REFERENCES]).score, abs=1e-12)
    assert values["chrf"][0] == pytest.approx(sacrebleu.corpus_chrf(ANSWERS, [REFERENCES]).score, abs=1e-12)


def test_rouge_is_rouge_score_where_its_tokenizer_knows_the_letters():
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    english = [r for r in FIXED if r[2] == "en"]
    values = score(*(list(c) for c in zip(*english, strict=True))).values()
    for name in ("rouge1", "rouge2", "rougeL"):
        assert values[name][0] == pytest.approx(np.mean([scorer.score(r, a)[name].fmeasure for a, r, _ in english]), abs=1e-12)


def test_rouge_does_not_cut_accented_words():
    """rouge-score's own tokenizer sees `t` in `été` and in `ôté`, and takes the two words for one."""
    assert RougeScorer(["rouge1"]).score("été", "ôté")["rouge1"].fmeasure == 1
    assert score(["été"], ["ôté"], ["fr"]).values()["rouge1"][0] == 0
    assert score(["e\u0301te\u0301"], ["été"], ["fr"]).values()["rouge1"][0] == 1


@pytest.mark.parametrize(("answer", "reference"), [(a, r) for a, r, language in FIXED if language == "en"])
def test_token_f1_is_squads(answer, reference):
    assert token_f1(answer, reference, "en") == pytest.approx(squad_f1(answer, reference), abs=1e-12)


def test_french_articles_and_typography():
    assert exact_match("L'acheteur", "acheteur.", "fr") == exact_match("« Le Vendeur »", "vendeur", "fr") == 1
    assert normalised_words("l’État", "fr") == ["état"]


def test_empty_answers():
    assert token_f1("", "", "en") == exact_match("", "", "fr") == 1
    assert token_f1("", "a word", "en") == token_f1("word", "", "en") == 0
    values = score(["", ""], ["The Lender.", "Le Prêteur."], ["en", "fr"]).values()
    assert all(values[name][0] == 0 for name in NAMES)


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_bootstrap_sample_is_the_metric_of_the_drawn_answers(seed):
    """A weighted evaluation equals the libraries on a list in which answers really repeat."""
    weights = resampling(len(FIXED), 1, seed)
    drawn = [n for n, times in enumerate(weights[0]) for _ in range(int(times))]
    fast = score(ANSWERS, REFERENCES, LANGUAGES).values(weights)
    answers, references = [ANSWERS[n] for n in drawn], [REFERENCES[n] for n in drawn]
    slow = score(answers, references, [LANGUAGES[n] for n in drawn]).values()
    assert {n: fast[n][0] for n in NAMES} == pytest.approx({n: slow[n][0] for n in NAMES}, abs=1e-9)
    assert fast["bleu"][0] == pytest.approx(sacrebleu.corpus_bleu(answers, [references]).score, abs=1e-9)


def test_interval_covers_the_mean_as_often_as_it_says():
    """Of 300 samples of 40 values, 90 % intervals hold the true mean in 85 to 95 % of cases."""
    random, held = np.random.default_rng(5), 0
    for n in range(300):
        values = random.normal(1.0, 2.0, size=40)
        found = estimate(values.mean(), resampling(40, 400, n) @ values / 40, 0.9)
        held += found.low <= 1.0 <= found.high
    assert 0.85 <= held / 300 <= 0.95
