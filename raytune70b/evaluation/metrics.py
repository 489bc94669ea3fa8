"""Scores of answers, by the reference libraries, and bootstrap intervals over them.

| metric      | library                          | of a set of answers        |
|-------------|----------------------------------|----------------------------|
| exact_match | SQuAD's definition               | mean                       |
| token_f1    | SQuAD's definition               | mean                       |
| rouge1/2/L  | rouge-score, Unicode words       | mean of the F measures     |
| bleu        | sacrebleu, the language's tokens | corpus BLEU, 0 to 100      |
| chrf        | sacrebleu, chrF2                 | corpus chrF, 0 to 100      |

SQuAD's normalisation (lower case, no punctuation, no articles) is used with Unicode punctuation and with the articles of the
answer's language. rouge-score's own tokenizer knows ASCII letters only and would cut every accented word apart. Scripts without
blanks (Chinese, Japanese, Thai, Lao, Khmer, Burmese) are compared by characters, each with its combining marks; BLEU takes
sacrebleu's tokenizer for them: zh, ja-mecab where it is installed, else char, and 13a for all others. Everything but exact_match, token_f1 and rouge, which are 0 to 1, is on the library's own scale.
"""

from __future__ import annotations

import importlib.util
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import regex
from numpy.typing import NDArray

ARTICLES = {"en": ("a", "an", "the"), "fr": ("le", "la", "les", "l", "un", "une", "des")}
ROUGE = ("rouge1", "rouge2", "rougeL")
NAMES = ("exact_match", "token_f1", *ROUGE, "bleu", "chrf")
Array = NDArray[np.float64]
KANA, CHARACTERS = r"\p{Hiragana}\p{Katakana}", r"\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
NO_BLANKS = rf"\p{{Han}}{KANA}{CHARACTERS}"
ONE_BY_ONE = regex.compile(rf"[{NO_BLANKS}]")
PIECES = regex.compile(rf"(?V1)[{NO_BLANKS}]\p{{M}}*|[\S--[{NO_BLANKS}]]+")
WORDS = regex.compile(rf"(?V1)[{NO_BLANKS}]\p{{M}}*|[[\p{{L}}\p{{M}}\p{{N}}\u200c\u200d]--[{NO_BLANKS}]]+")
"""Letters and digits with their marks and joiners: Hindi writes most of its vowels as marks."""


def normalised_words(text: str, language: str) -> list[str]:
    """Lower-case words without punctuation and articles; in scripts without blanks, characters."""
    text = unicodedata.normalize("NFC", text).lower()
    if language == "fr":
        text = re.sub(r"['’]", " ", text)  # l'acheteur: an article and a word
    text = "".join(c for c in text if not unicodedata.category(c).startswith("P") and c not in "$+<=>^`|~")
    articles = ARTICLES.get(language, ())
    return [piece for word in text.split() if word not in articles for piece in PIECES.findall(word)]


def exact_match(answer: str, reference: str, language: str) -> float:
    return float(normalised_words(answer, language) == normalised_words(reference, language))


def token_f1(answer: str, reference: str, language: str) -> float:
    """Harmonic mean of precision and recall over words (characters in scripts without blanks); two empty answers are equal."""
    got, wanted = normalised_words(answer, language), normalised_words(reference, language)
    if not got or not wanted:
        return float(got == wanted)
    common = sum((Counter(got) & Counter(wanted)).values())
    return 2 * common / (len(got) + len(wanted))


class Words:
    """rouge-score's tokenizer for any script: lower-case runs of letters and digits, or characters where there are no blanks."""

    def tokenize(self, text: str) -> list[str]:
        return [str(word) for word in WORDS.findall(unicodedata.normalize("NFC", text).lower())]


@lru_cache(maxsize=1)
def _rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(ROUGE), tokenizer=Words())


@lru_cache
def _bleu(tokens: str = "13a") -> Any:
    from sacrebleu.metrics import BLEU

    return BLEU(tokenize=tokens)


