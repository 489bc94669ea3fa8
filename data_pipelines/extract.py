"""The first stage: a shard of the inputs to clean, redacted documents and what the search for duplicates needs of them.

A unit reads its shard and writes `KEY.parquet` (the documents), `KEY.exact.arrow` and `KEY.bands.arrow` (hashes, by
partition) and, where there are any, `KEY.bad.jsonl` (the quarantine). It holds 256 documents, and 528 bytes of hashes for
every document of the shard.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from data_pipelines import dedup
from data_pipelines.clean import fault, language, normalise, structured
from data_pipelines.files import ParquetSink, batches, write_partitions
from data_pipelines.redact import Redaction, find
from data_pipelines.sources import RAW_BYTES, Bad, InputError, Row, Shard, read_shard
from raytune70b.storage import Folder

DOCUMENTS = pa.schema([
    ("text", pa.string()), ("chat", pa.bool_()), ("hash", pa.binary(16)), ("family", pa.binary(16)), ("language", pa.string()), ("source", pa.string()), ("line", pa.int64()),
])  # fmt: skip
"""`hash`: of the text. `family`: what decides the split, the same for conversations that begin alike; of a document its hash."""
EXACT = pa.schema([("high", pa.uint64()), ("low", pa.uint64()), ("document", pa.int64())])
BANDS = pa.schema([("band", pa.uint64()), ("halves", pa.list_(pa.uint16(), dedup.HALVES)), ("document", pa.int64())])
BATCH = 256
SHARD_BITS = 32
"""A document's number is its shard's index, shifted by so much, plus its row in the shard."""
CONTAMINATION_WORDS = 13
SAMPLES = 3
ESCAPED = re.compile(r"\\(u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|U[0-9A-Fa-f]{8}|.)")
ESCAPES = {"n": "\n", "t": "\t", "r": "\n", "b": " ", "f": "\n"}
MASKED = re.compile(r"\[[A-Z]+_\d+\]|[^\W_]")


@dataclass(frozen=True)
class Rules:
    """The settings that shape the documents."""

    columns: dict[str, str]
    languages: tuple[str, ...]
    min_words: int
    redact: tuple[str, ...]
    near: bool
    partitions: int
    evaluation: str = ""
    """Name of the file of evaluation hashes in the work folder; empty where there is none."""


@dataclass(frozen=True)
class Extract:
    shard: Shard
    rules: Rules
    work: Folder


@dataclass
class _Kept:
    """A document that passed every rule."""

    row: Row
    text: str
    language: str
    words: np.ndarray


@dataclass
class _Tally:
    counts: Counter[str] = field(default_factory=Counter)
    quarantined: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    redactions: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    lengths: Counter[str] = field(default_factory=Counter)
    samples: list[tuple[str, str]] = field(default_factory=list)

    def result(self) -> dict[str, Any]:
        return {k: dict(sorted(v.items())) if isinstance(v, Counter) else v for k, v in vars(self).items()}


@lru_cache(maxsize=1)
def _evaluation_hashes(work: str, name: str) -> np.ndarray:
    return np.frombuffer(Folder(work).read(name), np.uint64) if name else np.zeros(0, np.uint64)


def extract(payload: Extract, out: Folder, key: str) -> dict[str, Any]:
    """Runs one unit; the result counts every row: read = quarantined + dropped + documents."""
    tally, bad, rules = _Tally(), [], payload.rules

    def good() -> Iterator[Row]:
        for item in read_shard(payload.shard, rules.columns):
            tally.counts["read"] += item.rows if isinstance(item, Bad) else 1
            if isinstance(item, Bad):
                tally.quarantined[item.reason.split(":")[0]] += item.rows
                bad.append(_shown(item, rules.redact))
            else:
                yield item

    contaminated = _evaluation_hashes(payload.work.uri, rules.evaluation)
    first, digests, band_rows = payload.shard.index << SHARD_BITS, [], []
    with ParquetSink(out, f"{key}.parquet", DOCUMENTS) as sink:
        for rows in batches(good(), BATCH):
            kept = [k for k in (_judged(row, rules, contaminated, tally) for row in rows) if k is not None]
            hashes = [xxhash.xxh3_128_digest(k.text.encode()) for k in kept]
            turns = [json.loads(k.text) if k.row.messages else None for k in kept]
            families = [h if t is None else dedup.opening(t) for h, t in zip(hashes, turns, strict=True)]
            sink.write([[k.text for k in kept], [t is not None for t in turns], hashes, families, [k.language for k in kept],
                        [k.row.source for k in kept], [k.row.line for k in kept]])  # fmt: skip
            digests += hashes
            if rules.near:
                band_rows.append(dedup.bands([dedup.runs(k.words, dedup.SHINGLE_WORDS) if t is None else dedup.shingles(k.text, t) for k, t in zip(kept, turns, strict=True)]))
    _write_hashes(out, key, first, digests, band_rows, rules.partitions)
    if bad:
        out.write(f"{key}.bad.jsonl", ("\n".join(bad) + "\n").encode())
    return tally.result()


def _shown(bad: Bad, kinds: Any) -> str:
    """A bad row for people to look at, cleaned as the others are, so that personal data is found and replaced as in them."""
    redaction = Redaction(kinds)
    start = bad.raw[: 100 * RAW_BYTES].decode("utf-8", "backslashreplace")  # of a whole file that is bad, little is shown
    raw, reason = (redaction.apply(normalise(text)) for text in (_unescaped(start), bad.reason))
    return dataclasses.replace(bad, raw=raw.encode(), reason=reason).to_json()


def _unescaped(raw: str) -> str:
    """A line of JSON, or what repr writes, with the characters that its escapes stand for: the letter of \\n hides the word behind it."""
    text = ESCAPED.sub(lambda m: ESCAPES.get(m[1], m[1]) if len(m[1]) == 1 else chr(min(int(m[1][1:], 16), 0x10FFFF)), raw)
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _judged(row: Row, rules: Rules, contaminated: np.ndarray, tally: _Tally) -> _Kept | None:
    """The row cleaned and redacted, or None where a rule drops it; all is counted."""
    contents = [normalise(content) for _, content in row.messages] if row.messages else [normalise(row.text)]
    if not row.messages:
        contents[0], removed = structured(contents[0])
        tally.counts["boilerplate lines"] += removed
    joined = "\n\n".join(contents)
    code = language(joined, rules.languages) if rules.languages else "any"
    reason = ""
    if not all(contents):
        reason = "empty after cleaning"
    elif rules.languages and code not in (*rules.languages, "mixed", "unknown"):
        reason = f"language {code}"
    if not reason:
        redaction = Redaction(rules.redact)
        redacted = [redaction.apply(content) for content in contents]
        words = dedup.word_hashes("\n\n".join(_own(row, redacted)))
        reason = "" if row.messages else _fault(redacted[0], words, rules.min_words)
        if not reason and len(contaminated):
            plain = words if redacted == contents else dedup.word_hashes("\n\n".join(_own(row, contents)))  # the evaluation's words are not redacted
            if np.isin(dedup.runs(plain, CONTAMINATION_WORDS), contaminated).any():
                reason = "shares 13 words with the evaluation files"
    if reason:
        tally.dropped[reason] += 1
        return None
    text = json.dumps([(role, c) for (role, _), c in zip(row.messages, redacted, strict=True)], ensure_ascii=False) if row.messages else redacted[0]
    _count(tally, text, code, redaction, joined)
    return _Kept(row, text, code, words)


def _own(row: Row, contents: list[str]) -> list[str]:
    """A row's contents without the system's, which is everybody's."""
    return [c for c, (role, _) in zip(contents, row.messages, strict=True) if role != "system"] if row.messages else contents


