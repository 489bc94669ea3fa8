"""MB of text per CPU second of each cleaning step, redaction first, on one core.

    python tests/benchmarks/data_redact.py [TEXTS.jsonl]
"""

from __future__ import annotations

import numpy as np
from data_texts import cpu_seconds, file_of_texts, texts_of

from data_pipelines import clean, dedup
from data_pipelines.redact import KINDS, Redaction

DEFAULT = tuple(k for k in KINDS if k != "name")


def redacted(texts: list[str], kinds: tuple[str, ...]) -> int:
    found = 0
    for text in texts:
        redaction = Redaction(kinds)
        redaction.apply(text)
        found += sum(redaction.counts.values())
    return found


def main() -> None:
    raw = texts_of(file_of_texts())
    size = sum(len(t.encode()) for t in raw) / 1e6
    texts = [clean.normalise(t) for t in raw]
    print(f"{len(raw):,} documents, {size:.1f} MB")
    for round_ in range(3):
        seconds, found = cpu_seconds(lambda: redacted(texts, DEFAULT))
        print(f"redact, all kinds but names, round {round_}: {size / seconds:.0f} MB/s, {found:,} finds")
    seconds, found = cpu_seconds(lambda: redacted(texts, KINDS))
    print(f"redact, with names: {size / seconds:.0f} MB/s, {found:,} finds")
    for name, action in {
        "normalise": lambda: [clean.normalise(t) for t in raw],
        "sections and boilerplate": lambda: [clean.structured(t) for t in texts],
        "language": lambda: [clean.language(t, ("en", "fr")) for t in texts],
        "five-word runs": lambda: [np.unique(dedup.runs(dedup.word_hashes(t), 5)) for t in texts],
    }.items():
        print(f"{name}: {size / cpu_seconds(action)[0]:.0f} MB/s")


if __name__ == "__main__":
    main()
