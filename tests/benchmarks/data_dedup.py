"""Near duplicates against datasketch, on one core: the same texts, five-word runs, 128 permutations, threshold 0.8. Promised: 3x.

usage: python tests/benchmarks/data_dedup.py [rounds, default 2]      (texts: see data_texts.py; needs: pip install datasketch)

datasketch proposes pairs by its LSH and leaves the decision to the estimate; here proposed pairs are decided on the sets.
"""

from __future__ import annotations

import json
import statistics
import sys

import numpy as np
from data_texts import MEGABYTES, cpu_seconds, file_of_texts, shown, table, texts_of

from data_pipelines import dedup
from data_pipelines.clean import normalise


def ours(texts: list[str]) -> set[tuple[int, int]]:
    """As the pipeline does it: bands of every text; sets of those in a proposed pair only."""
    bands, halves = [], []
    for start in range(0, len(texts), 256):
        batch = [dedup.runs(dedup.word_hashes(t), 5) for t in texts[start : start + 256]]
        for found, part in zip((bands, halves), dedup.bands(batch), strict=True):
            found.append(part)
    pairs = dedup.candidate_pairs(np.concatenate(bands).ravel(), np.concatenate(halves).reshape(-1, dedup.HALVES), np.repeat(np.arange(len(texts)), dedup.BANDS))
    sets = {n: dedup.comparable(dedup.runs(dedup.word_hashes(texts[n]), 5)) for n in np.unique(pairs).tolist()}
    return {(a, b) for a, b in pairs.tolist() if dedup.similar(sets[a], sets[b], 0.8)}


def theirs(texts: list[str]) -> set[tuple[int, int]]:
    from datasketch import MinHash, MinHashLSH

    index, found = MinHashLSH(threshold=0.8, num_perm=128), set()
    for number, text in enumerate(texts):
        words = text.lower().split()
        sketch = MinHash(num_perm=128)
        sketch.update_batch([" ".join(words[n : n + 5]).encode() for n in range(max(1, len(words) - 4))])
        found |= {(other, number) for other in index.query(sketch)}
        index.insert(number, sketch)
    return found


def main() -> None:
    texts = [normalise(t) for t in texts_of(file_of_texts(), MEGABYTES)]
    size = sum(len(t.encode()) for t in texts) / 1e6
    ours(texts[:300])  # libraries are loaded
    theirs(texts[:300])
    rates: dict[str, list[float]] = {"ours": [], "datasketch": []}
    pairs = {}
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 2):
        for name, find in (("ours", ours), ("datasketch", theirs)):
            seconds, found = cpu_seconds(lambda find=find: find(texts))  # type: ignore[misc]
            rates[name].append(size / seconds)
            pairs[name] = len(found)
    ratios = [a / b for a, b in zip(*rates.values(), strict=True)]
    print(f"{len(texts):,} documents, {size:.1f} MB; MB per CPU second\n")
    notes = {"ours": "decided on the sets", "datasketch": "by the estimate"}
    print(table(("", "MB/s", "pairs", ""), [(name, shown(found, 1), f"{pairs[name]:,}", notes[name]) for name, found in rates.items()]))
    print(f"\nratio {shown(ratios)}x")
    print(json.dumps({"ratio": statistics.median(ratios), "mb_per_s": {name: statistics.median(found) for name, found in rates.items()}, "pairs": pairs}))


if __name__ == "__main__":
    main()
