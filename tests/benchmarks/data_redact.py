"""MB of text per CPU second of each cleaning step, redaction first, on one core. Promised: 100 MB/s of redaction.

usage: python tests/benchmarks/data_redact.py      (texts: see data_texts.py)
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable

import numpy as np
from data_texts import MEGABYTES, cpu_seconds, file_of_texts, shown, table, texts_of

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
    raw = texts_of(file_of_texts(), MEGABYTES)
    size = sum(len(t.encode()) for t in raw) / 1e6
    texts = [clean.normalise(t) for t in raw]
    redacted(texts[:100], KINDS)
    counts = {name: redacted(texts, kinds) for name, kinds in {"redact, all kinds but names": DEFAULT, "redact, names too": KINDS}.items()}
    steps: dict[str, Callable[[], object]] = {
        "redact, all kinds but names": lambda: redacted(texts, DEFAULT),
        "redact, names too": lambda: redacted(texts, KINDS),
        "normalise": lambda: [clean.normalise(t) for t in raw],
        "sections and boilerplate": lambda: [clean.structured(t) for t in texts],
        "language": lambda: [clean.language(t, ("en", "fr")) for t in texts],
        "five-word runs": lambda: [np.unique(dedup.runs(dedup.word_hashes(t), 5)) for t in texts],
    }
    rates = {name: [size / cpu_seconds(step)[0] for _ in range(3)] for name, step in steps.items()}
    print(f"{len(raw):,} documents, {size:.1f} MB; MB per CPU second, median of 3 (least to most)\n")
    print(table(("step", "MB/s", "finds"), [(name, shown(found, 0), f"{counts[name]:,}" if name in counts else "") for name, found in rates.items()]))
    print(json.dumps({"megabytes": size, "mb_per_s": {name: statistics.median(found) for name, found in rates.items()}}))


if __name__ == "__main__":
    main()
