"""Duplicates: pure functions against brute force, and recall on planted copies of known Jaccard."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipelines.dedup import (
    SET_SIZE,
    bands,
    candidate_pairs,
    comparable,
    components,
    exact_duplicates,
    jaccard,
    runs,
    shingles,
    similar,
    word_hashes,
)


def shingle_set(text: str) -> np.ndarray:
    return comparable(runs(word_hashes(text), 5))


def reference_jaccard(a: str, b: str) -> float:
    """Jaccard of the five-word runs, by Python sets of strings."""
    def grams(text: str) -> set[tuple[str, ...]]:
        words = text.lower().split()
        return {tuple(words[n : n + 5]) for n in range(max(1, len(words) - 4))}

    x, y = grams(a), grams(b)
    return len(x & y) / len(x | y)


@given(st.lists(st.sampled_from("abcd"), max_size=30), st.lists(st.sampled_from("abcd"), max_size=30))
def test_jaccard_equals_that_of_python_sets(a: list[str], b: list[str]):
    x, y = " ".join(a), " ".join(b)
    assert jaccard(shingle_set(x), shingle_set(y)) == pytest.approx(reference_jaccard(x, y))
    for threshold in (0.3, 0.5, 0.8):
        assert similar(shingle_set(x), shingle_set(y), threshold) == (reference_jaccard(x, y) >= threshold)


def test_jaccard_of_large_sets_is_close():
    draw = np.random.default_rng(0)
    pool = draw.integers(0, 2**63, 30_000, dtype=np.uint64)
    for share in (0.2, 0.5, 0.8, 0.95):
        size = 10_000
        overlap = int(2 * size * share / (1 + share))
        a, b = pool[:size], np.r_[pool[:overlap], pool[size : 2 * size - overlap]]
        exact = len(np.intersect1d(a, b)) / len(np.union1d(a, b))
        assert len(comparable(a)) == SET_SIZE
        assert abs(jaccard(comparable(a), comparable(b)) - exact) < 0.035


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=40))
def test_exact_duplicates_keep_the_first(hashes: list[tuple[int, int]]):
    documents = np.arange(len(hashes), dtype=np.int64)
    high, low = (np.array([h[n] for h in hashes], np.uint64) for n in (0, 1))
    expected = [[n, hashes.index(h)] for n, h in enumerate(hashes) if hashes.index(h) != n]
    assert sorted(exact_duplicates(high, low, documents).tolist()) == expected


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60))
def test_components_equal_a_walk(edges: list[tuple[int, int]]):
    pairs = np.array([sorted(e) for e in edges], np.int64).reshape(-1, 2)
    documents, roots = components(pairs)
    neighbours = {d: {d} for e in edges for d in e}
    for a, b in edges:
        neighbours[a].add(b), neighbours[b].add(a)
    for document, root in zip(documents.tolist(), roots.tolist(), strict=True):
        seen, todo = set(), [document]
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += neighbours[node]
        assert root == min(seen)


def test_large_buckets_stay_connected():
    hashes, documents = np.zeros(50, np.uint64), np.arange(50)
    pairs = candidate_pairs(hashes, documents)
    assert len(pairs) < 100 and set(components(pairs)[1].tolist()) == {0}


def planted(draw: random.Random, target: float) -> tuple[str, str]:
    """A text of 300 random words and a copy with about this Jaccard: some words are replaced."""
    words = [f"w{draw.randrange(20_000)}" for _ in range(300)]
    copy = list(words)
    best = 1.0
    for position in draw.sample(range(300), 300):
        if best <= target:
            break
        copy[position] = f"x{draw.randrange(20_000)}"
        best = reference_jaccard(" ".join(words), " ".join(copy))
    return " ".join(words), " ".join(copy)


@pytest.mark.parametrize(("target", "least", "most"), [(0.95, 0.97, 1.0), (0.85, 0.97, 1.0), (0.75, 0.0, 0.05), (0.6, 0.0, 0.0)])
def test_planted_copies(target: float, least: float, most: float):
    draw = random.Random(3)
    pairs = [planted(draw, target + 0.02 if target > 0.8 else target) for _ in range(150)]
    texts = [t for pair in pairs for t in pair]
    sets = [shingle_set(t) for t in texts]
    hashes = bands(sets)
    documents = np.repeat(np.arange(len(texts)), hashes.shape[1])
    merged = {tuple(p) for p in candidate_pairs(hashes.ravel(), documents).tolist() if jaccard(sets[p[0]], sets[p[1]]) >= 0.8}
    recall = sum((2 * n, 2 * n + 1) in merged for n in range(len(pairs))) / len(pairs)
    false = sum(b != a + 1 or a % 2 for a, b in merged)
    print(f"Jaccard {target}: merged {recall:.3f}, false merges {false}")
    assert least <= recall <= most and false == 0


def test_conversations_are_copies_when_they_say_the_same():
    """Ten questions on one contract share nine tenths of their words, and are ten examples; another system's text makes no other example."""
    clause = " ".join(f"word{n}" for n in range(700))
    asked = [("system", "You are a lawyer."), ("user", f"{clause}\n\nIs the lessor liable?"), ("assistant", "Yes.")]
    other = [("user", f"{clause}\n\nMay the tenant sublet?"), ("assistant", "Yes.")]
    again = [("user", f"{clause.upper()}\n\nIs the lessor liable"), ("assistant", "yes!")]
    sets = [comparable(shingles("", turns)) for turns in (asked, other, again)]
    assert jaccard(sets[0], sets[1]) == 0 and jaccard(sets[0], sets[2]) == 1
    hashes = bands(sets)
    assert (hashes[0] == hashes[2]).all() and not (hashes[0] == hashes[1]).any()
    assert jaccard(comparable(shingles(asked[1][1])), comparable(shingles(other[0][1]))) > 0.9, "as documents they would be near copies"