def _fault(text: str, words: np.ndarray, min_words: int) -> str:
    shingles = dedup.runs(words, dedup.SHINGLE_WORDS)
    return fault(text, len(words), min_words, len(dedup.distinct(shingles)) / max(1, len(shingles)))


def _count(tally: _Tally, text: str, code: str, redaction: Redaction, before: str) -> None:
    tally.counts["documents"] += 1
    tally.counts["characters"] += len(text)
    tally.languages[code] += 1
    tally.lengths[str(len(text).bit_length())] += 1
    tally.redactions.update(redaction.counts)
    if redaction.counts and len(tally.samples) < SAMPLES:
        tally.samples.append(_sample(before, redaction.kinds))


def _sample(before: str, kinds: Any) -> tuple[str, str]:
    """The finds of the first redacted line, before and after, with 20 characters on each side: letters x, digits 0."""
    line = next(line for line in before.split("\n") if find(line.encode(), kinds))
    data, redaction, shown, after, position = line.encode(), Redaction(kinds), "", "", 0
    for span in find(data, kinds):
        gap, value = data[position : span.start].decode(), data[span.start : span.end]
        if not position or len(gap) > 40:
            gap = (gap[:20] + "…" if position else "") + gap[-20:]
        around = _masked(gap)
        shown += around + _masked(value.decode())
        after += around + redaction.placeholder(span).decode()
        position = span.end
    rest = _masked(data[position:].decode()[:20])
    return (shown + rest)[:400], (after + rest)[:400]


