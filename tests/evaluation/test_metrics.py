"""Every metric against its reference library, called by hand on answers with accents, and empty ones."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from raytune70b.evaluation.metrics import NAMES, bleu_tokens, estimate, exact_match, normalised_words, resampling, score, token_f1

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


NO_BLANKS = [
    ("zh", "买方应在三十天内付款。", "买方应当于三十日内支付。"),
    ("ja", "買主は三十日以内に支払う。", "買主は30日以内に支払うものとする。"),
    ("th", "ผู้ซื้อต้องชำระเงินภายในสามสิบวัน", "ผู้ซื้อจะชำระเงินใน 30 วัน"),
]


def lettered(text: str) -> str:
    """The same text in ASCII words, one for each character with its marks, so that libraries for English can be asked."""
    words: list[str] = []
    for c in unicodedata.normalize("NFC", text):
        if unicodedata.category(c)[0] == "M":
            words[-1] += f"{ord(c):x}"
        elif c.isdigit():
            words = [*words[:-1], words[-1] + c] if words and words[-1].isdigit() else [*words, c]
        elif c.isalpha():
            words.append(f"x{ord(c):x}")
    return " ".join(words)


@pytest.mark.parametrize(("language", "answer", "reference"), NO_BLANKS)
def test_texts_without_blanks_are_compared_by_characters(language: str, answer: str, reference: str):
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    got, wanted = lettered(answer), lettered(reference)
    assert 0 < squad_f1(got, wanted) < 1
    assert token_f1(answer, reference, language) == pytest.approx(squad_f1(got, wanted), abs=1e-12)
    values = score([answer], [reference], [language]).values()
    for name, expected in scorer.score(wanted, got).items():
        assert values[name][0] == pytest.approx(expected.fmeasure, abs=1e-12)


def test_bleu_takes_the_tokenizer_of_the_language():
    for tokens, language, answer, reference in [("zh", *NO_BLANKS[0]), ("char", *NO_BLANKS[1]), ("char", *NO_BLANKS[2])]:
        assert bleu_tokens(reference, language) == bleu_tokens(reference, "unknown") == tokens
        expected = sacrebleu.corpus_bleu([answer], [[reference]], tokenize=tokens).score
        assert score([answer], [reference], [language]).values()["bleu"][0] == pytest.approx(expected, abs=1e-12) and expected > 1
    assert bleu_tokens("東京都", "ja") == "char" and bleu_tokens("北京", "any") == "zh"
    assert bleu_tokens("The firm 王 & Co.", "en") == bleu_tokens("", "zh") == bleu_tokens("30", "zh") == bleu_tokens("계약은 유효하다", "ko") == "13a"


def test_bleu_of_several_languages_adds_up_to_one_corpus():
    answers, references, languages = zip(*[(a, r, g) for g, a, r in NO_BLANKS], *FIXED, strict=True)
    values = score(answers, references, languages)
    for order in ([*range(len(values))], [*range(len(values))][::-1]):
        again = score(*([column[n] for n in order] for column in (answers, references, languages)))
        assert np.array_equal(again.statistics["bleu"], values.statistics["bleu"][order])
    last = values.of(np.arange(3, len(values))).values()["bleu"][0]
    assert last == pytest.approx(sacrebleu.corpus_bleu(ANSWERS, [REFERENCES]).score, abs=1e-12)


def test_marks_stay_with_their_letters():
    """In किताब and कातिब the same letters carry other vowels: cut at its marks, each would be k, t and b."""
    assert normalised_words("किताबें, हिन्दी।", "hi") == ["किताबें", "हिन्दी"]
    assert score(["किताब"], ["कातिब"], ["hi"]).values()["rouge1"][0] == 0
    assert score(["हिन्दी किताब"], ["हिन्दी पुस्तक"], ["hi"]).values()["rouge1"][0] == pytest.approx(0.5)
    assert token_f1("ก่", "ก้", "th") == 0


def test_blanks_and_foreign_words_among_characters():
    assert normalised_words("使用 GPU 训练3天。", "zh") == ["使", "用", "gpu", "训", "练", "3", "天"]
    assert exact_match("你 好", "你好！", "zh") == 1


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
