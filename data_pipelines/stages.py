"""The stages of the pipeline, each a pure function of one payload: extract, encode, publish.

| stage   | a unit is             | writes                                              |
|---------|-----------------------|-----------------------------------------------------|
| extract | a shard of the inputs | its documents, cleaned; its quarantine              |
| encode  | the same shard        | its kept documents as packed blocks, by split       |
| publish | some encoded shards   | one file of the data set, blocks numbered           |
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from data_pipelines.clean import normalise
from data_pipelines.packing import Piece, best_fit_decreasing, blocks_table
from data_pipelines.sources import Bad, Row, Shard, read_shard
from data_pipelines.tokens import Encoder, load_tokenizer, one_thread
from raytune70b.blocks.manifest import SPLITS, write_block_file
from raytune70b.storage import Folder

DOCUMENTS = pa.schema([("text", pa.string()), ("chat", pa.bool_()), ("hash", pa.binary(16)), ("source", pa.string()), ("line", pa.int64())])
BATCH = 256
WINDOW_BLOCKS = 1024
"""Blocks' worth of pieces that are packed together: what bounds the memory of packing."""


@dataclass(frozen=True)
class Extract:
    shard: Shard
    columns: dict[str, str]


def extract(payload: Extract, out: Folder, key: str) -> dict[str, Any]:
    """Reads a shard; writes `KEY.parquet` (documents) and, where there are any, `KEY.bad.jsonl` (quarantine)."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    bad: list[str] = []

    def good() -> Iterator[Row]:
        for item in read_shard(payload.shard, payload.columns):
            if isinstance(item, Bad):
                reasons[item.reason.split(":")[0]] += item.rows
                bad.append(item.to_json())
            else:
                yield item

    with _Sink(out, f"{key}.parquet", DOCUMENTS) as sink:
        for rows in batches(good(), BATCH):
            texts = [_cleaned(row) for row in rows]
            counts["characters"] += sum(map(len, texts))
            hashes = [xxhash.xxh3_128_digest(t.encode()) for t in texts]
            sink.write([texts, [bool(r.messages) for r in rows], hashes, [r.source for r in rows], [r.line for r in rows]])
            counts["documents"] += len(rows)
    if bad:
        out.write(f"{key}.bad.jsonl", ("\n".join(bad) + "\n").encode())
    return {"counts": dict(counts), "quarantined": dict(reasons)}


def _cleaned(row: Row) -> str:
    if row.messages:
        return json.dumps([(role, normalise(content)) for role, content in row.messages], ensure_ascii=False)
    return normalise(row.text)


class _Sink:
    """A Parquet file of a schema, written batch by batch to memory and then whole."""

    def __init__(self, out: Folder, name: str, schema: pa.Schema):
        self.out, self.name, self.schema = out, name, schema
        self.buffer = pa.BufferOutputStream()
        self.writer = pq.ParquetWriter(self.buffer, schema, compression="zstd")

    def __enter__(self) -> _Sink:
        return self

    def write(self, columns: list[Any]) -> None:
        self.writer.write_table(pa.table([pa.array(c, f.type) for c, f in zip(columns, self.schema, strict=True)], schema=self.schema))

    def __exit__(self, kind: type | None, *_: Any) -> None:
        self.writer.close()
        if kind is None:
            self.out.write(self.name, self.buffer.getvalue())


def batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def documents(out: Folder, key: str, columns: list[str]) -> Iterator[dict[str, list[Any]]]:
    """Batches of an extracted shard's documents."""
    with out.open(f"{key}.parquet") as source:
        for batch in pq.ParquetFile(source).iter_batches(BATCH, columns=columns):
            yield batch.to_pydict()


@dataclass(frozen=True)
class Encode:
    extracted: Folder
    """The folder of the extract stage."""
    document_key: str
    split: np.ndarray
    """For each document of the shard the index of its split, -1 for one that is dropped."""
    tokenizer: Folder
    fingerprint: str
    seq_len: int


