"""The stages that find duplicates over all shards, and the record of what stands for what.

| stage      | a unit is                    | gives                                                                   |
|------------|------------------------------|-------------------------------------------------------------------------|
| candidates | a partition of the hashes    | exact duplicates, and pairs that share a band                           |
| fetch      | a shard's documents in pairs | their place, content hash and sets of word runs, by verify unit         |
| verify     | some thousand pairs          | those whose Jaccard reaches `data.near_duplicates`                       |

Of the documents that equal or near pairs connect, the one with the smallest content hash is kept: a choice by content, not
by order. The driver holds numbers of duplicate documents, never text.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_pipelines import dedup
from data_pipelines.extract import SHARD_BITS
from data_pipelines.files import read_partition, write_partitions
from data_pipelines.progress import Progress
from data_pipelines.work import Result, Unit, digest_of, run_stage
from raytune70b.storage import Folder

SETS = pa.schema([("document", pa.int64()), ("set", pa.list_(pa.uint64()))])
PAIRS_PER_UNIT = 20_000
REPORT = pa.schema([("source", pa.string()), ("line", pa.int64()), ("kind", pa.string()), ("kept_source", pa.string()), ("kept_line", pa.int64())])


@dataclass(frozen=True)
class Candidates:
    extracted: Folder
    keys: tuple[str, ...]
    partition: int


def candidates(payload: Candidates, out: Folder, key: str) -> Result:
    """Writes `KEY.exact.npy` (duplicate, kept) and `KEY.pairs.npy`."""
    exact = [read_partition(payload.extracted, f"{k}.exact.arrow", payload.partition) for k in payload.keys]
    high, low, documents = (np.concatenate([batch.column(n).to_numpy() for batch in exact]) for n in range(3))
    duplicates = dedup.exact_duplicates(high, low, documents)
    bands = [read_partition(payload.extracted, f"{k}.bands.arrow", payload.partition) for k in payload.keys]
    hashes, owners = (np.concatenate([batch.column(n).to_numpy() for batch in bands]) for n in (0, 2))
    halves = np.concatenate([batch.column(1).flatten().to_numpy() for batch in bands]).reshape(-1, dedup.HALVES)
    pairs = dedup.candidate_pairs(hashes, halves, owners)
    out.write(f"{key}.exact", duplicates.tobytes())
    out.write(f"{key}.pairs", pairs.tobytes())
    return {"counts": {"exact": len(duplicates), "pairs": len(pairs)}}


def _read_pairs(folder: Folder, name: str) -> np.ndarray:
    return np.frombuffer(folder.read(name), np.int64).reshape(-1, 2)


@dataclass(frozen=True)
class Fetch:
    extracted: Folder
    document_key: str
    rows: np.ndarray
    """Rows of the shard whose place is wanted, ascending."""
    units: tuple[np.ndarray, ...]
    """For each verify unit the rows whose sets it wants."""
    first: int


def fetch(payload: Fetch, out: Folder, key: str) -> Result:
    """Writes `KEY.places.parquet` (document, hash, source, line), and `KEY.sets.arrow` with a partition for each verify unit."""
    places, sets, wanted = [], {}, set(np.concatenate([*payload.units, np.zeros(0, np.int64)]).tolist())
    with payload.extracted.open(f"{payload.document_key}.parquet") as source:
        parquet, start = pq.ParquetFile(source), 0
        for group in range(parquet.num_row_groups):
            stop = start + parquet.metadata.row_group(group).num_rows
            rows = payload.rows[np.searchsorted(payload.rows, start) : np.searchsorted(payload.rows, stop)]
            if len(rows):
                table = parquet.read_row_group(group, ["text", "chat", "hash", "source", "line"]).take(rows - start)
                for row, text, chat in zip(rows.tolist(), table["text"].to_pylist(), table["chat"].to_pylist(), strict=True):
                    if row in wanted:
                        sets[row] = dedup.comparable(dedup.shingles(text, json.loads(text) if chat else None))
                places.append(table.select(["hash", "source", "line"]).add_column(0, "document", pa.array(payload.first + rows)))
            start = stop
    sink = pa.BufferOutputStream()
    pq.write_table(pa.concat_tables(places), sink)
    out.write(f"{key}.places.parquet", sink.getvalue())
    write_partitions(out, f"{key}.sets.arrow", SETS, [(payload.first + rows, [sets[r] for r in rows.tolist()]) for rows in payload.units])
    return {"counts": {"fetched": len(payload.rows)}}


@dataclass(frozen=True)
class Verify:
    fetched: Folder
    keys: tuple[str, ...]
    unit: int
    pairs: np.ndarray
    threshold: float


def verify(payload: Verify, out: Folder, key: str) -> Result:
    """Writes `KEY.pairs`: the pairs that are near duplicates indeed."""
    sets: dict[int, np.ndarray] = {}
    for name in payload.keys:
        batch = read_partition(payload.fetched, f"{name}.sets.arrow", payload.unit)
        values, offsets = batch.column(1).values.to_numpy(), batch.column(1).offsets.to_numpy()
        for n, document in enumerate(batch.column(0).to_pylist()):
            sets[document] = values[offsets[n] : offsets[n + 1]]
    near = [dedup.similar(sets[a], sets[b], payload.threshold) for a, b in payload.pairs.tolist()]
    out.write(f"{key}.pairs", np.ascontiguousarray(payload.pairs[np.array(near, bool)]).tobytes())
    return {"counts": {"near": sum(near)}}


@dataclass(frozen=True)
class Duplicates:
    """What is dropped, and why."""

    dropped: dict[int, np.ndarray]
    """Shard index -> rows, ascending."""
    counts: dict[str, int]
    report: pa.Table
    groups: list[int]
    """Sizes of the groups of duplicates."""


def find_duplicates(work: Folder, extracts: list[Unit], partitions: int, threshold: float, progress: Progress) -> Duplicates:
    """Runs the three stages over the extracted shards."""
    keys, extracted = tuple(u.key for u in extracts), work / "extract"
    units = [Unit(digest_of("candidates", keys, p), Candidates(extracted, keys, p)) for p in range(partitions)]
    run_stage("candidates", work, candidates, units, progress)
    exact = np.concatenate([_read_pairs(work / "candidates", f"{u.key}.exact") for u in units])
    pairs = dedup.unique_pairs(_read_pairs(work / "candidates", f"{u.key}.pairs") for u in units)
    pairs = dedup.originals(pairs, exact)  # in a large bucket the one that stands for it may have other pairs
    if threshold == 0:
        pairs = pairs[:0]
    chunks = _by_component(pairs)
    fetches = _fetch_units(extracts, extracted, np.unique(np.r_[exact.ravel(), pairs.ravel()]), chunks)
    run_stage("fetch", work, fetch, fetches, progress)
    fetched = tuple(u.key for u in fetches)
    verifies = [
        Unit(digest_of("verify", fetched, n, threshold, c.tobytes().hex()), Verify(work / "fetch", fetched, n, c, threshold)) for n, c in enumerate(chunks)
    ]
    run_stage("verify", work, verify, verifies, progress)
    near = dedup.unique_pairs(_read_pairs(work / "verify", f"{u.key}.pairs") for u in verifies)
    places = [_places(work / "fetch", k) for k in fetched]
    return _decided(exact, near, pa.concat_tables(places) if places else None)


def _places(folder: Folder, key: str) -> pa.Table:
    with folder.open(f"{key}.places.parquet") as source:
        return pq.read_table(source)


def _by_component(pairs: np.ndarray) -> list[np.ndarray]:
    """The pairs in units of bounded size, those of one component in the same or in following units."""
    if not len(pairs):
        return []
    documents, roots = dedup.components(pairs)
    order = np.argsort(roots[np.searchsorted(documents, pairs[:, 0])], kind="stable")
    return [pairs[order[n : n + PAIRS_PER_UNIT]] for n in range(0, len(pairs), PAIRS_PER_UNIT)]


def _fetch_units(extracts: list[Unit], extracted: Folder, wanted: np.ndarray, chunks: list[np.ndarray]) -> list[Unit]:
    """One unit for each shard that has a document among those wanted."""
    sought = [np.unique(c) for c in chunks]
    found = []
    for unit in extracts:
        index = unit.payload.shard.index
        rows = _rows_of(wanted, index)
        if len(rows):
            by_unit = tuple(_rows_of(s, index) for s in sought)
            name = digest_of("fetch", unit.key, rows.tobytes().hex(), [r.tobytes().hex() for r in by_unit])
            found.append(Unit(name, Fetch(extracted, unit.key, rows, by_unit, index << SHARD_BITS)))
    return found


def _rows_of(documents: np.ndarray, shard: int) -> np.ndarray:
    first, last = np.searchsorted(documents, [shard << SHARD_BITS, (shard + 1) << SHARD_BITS])
    return documents[first:last] - (shard << SHARD_BITS)


def _decided(exact: np.ndarray, near: np.ndarray, places: pa.Table | None) -> Duplicates:
    if places is None:
        return Duplicates({}, {"exact": 0, "near": 0}, REPORT.empty_table(), [])
    numbers = places["document"].to_numpy()
    order = np.argsort(numbers)
    numbers, places = numbers[order], places.take(order)
    hashes = places["hash"].to_pylist()
    kept: dict[int, int] = {}  # dropped document -> the one that stands for it
    groups = []
    for members in _groups(near):
        best = min(members, key=lambda d: hashes[np.searchsorted(numbers, d)])
        kept.update((d, best) for d in members if d != best)
        groups.append(len(members))
    kinds = dict.fromkeys(kept, "near")
    for duplicate, original in exact.tolist():
        kept[duplicate], kinds[duplicate] = kept.get(original, original), "exact"
    dropped = np.array(sorted(kept), np.int64)
    standing = np.array([kept[d] for d in dropped.tolist()], np.int64)
    by_shard: dict[int, np.ndarray] = {int(s): _rows_of(dropped, int(s)) for s in np.unique(dropped >> SHARD_BITS)}
    counts = {kind: sum(k == kind for k in kinds.values()) for kind in ("exact", "near")}
    return Duplicates(by_shard, counts, _report(places, numbers, dropped, standing, kinds), groups)


def _groups(near: np.ndarray) -> list[list[int]]:
    if not len(near):
        return []
    members: dict[int, list[int]] = defaultdict(list)
    for document, root in zip(*(a.tolist() for a in dedup.components(near)), strict=True):
        members[root].append(document)
    return [members[r] for r in sorted(members)]


def _report(places: pa.Table, numbers: np.ndarray, dropped: np.ndarray, standing: np.ndarray, kinds: dict[int, str]) -> pa.Table:
    """A row for each dropped document: where it stood, and where the one stands that is kept for it."""
    def columns(documents: np.ndarray) -> list[Any]:
        found = places.take(np.searchsorted(numbers, documents))
        return [found["source"], found["line"]]

    kind = pa.array([kinds[d] for d in dropped.tolist()], pa.string())
    source, line = columns(dropped)
    kept_source, kept_line = columns(standing)
    return pa.table([source, line, kind, kept_source, kept_line], schema=REPORT)
