"""Finds exact and near duplicates: pure functions of arrays, put together by `stages` and `build`.

A text is the set of its runs of five words. MinHash (rensa, 128 permutations) and 16 bands of 8 propose pairs - a pair
of Jaccard 0.85 is missed with probability 0.006 - and the sets themselves decide: no estimate removes a document. Of a
set larger than `SET_SIZE` only the smallest hashes are compared, which keeps a pair's error below 0.02.

Documents of one template fall by thousands into one bucket of a band, where not all can be paired: there the halves of the next
four bands, of four permutations each, tell copies from the rest. Among 25,000 of Jaccard 0.7 a pair of 0.85 is missed with probability 0.015.

Memory: a document weighs 528 bytes on disk while pairs are proposed, and partitions by hash bound what one worker holds;
texts' sets are loaded for proposed pairs only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

PERMUTATIONS, BANDS = 128, 16
SHINGLE_WORDS = 5
SET_SIZE = 2048
SMALL_BUCKET = 8
HALVES = 8
"""Of bands, beside each band: what tells copies from the rest in a large bucket."""
OPENING_CHARACTERS = 50
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
Pairs = np.ndarray
"""int64 [n, 2]: two document numbers, the smaller first."""


class _Words(dict):
    """Word -> 64-bit hash, the same in every process; kept, since words come again."""

    def __missing__(self, word: bytes) -> int:
        if len(self) > 500_000:
            self.clear()
        value = self[word] = xxhash.xxh3_64_intdigest(word)
        return value


_words = _Words()
_UNWORD = bytes(c if c >= 128 or chr(c).isalnum() else 32 for c in range(256))


def word_hashes(text: str) -> np.ndarray:
    """uint64 hashes of the words, lower case, without ASCII punctuation."""
    words = text.lower().encode().translate(_UNWORD).split()
    return np.fromiter(map(_words.__getitem__, words), np.uint64, len(words))


def shingles(text: str, turns: list[tuple[str, str]] | None = None) -> np.ndarray:
    """uint64 hashes of a document's runs of five words. Of a conversation, `turns`, one hash of all its words but the system's.

    So conversations are near copies only if they say the same in other case, punctuation or layout: ten questions on one contract share nine
    tenths of their words, and are ten examples.
    """
    if turns is None:
        return runs(word_hashes(text), SHINGLE_WORDS)
    words = word_hashes("\n\n".join(f"{role} {content}" for role, content in turns if role != "system"))
    return runs(words, len(words))


def runs(hashes: np.ndarray, length: int) -> np.ndarray:
    """uint64 hashes of all runs of `length` words; of a shorter text, one hash of it all."""
    length = min(length, len(hashes))
    count = len(hashes) - length + 1
    if not len(hashes):
        return hashes
    with np.errstate(over="ignore"):
        mixed = hashes[:count].copy()
        for n in range(1, length):
            mixed = (mixed ^ (mixed >> np.uint64(29))) * GOLDEN + hashes[n : n + count]
        return mixed ^ (mixed >> np.uint64(32))


def bands(sets: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(bands, halves): uint64 [documents, BANDS] and uint16 [documents, BANDS, HALVES]. Sets may hold repeats.

    Equal numbers in a column of the bands propose a pair. Beside each band stand the halves of the following ones, see `candidate_pairs`.
    """
    import rensa

    if not sets:
        return np.zeros((0, BANDS), np.uint64), np.zeros((0, BANDS, HALVES), np.uint16)
    offsets = np.cumsum([0, *map(len, sets)]).astype(np.uint64)
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(np.concatenate(sets), offsets, PERMUTATIONS, 42)
    digests = np.array(matrix.to_rows(), np.uint64)
    halves = _mixed(digests.reshape(len(sets), 2 * BANDS, -1)).astype(np.uint16)
    following = (2 * np.arange(1, BANDS + 1)[:, None] + np.arange(HALVES)) % (2 * BANDS)
    return _mixed(digests.reshape(len(sets), BANDS, -1)), halves[:, following]


def _mixed(digests: np.ndarray) -> np.ndarray:
    """The last axis of [documents, columns, n] as one uint64 each, another for each column."""
    with np.errstate(over="ignore"):
        mixed = np.arange(digests.shape[1], dtype=np.uint64)[None, :] + np.zeros((len(digests), 1), np.uint64)
        for n in range(digests.shape[2]):
            mixed = (mixed ^ (mixed >> np.uint64(29))) * GOLDEN + digests[:, :, n]
        return mixed ^ (mixed >> np.uint64(32))


def exact_duplicates(high: np.ndarray, low: np.ndarray, documents: np.ndarray) -> Pairs:
    """(duplicate, kept) for documents of equal 128-bit hash; the smallest number is kept."""
    order = np.lexsort((documents, low, high))
    high, low, documents = high[order], low[order], documents[order]
    first = np.r_[True, (high[1:] != high[:-1]) | (low[1:] != low[:-1])][: len(order)]
    kept = documents[np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))] if len(order) else documents
    return np.stack([documents[~first], kept[~first]], 1)