@lru_cache(maxsize=1)
def _encoder(tokenizer: str, fingerprint: str, seq_len: int) -> Encoder:
    """The worker's tokenizer, kept between units."""
    one_thread()
    return Encoder(load_tokenizer(tokenizer), seq_len)


@dataclass
class _Packer:
    """Pieces of one split, packed window by window."""

    encoder: Encoder
    pieces: list[Piece] = field(default_factory=list)
    tables: list[pa.Table] = field(default_factory=list)
    waiting: int = 0

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.waiting += len(piece.ids)
        if self.waiting >= WINDOW_BLOCKS * self.encoder.seq_len:
            self.flush()

    def flush(self) -> None:
        bins = best_fit_decreasing([len(p.ids) for p in self.pieces], self.encoder.seq_len)
        if bins:
            self.tables.append(blocks_table(self.pieces, bins, self.encoder.seq_len, self.encoder.pad))
        self.pieces, self.waiting = [], 0


def encode(payload: Encode, out: Folder, key: str) -> dict[str, Any]:
    """Tokenises and packs a shard's kept documents; writes `KEY.SPLIT.parquet` for each split that has blocks."""
    encoder = _encoder(payload.tokenizer.uri, payload.fingerprint, payload.seq_len)
    packers = {split: _Packer(encoder) for split in SPLITS}
    counts: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    first = 0
    for batch in documents(payload.extracted, payload.document_key, ["text", "chat"]):
        splits = payload.split[first : first + len(batch["text"])].tolist()
        first += len(splits)
        kept = [(t, c, SPLITS[s]) for t, c, s in zip(batch["text"], batch["chat"], splits, strict=True) if s >= 0]
        for split, pieces in _encoded(encoder, kept, counts, dropped):
            for piece in pieces:
                packers[split].add(piece)
    rows = {}
    for split, packer in packers.items():
        packer.flush()
        rows[split] = sum(t.num_rows for t in packer.tables)
        if rows[split]:
            sink = pa.BufferOutputStream()
            pq.write_table(pa.concat_tables(packer.tables), sink, compression="zstd", compression_level=1, use_dictionary=False, write_statistics=False)
            out.write(f"{key}.{split}.parquet", sink.getvalue())
    return {"counts": dict(counts), "dropped": dict(dropped), "rows": rows}


def _encoded(encoder: Encoder, kept: list[tuple[str, bool, str]], counts: Counter, dropped: Counter) -> Iterator[tuple[str, list[Piece]]]:
    """(split, pieces to pack) of every document, in order; tokens and drops are counted on the way."""
    texts = iter(encoder.documents([t for t, chat, _ in kept if not chat]))
    chats = iter(encoder.conversations([json.loads(t) for t, chat, _ in kept if chat]))
    for _, chat, split in kept:
        made = next(chats) if chat else next(texts)
        if isinstance(made, str):
            dropped[made] += 1
            continue
        pieces = made if isinstance(made, list) else [made]
        counts[f"documents_{split}"] += 1
        for piece in pieces:
            counts["tokens"] += len(piece.ids)
            counts["trained_tokens"] += piece.trained_tokens
        yield split, pieces


@dataclass(frozen=True)
class Publish:
    encoded: Folder
    keys: tuple[str, ...]
    split: str
    first_block: int
    target: Folder
    name: str
    row_group_blocks: int


def publish(payload: Publish, out: Folder, key: str) -> dict[str, Any]:
    """Writes one file of the data set from encoded shards, its blocks numbered on from `first_block`."""
    tables = []
    for shard in payload.keys:
        with payload.encoded.open(f"{shard}.{payload.split}.parquet") as source:
            tables.append(pq.read_table(source))
    table = pa.concat_tables(tables)
    ids = pa.array(np.arange(payload.first_block, payload.first_block + table.num_rows))
    entry = write_block_file(payload.target, payload.name, table.set_column(0, "block_id", ids), payload.row_group_blocks)
    return {"name": entry.name, "row_groups": list(entry.row_groups), "trained_tokens": entry.trained_tokens, "bytes": entry.bytes, "xxh3": entry.xxh3}
