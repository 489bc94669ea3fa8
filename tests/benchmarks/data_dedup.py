"""Near duplicates against datasketch, on one core: the same texts, five-word runs, 128 permutations, threshold 0.8.

    python tests/benchmarks/data_dedup.py [TEXTS.jsonl]      (needs: pip install datasketch)

datasketch proposes pairs by its LSH and leaves the decision to the estimate; here proposed pairs are decided on the sets.
"""

from __future__ import annotations

import numpy as np
from data_texts import cpu_seconds, file_of_texts, texts_of

from data_pipelines import dedup
from data_pipelines.clean import normalise

MEGABYTES = 60


def ours(texts: list[str]) -> set[tuple[int, int]]:
    """As the pipeline does it: bands of every text; sets of those in a proposed pair only."""
    hashes = []
    for start in range(0, len(texts), 256):
        batch = [dedup.runs(dedup.word_hashes(t), 5) for t in texts[start : start + 256]]
        hashes.append(dedup.bands(batch, np.zeros(len(batch), np.uint64)))
    pairs = dedup.candidate_pairs(np.concatenate(hashes).ravel(), np.repeat(np.arange(len(texts)), dedup.BANDS))
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
    texts = [normalise(t) for t in texts_of(file_of_texts(MEGABYTES), MEGABYTES)]
    size = sum(len(t.encode()) for t in texts) / 1e6
    print(f"{len(texts):,} documents, {size:.1f} MB")
    dedup.word_hashes(texts[0])
    our_seconds, our_pairs = cpu_seconds(lambda: ours(texts))
    print(f"ours: {size / our_seconds:.1f} MB/s, {our_seconds:.1f} CPU s, {len(our_pairs):,} pairs, decided on the sets")
    their_seconds, their_pairs = cpu_seconds(lambda: theirs(texts))
    print(f"datasketch: {size / their_seconds:.1f} MB/s, {their_seconds:.1f} CPU s, {len(their_pairs):,} pairs, by estimate")
    print(f"ratio {their_seconds / our_seconds:.1f}x")


if __name__ == "__main__":
    main()