def _masked(text: str) -> str:
    """Letters as x, digits as 0; placeholders stay."""
    return MASKED.sub(lambda m: m[0] if len(m[0]) > 1 else "0" if m[0].isdigit() else "x", text)


def _write_hashes(out: Folder, key: str, first: int, digests: list[bytes], band_rows: list[tuple[np.ndarray, np.ndarray]], partitions: int) -> None:
    words = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)
    numbers = first + np.arange(len(words), dtype=np.int64)
    where = words[:, 0] % np.uint64(partitions)
    write_partitions(out, f"{key}.exact.arrow", EXACT, [(words[where == p, 0], words[where == p, 1], numbers[where == p]) for p in range(partitions)])
    if band_rows:
        values, halves = (np.concatenate(part) for part in zip(*band_rows, strict=True))
        values, halves = values.ravel(), halves.reshape(-1, dedup.HALVES)
        owners = np.repeat(numbers, dedup.BANDS)
        where = values % np.uint64(partitions)
        write_partitions(out, f"{key}.bands.arrow", BANDS, [(values[where == p], pa.FixedSizeListArray.from_arrays(halves[where == p].ravel(), dedup.HALVES), owners[where == p]) for p in range(partitions)])
    else:
        write_partitions(out, f"{key}.bands.arrow", BANDS, [([], [], [])] * partitions)


def evaluation_hashes(shards: list[Shard], columns: dict[str, str]) -> np.ndarray:
    """Sorted hashes of every run of 13 words in the evaluation files; of a shorter text, of all its words. Raises InputError.

    One row that cannot be read is an error: whatever is left out here may be trained on.
    """
    found = [np.zeros(0, np.uint64)]
    for shard in shards:
        for row in read_shard(shard, columns):
            if isinstance(row, Bad):
                raise InputError(f"data.evaluation: {row.source}:{row.line}: {row.reason}; mend the row or take it out (data.columns maps names of columns)")
            texts = [content for role, content in row.messages if role != "system"] or [row.text]
            plain = [normalise(t) for t in [*texts, "\n\n".join(texts)]]
            forms = {*plain, *(structured(t)[0] for t in plain)}  # conversations keep the lines that documents lose as boilerplate
            found += [dedup.runs(dedup.word_hashes(t), CONTAMINATION_WORDS) for t in sorted(forms)]
    hashes = np.unique(np.concatenate(found))
    if not len(hashes):
        raise InputError("data.evaluation: no word in its files, so nothing could be left out for them; give other files, or none")
    return hashes
