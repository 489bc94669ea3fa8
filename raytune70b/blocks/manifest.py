"""The manifest of a data set of token blocks, and the Parquet layout of the blocks.

A data set is a folder: `manifest.json`, `tokenizer/` (a Hugging Face tokenizer folder), `train/*.parquet`,
`validation/*.parquet`, `quarantine/*.jsonl`. A row is one block of exactly `seq_len` tokens:

| column        | type                             | meaning                                                              |
|---------------|----------------------------------|----------------------------------------------------------------------|
| block_id      | int64                            | its number in the split: 0, 1, 2, ... in file order                  |
| input_ids     | fixed_size_list<int32>[seq_len]  | tokens, then padding                                                 |
| document_ends | list<int32>                      | ends (exclusive) of the documents packed in the block, ascending; what follows the last is padding |
| trained_spans | list<int32>                      | start, end, start, end, ...: tokens that are targets of the loss     |

The first token of a document is never in a span: nothing in the block predicts it. Token t of a span is predicted at
position t - 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from raytune70b.config import UserError
from raytune70b.storage import Folder

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")


class DataError(UserError):
    """A data set that is missing, damaged or of another version."""


@dataclass(frozen=True)
class BlockFile:
    """One Parquet file; `name` is relative to the data set's folder."""

    name: str
    row_groups: tuple[int, ...]
    """Rows of each row group."""
    trained_tokens: int
    bytes: int
    xxh3: str

    @property
    def rows(self) -> int:
        return sum(self.row_groups)


@dataclass(frozen=True)
class Manifest:
    seq_len: int
    vocab_size: int
    """Ids in the blocks lie in [0, vocab_size)."""
    pad_id: int
    tokenizer: str
    """xxh3 of the tokenizer's files."""
    chat_template: str
    """xxh3 of the chat template or prompt layout."""
    splits: dict[str, tuple[BlockFile, ...]]
    lineage: dict[str, Any] = field(default_factory=dict)
    """What became of every document and token; its counts add up."""
    schema_version: int = SCHEMA_VERSION

    def rows(self, split: str) -> int:
        return sum(f.rows for f in self.splits[split])

    def trained_tokens(self, split: str) -> int:
        return sum(f.trained_tokens for f in self.splits[split])

    @property
    def answer_ends(self) -> tuple[int, ...]:
        """The ids that end a trained answer by the chat template, which need not be the tokenizer's EOS. None are known of older data sets."""
        return tuple(self.lineage.get("answer_ends", ()))

    @cached_property
    def digest(self) -> str:
        """Names the data set: changes with any byte of a block, the tokenizer or the layout."""
        return xxhash.xxh3_128(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        values = {**plain(self), "splits": {split: [plain(f) for f in files] for split, files in self.splits.items()}}
        return json.dumps(values, indent=1, sort_keys=True, ensure_ascii=False)


def plain(entry: BlockFile | Manifest) -> dict[str, Any]:
    """The fields as they are; dataclasses.asdict would copy each number of half a million row groups."""
    return {f.name: getattr(entry, f.name) for f in fields(entry)}


def block_schema(seq_len: int) -> pa.Schema:
    """The Arrow schema of a block file."""
    return pa.schema([
        ("block_id", pa.int64()), ("input_ids", pa.list_(pa.int32(), seq_len)),
        ("document_ends", pa.list_(pa.int32())), ("trained_spans", pa.list_(pa.int32())),
    ])  # fmt: skip


def read_manifest(folder: Folder) -> Manifest:
    """The manifest of a data set. Raises DataError."""
    if folder.size(MANIFEST) is None:
        raise DataError(f"data.path: {folder.uri} holds no token blocks ({MANIFEST} is missing); make them with jobs/prepare.py data.path={folder.uri} data.inputs=[...]")
    try:
        values = json.loads(folder.read(MANIFEST))
        version = values["schema_version"]
        if version != SCHEMA_VERSION:
            raise DataError(f"{folder.uri}/{MANIFEST}: schema version {version}, this code reads {SCHEMA_VERSION}; run jobs/prepare.py again")
        values["splits"] = {
            split: tuple(BlockFile(**{**f, "row_groups": tuple(f["row_groups"])}) for f in files) for split, files in values["splits"].items()
        }
        return Manifest(**values)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder.uri}/{MANIFEST}: not a manifest of token blocks ({error}); run jobs/prepare.py again") from error


def describe_file(folder: Folder, name: str, trained_tokens: int) -> BlockFile:
    """The manifest's entry for a block file that has been written."""
    with folder.open(name) as source:
        meta = pq.ParquetFile(source).metadata
        groups = tuple(meta.row_group(g).num_rows for g in range(meta.num_row_groups))
    return BlockFile(name, groups, trained_tokens, folder.size(name) or 0, folder.checksum(name))


def write_block_file(folder: Folder, name: str, table: pa.Table, row_group_blocks: int) -> BlockFile:
    """Writes one file of blocks in the layout that reads fastest (see above) and returns its manifest entry."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=row_group_blocks, compression="zstd", compression_level=3, use_dictionary=False, write_statistics=False, write_page_checksum=True)
    folder.write(name, sink.getvalue())
    spans = table.column("trained_spans").combine_chunks().flatten().to_numpy()
    return describe_file(folder, name, int((spans[1::2] - spans[::2]).sum()))


def tokenizer_digest(files: Mapping[str, bytes]) -> str:
    """Fingerprint of a tokenizer folder from its files' names, relative to it, and contents: `Manifest.tokenizer`."""
    digest = xxhash.xxh3_128()
    for name in sorted(files):
        digest.update(name.rsplit("/", 1)[-1].encode() + b"\0" + files[name])
    return digest.hexdigest()


def verify_file(folder: Folder, entry: BlockFile) -> None:
    """Raises DataError unless the file's size and checksum are the manifest's."""
    size = folder.size(entry.name)
    if size != entry.bytes:
        raise DataError(f"{folder.uri}/{entry.name}: {'missing' if size is None else f'{size} bytes'}, the manifest says {entry.bytes}; run jobs/prepare.py again")
    digest = folder.checksum(entry.name)
    if digest != entry.xxh3:
        raise DataError(f"{folder.uri}/{entry.name}: checksum {digest}, the manifest says {entry.xxh3}; run jobs/prepare.py again")