@lru_cache(maxsize=1)
def _corpus_metrics() -> dict[str, Any]:
    from sacrebleu.metrics import CHRF

    return {"bleu": _bleu(), "chrf": CHRF()}


def bleu_tokens(reference: str, language: str) -> str:
    """The name of sacrebleu's tokenizer for a reference: by its script, for a language may be unknown, and by its language where only Han is in it."""
    if 2 * len(ONE_BY_ONE.findall(reference)) < sum(map(str.isalnum, reference)) or not ONE_BY_ONE.search(reference):
        return "13a"
    if language == "ja" or regex.search(rf"[{KANA}]", reference):
        return "ja-mecab" if all(map(importlib.util.find_spec, ("MeCab", "ipadic"))) else "char"
    return "char" if regex.search(rf"[{CHARACTERS}]", reference) else "zh"


def _bleu_statistics(answers: Sequence[str], references: Sequence[str], languages: Sequence[str]) -> Array:
    """Of n answers, the counts that add up to a corpus BLEU, whatever the tokens were: [n, 10]."""
    groups: dict[str, list[int]] = defaultdict(list)
    for row, (reference, language) in enumerate(zip(references, languages, strict=True)):
        groups[bleu_tokens(reference, language)].append(row)
    found = np.zeros((len(answers), 10))
    for tokens, rows in groups.items():
        found[rows] = _bleu(tokens)._extract_corpus_statistics([answers[r] for r in rows], [[references[r] for r in rows]])
    return found


@dataclass(frozen=True)
class Scores:
    """Of n answers: values whose mean is the metric (n each), and for corpus metrics the statistics that add up to it ([n, k])."""

    means: dict[str, Array]
    statistics: dict[str, Array]

    def __len__(self) -> int:
        return len(self.means["token_f1"])

    def of(self, rows: NDArray[np.int64]) -> Scores:
        """The scores of some of the answers."""
        return Scores({k: v[rows] for k, v in self.means.items()}, {k: v[rows] for k, v in self.statistics.items()})

    def values(self, weights: Array | None = None) -> dict[str, Array]:
        """Each metric for each row of `weights` [r, n], how often each answer counts; without weights, once: [1]."""
        weights = np.ones((1, len(self))) if weights is None else weights
        found = {name: weights @ values / weights.sum(1) for name, values in self.means.items()}
        for name, statistics in self.statistics.items():
            compute = _corpus_metrics()[name]._compute_score_from_stats
            found[name] = np.array([compute(row.tolist()).score for row in np.rint(weights @ statistics).astype(np.int64)])
        return {name: found[name] for name in NAMES}


def score(answers: Sequence[str], references: Sequence[str], languages: Sequence[str]) -> Scores:
    """Scores every answer against its reference."""
    rows = list(zip(answers, references, languages, strict=True))
    means = {"exact_match": [exact_match(*r) for r in rows], "token_f1": [token_f1(*r) for r in rows]}
    rouges = [_rouge().score(reference, answer) for answer, reference, _ in rows]
    for name in ROUGE:
        means[name] = [r[name].fmeasure for r in rouges]
    chrf = _corpus_metrics()["chrf"]._extract_corpus_statistics(list(answers), [list(references)])
    statistics = {"bleu": _bleu_statistics(answers, references, languages), "chrf": chrf}
    return Scores({k: np.array(v, np.float64) for k, v in means.items()}, {k: np.array(v, np.float64) for k, v in statistics.items()})


def resampling(count: int, resamples: int, seed: int) -> Array:
    """How often each of `count` items is drawn in each bootstrap sample: [resamples, count]."""
    return np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples).astype(np.float64)


@dataclass(frozen=True)
class Estimate:
    """A value with its percentile bootstrap interval."""

    value: float
    low: float
    high: float

    @property
    def beyond_chance(self) -> bool:
        """Of a change: whether its interval leaves zero out."""
        return self.low > 0 or self.high < 0


def estimate(value: float, samples: Array, confidence: float) -> Estimate:
    low, high = np.quantile(samples, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(float(value), float(low), float(high))