def candidate_pairs(hashes: np.ndarray, halves: np.ndarray, documents: np.ndarray) -> Pairs:
    """Pairs that share a band: all in a small bucket; in a large one each with the first, with the next in the order of a half, and all of the
    few that share a half. `hashes` and `documents` are [n], `halves` [n, HALVES]."""
    order = np.lexsort((documents, halves[:, 0], hashes))
    hashes, halves, documents = hashes[order], halves[order], documents[order]
    starts, sizes = _buckets(hashes)
    found = _small(starts, sizes, documents)
    large = np.repeat(sizes > SMALL_BUCKET, sizes)
    bucket, first = (np.repeat(values, sizes)[large] for values in (np.arange(len(sizes)), documents[starts]))
    halves, documents = halves[large], documents[large]
    found.append(np.stack([first, documents], 1))
    inside = bucket[1:] == bucket[:-1]
    found.append(np.stack([documents[:-1][inside], documents[1:][inside]], 1))
    for n in range(halves.shape[1]):
        key = bucket << 16 | halves[:, n]
        order = np.argsort(key, kind="stable")
        found += _small(*_buckets(key[order]), documents[order])
    return unique_pairs(found)


def _buckets(ordered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(starts, sizes) of the stretches of equal numbers."""
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]][: len(ordered)])
    return starts, np.diff(np.r_[starts, len(ordered)])


def _small(starts: np.ndarray, sizes: np.ndarray, documents: np.ndarray) -> list[Pairs]:
    """All pairs within the buckets that are small, those of one size at once."""
    found = []
    for size in range(2, SMALL_BUCKET + 1):
        members = documents[starts[sizes == size][:, None] + np.arange(size)]
        a, b = np.triu_indices(size, 1)
        found.append(np.stack([members[:, a].ravel(), members[:, b].ravel()], 1))
    return found


def originals(pairs: Pairs, exact: Pairs) -> Pairs:
    """The pairs with each exact duplicate, (duplicate, kept), in the place of the one that is kept for it."""
    if not len(exact) or not len(pairs):
        return unique_pairs([pairs])
    order = np.argsort(exact[:, 0])
    duplicates, kept = exact[order, 0], exact[order, 1]
    at = np.minimum(np.searchsorted(duplicates, pairs), len(duplicates) - 1)
    return unique_pairs([np.where(duplicates[at] == pairs, kept[at], pairs)])


def opening(turns: Sequence[tuple[str, str]]) -> bytes:
    """16 bytes that conversations share which begin with the same questions and answers, by their words, whatever the system says.

    A conversation and its continuation begin alike: up to the first answer behind a question with which `OPENING_CHARACTERS` are said. With
    less than those, "Hello" and what is answered to it would put all conversations of some sources into one split.
    """
    said, characters, asked = list[str](), 0, False
    for role, content in turns:
        if role != "system":
            said.append(f"{role} {content}")
            characters, asked = characters + len(content), asked or role == "user"
        if role == "assistant" and asked and characters >= OPENING_CHARACTERS:
            break
    return xxhash.xxh3_128_digest(word_hashes("\n\n".join(said)).tobytes())


def unique_pairs(found: Iterable[Pairs]) -> Pairs:
    """The pairs once each, in order, the smaller number first; none of a document with itself."""
    parts = [p for p in found if len(p)]
    if not parts:
        return np.zeros((0, 2), np.int64)
    pairs = np.sort(np.concatenate(parts), axis=1)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    return pairs[np.r_[True, (pairs[1:] != pairs[:-1]).any(axis=1)]] if len(pairs) else pairs


def comparable(shingles: np.ndarray) -> np.ndarray:
    """The set of a text: sorted, at most the `SET_SIZE` smallest."""
    return distinct(shingles)[:SET_SIZE]


def distinct(values: np.ndarray) -> np.ndarray:
    """The different values, ascending: by sorting, which is three times as fast here as NumPy's hash table."""
    ordered = np.sort(values)
    first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Jaccard of two sets as `comparable` makes them: exact where both are whole, else over the smallest of their union."""
    if not len(a) or not len(b):
        return float(len(a) == len(b))
    if max(len(a), len(b)) == SET_SIZE:
        limit = distinct(np.concatenate([a, b]))[:SET_SIZE][-1]
        a, b = a[a <= limit], b[b <= limit]
    both = np.sort(np.concatenate([a, b]))
    shared = int((both[1:] == both[:-1]).sum())
    return shared / (len(a) + len(b) - shared)


def similar(a: np.ndarray, b: np.ndarray, threshold: float) -> bool:
    """Whether the Jaccard of two sets reaches the threshold; sizes that rule it out spare the comparison."""
    small, large = sorted((len(a), len(b)))
    if large < SET_SIZE and small < threshold * large:
        return False
    return jaccard(a, b) >= threshold


def components(pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """(documents, root of each): what the pairs connect; the root is the smallest number of its component."""
    documents, index = np.unique(pairs, return_inverse=True)
    index = index.reshape(-1, 2)
    root = np.arange(len(documents))
    while True:  # the smaller root spreads along every edge, and paths are halved, until nothing moves
        low = np.minimum(root[index[:, 0]], root[index[:, 1]])
        new = root.copy()
        np.minimum.at(new, index[:, 0], low)
        np.minimum.at(new, index[:, 1], low)
        np.minimum.at(new, root, new.copy())
        new = new[new]
        if np.array_equal(new, root):
            return documents, documents[root]
        root = new
