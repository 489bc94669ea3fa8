"""Duplicates: pure functions against brute force, and recall on planted copies of known Jaccard."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipelines.dedup import (
    HALVES,
    SET_SIZE,
    bands,
    candidate_pairs,
    comparable,
    components,
    exact_duplicates,
    jaccard,
    opening,
    originals,
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
    pairs = candidate_pairs(hashes, np.zeros((50, HALVES), np.uint16), documents)
    assert len(pairs) < 100 and set(components(pairs)[1].tolist()) == {0}


def proposed(sets: list[np.ndarray]) -> set[tuple[int, int]]:
    hashes, halves = bands(sets)
    return {(a, b) for a, b in candidate_pairs(hashes.ravel(), halves.reshape(-1, HALVES), np.repeat(np.arange(len(sets)), hashes.shape[1])).tolist()}


def of_one_template(draw: np.random.Generator, documents: int, copies: int) -> tuple[list[np.ndarray], list[tuple[int, int]]]:
    """Sets of which any two have Jaccard 0.7, for what they share, and copies of some with about 0.85, in any order; and the places of the copies."""
    template, rest, shared = 168, 36, 19
    def fresh(count: int) -> np.ndarray:
        return draw.integers(0, 2**63, count, dtype=np.uint64)

    common, order = fresh(template), np.argsort(draw.permutation(documents + copies))
    sets = [np.r_[common, fresh(rest)] for _ in range(documents)]
    sets += [np.r_[sets[n][: template + shared], fresh(rest - shared)] for n in range(copies)]
    pairs = [(int(min(p)), int(max(p))) for p in ((order[n], order[documents + n]) for n in range(copies))]
    return [sets[n] for n in np.argsort(order)], pairs


def test_copies_among_thousands_of_one_template_are_proposed():
    """Of those that share a band, which is what the bands promise; most of a large bucket's pairs cannot be."""
    sets, pairs = of_one_template(np.random.default_rng(1), 3000, 300)
    hashes, _ = bands(sets)
    sharing = [p for p in pairs if (hashes[p[0]] == hashes[p[1]]).any()]
    found = proposed(sets)
    recall = sum(p in found for p in sharing) / len(sharing)
    print(f"{len(sharing)} of {len(pairs)} share a band; proposed {recall:.3f} of those with {len(found):,} pairs")
    assert len(sharing) >= 0.98 * len(pairs) and recall >= 0.975 and len(found) < 10 * len(sets)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=20), st.lists(st.integers(0, 6), min_size=21, max_size=21))
def test_an_exact_duplicates_pairs_are_those_of_its_original(edges: list[tuple[int, int]], contents: list[int]):
    exact = np.array([(n, contents.index(c)) for n, c in enumerate(contents) if contents.index(c) != n], np.int64).reshape(-1, 2)
    expected = sorted({(min(p), max(p)) for p in ((contents.index(contents[a]), contents.index(contents[b])) for a, b in edges) if p[0] != p[1]})
    assert originals(np.array(edges, np.int64).reshape(-1, 2), exact).tolist() == [list(p) for p in expected]


def test_conversations_that_begin_alike_have_one_opening():
    first = [("user", "How much notice must a tenant of a flat give?"), ("assistant", "Two months, in writing.")]
    for alike in ([*first, ("user", "And the landlord?"), ("assistant", "Three.")], [("system", "You are a lawyer."), *first], [(r, c.upper()) for r, c in first]):
        assert opening(alike) == opening(first)
    assert opening([*first[:1], ("assistant", "Three months, in writing.")]) != opening(first)


def test_a_greeting_alone_is_no_opening():
    greeting = [("user", "Hello"), ("assistant", "Hi! How can I help?")]
    rest = [[("user", f"May I sublet flat {n} to my own cousin, please?"), ("assistant", "You may.")] for n in range(2)]
    assert len({opening(greeting + r) for r in rest}) == 2 and opening(greeting + rest[0]) == opening(greeting + rest[0] + rest[1])
    welcome = [("assistant", "Welcome to the service desk of the land registry, what can I do?")]
    assert len({opening(welcome + r) for r in rest}) == 2


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
    merged = {(a, b) for a, b in proposed(sets) if jaccard(sets[a], sets[b]) >= 0.8}
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
    hashes, _ = bands(sets)
    assert (hashes[0] == hashes[2]).all() and not (hashes[0] == hashes[1]).any()
    assert jaccard(comparable(shingles(asked[1][1])), comparable(shingles(other[0][1]))) > 0.9, "as documents they would be near copies"

