"""The last two stages: kept documents to packed blocks, and blocks to the files of the data set.

| stage   | a unit is            | writes                                                      |
|---------|----------------------|-------------------------------------------------------------|
| encode  | an extracted shard   | its kept documents as packed blocks, by split               |
| publish | some encoded shards  | one file of the data set, its blocks numbered               |

The split follows the content hash of a document, from bits that the choice among duplicates does not look at; of a conversation the
hash of how it begins, for its continuation contains it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_pipelines.extract import BATCH
from data_pipelines.packing import Piece, best_fit_decreasing, blocks_table
from data_pipelines.tokens import Conversation, Encoder, load_tokenizer, one_thread
from raytune70b.blocks.manifest import SPLITS, block_schema, write_block_file
from raytune70b.storage import Folder

WINDOW_BLOCKS = 1024
"""Blocks' worth of pieces that are packed together: what bounds the memory of packing."""


def split_of(family: bytes, validation_fraction: float) -> str:
    """The split of a document: a pure function of its content, or of its begin (`extract.DOCUMENTS`)."""
    return SPLITS[int(int.from_bytes(family[8:12], "little") < validation_fraction * 2**32)]


Stored = tuple[str, bool, str]
"""(text, whether it is a conversation, split)"""


def kept_documents(extracted: Folder, key: str, dropped: np.ndarray, validation_fraction: float) -> Iterator[list[Stored]]:
    """Batches of an extracted shard's documents without the dropped rows."""
    gone, first = set(dropped.tolist()), 0
    with extracted.open(f"{key}.parquet") as source:
        for batch in pq.ParquetFile(source).iter_batches(BATCH, columns=["text", "chat", "family"]):
            columns = [batch.column(n).to_pylist() for n in range(3)]
            yield [(t, c, split_of(f, validation_fraction)) for n, (t, c, f) in enumerate(zip(*columns, strict=True), first) if n not in gone]
            first += batch.num_rows


@dataclass(frozen=True)
class Encode:
    extracted: Folder
    """The folder of the extract stage."""
    document_key: str
    dropped: np.ndarray
    """Rows of the shard that are duplicates, ascending."""
    validation_fraction: float
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
    """Pieces of one split, packed window by window into a file."""

    encoder: Encoder
    out: Folder
    name: str
    pieces: list[Piece] = field(default_factory=list)
    waiting: int = 0
    blocks: int = 0
    writer: pq.ParquetWriter | None = None

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.waiting += len(piece.ids)
        if self.waiting >= WINDOW_BLOCKS * self.encoder.seq_len:
            self.flush()

    def flush(self) -> None:
        bins = best_fit_decreasing([len(p.ids) for p in self.pieces], self.encoder.seq_len)
        if bins:
            if self.writer is None:
                self.stream = self.out.make().filesystem.open_output_stream(self.out.path(self.name))
                self.writer = pq.ParquetWriter(self.stream, block_schema(self.encoder.seq_len), compression="none", use_dictionary=False, write_statistics=False)
            self.writer.write_table(blocks_table(self.pieces, bins, self.encoder.seq_len, self.encoder.pad))
            self.blocks += len(bins)
        self.pieces, self.waiting = [], 0

    def close(self) -> int:
        """Blocks written in all."""
        self.flush()
        if self.writer is not None:
            self.writer.close()
            self.stream.close()
        return self.blocks


@dataclass
class _Tally:
    """tokens = those in blocks + dropped ones, by reason; documents = kept + dropped ones."""

    counts: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    lengths: Counter[str] = field(default_factory=Counter)

    def add(self, split: str, pieces: list[Piece], tokens: int, reason: str) -> None:
        inside = sum(len(p.ids) for p in pieces)
        self.counts["tokens"] += tokens
        self.counts["tokens_out"] += inside
        self.counts["trained_tokens"] += sum(p.trained_tokens for p in pieces)
        if tokens > inside:
            self.dropped_tokens[reason] += tokens - inside
        if pieces:
            self.counts["documents"] += 1
            self.counts[f"documents_{split}"] += 1
            self.lengths[str(tokens.bit_length())] += 1
        else:
            self.dropped[reason] += 1


def encode(payload: Encode, out: Folder, key: str) -> dict[str, Any]:
    """Tokenises and packs a shard's kept documents; writes `KEY.SPLIT.parquet` for each split that has blocks."""
    encoder = _encoder(payload.tokenizer.uri, payload.fingerprint, payload.seq_len)
    packers = {split: _Packer(encoder, out, f"{key}.{split}.parquet") for split in SPLITS}
    tally = _Tally()
    for batch in kept_documents(payload.extracted, payload.document_key, payload.dropped, payload.validation_fraction):
        for split, pieces, tokens, reason in _encoded(encoder, batch):
            tally.add(split, pieces, tokens, reason)
            for piece in pieces:
                packers[split].add(piece)
    rows = {split: packer.close() for split, packer in packers.items()}
    return {**{k: dict(sorted(v.items())) for k, v in vars(tally).items()}, "rows": rows}


def _encoded(encoder: Encoder, batch: list[Stored]) -> Iterator[tuple[str, list[Piece], int, str]]:
    """(split, pieces, tokens, reason of what was dropped) of every document, in order."""
    texts = iter(encoder.documents([t for t, chat, _ in batch if not chat]))
    chats = iter(encoder.conversations([json.loads(t) for t, chat, _ in batch if chat]))
    for _, chat, split in batch:
        if chat:
            made: Conversation = next(chats)
            yield split, [made.piece] if made.piece is not None else [], made.tokens, made.reason
        else:
            pieces = next(texts)
            yield split, pieces, sum(len(p.ids) for p in pieces), ""


@dataclass(frozen=True)
class Slice:
    """Blocks [start, stop) of an encoded shard."""

    key: str
    start: int
    stop: int


@dataclass(frozen=True)
class Publish:
    encoded: Folder
    slices: tuple[Slice, ...]
    split: str
    first_block: int
    target: Folder
    name: str
    row_group_blocks: int


def file_slices(shards: list[tuple[str, int]], file_blocks: int) -> list[tuple[Slice, ...]]:
    """Which blocks of which shards (key, blocks) make each file: `file_blocks` in every one but the last."""
    files: list[list[Slice]] = []
    room = 0
    for key, blocks in shards:
        start = 0
        while start < blocks:
            if room == 0:
                files.append([])
                room = file_blocks
            stop = min(blocks, start + room)
            files[-1].append(Slice(key, start, stop))
            start, room = stop, room - (stop - start)
    return [tuple(f) for f in files]


def publish(payload: Publish, out: Folder, key: str) -> dict[str, Any]:
    """Writes one file of the data set from encoded shards, its blocks numbered on from `first_block`."""
    table = pa.concat_tables([_blocks(payload.encoded, f"{s.key}.{payload.split}.parquet", s.start, s.stop) for s in payload.slices])
    ids = pa.array(np.arange(payload.first_block, payload.first_block + table.num_rows))
    entry = write_block_file(payload.target, payload.name, table.set_column(0, "block_id", ids), payload.row_group_blocks)
    return {"name": entry.name, "row_groups": list(entry.row_groups), "trained_tokens": entry.trained_tokens, "bytes": entry.bytes, "xxh3": entry.xxh3}


def _blocks(folder: Folder, name: str, start: int, stop: int) -> pa.Table:
    """Blocks [start, stop) of a file; only the row groups that hold them are read."""
    parts, first = [], 0
    with folder.open(name) as source:
        parquet = pq.ParquetFile(source)
        for group in range(parquet.num_row_groups):
            last = first + parquet.metadata.row_group(group).num_rows
            if first < stop and last > start:
                table = parquet.read_row_group(group)
                parts.append(table.slice(max(0, start - first), min(stop, last) - max(start, first)))
            first = last
    return pa.concat_tables(parts)
