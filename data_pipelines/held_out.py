"""The documents of the validation split as text, beside their token blocks, so that an evaluation can score and ask them one by one.

`held_out.parquet` has one row a document that was kept for validation: its text (a conversation as JSON), language and place.
`texts` encodes them as `stages.encode` did, so the loss over them is the loss over the blocks; `pairs` makes a prompt of every
assistant turn, in the layout of `prompts`. What the chat template refuses stands in the file too, since another tokenizer may take
it; both leave it out. Costs the validation split's text once more, compressed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_pipelines.extract import BATCH
from data_pipelines.files import ParquetSink
from data_pipelines.prompts import Prompts, one_bos
from data_pipelines.stages import split_of
from data_pipelines.tokens import Encoder
from raytune70b.blocks.held_out import Pair, Text
from raytune70b.blocks.manifest import DataError
from raytune70b.storage import Folder

HELD_OUT = "held_out.parquet"
ANY_LENGTH = 1 << 40
"""Tokens: a conversation that is too long for a block can still be asked."""
CHAT_ROWS = 65536
SCHEMA = pa.schema([("text", pa.string()), ("chat", pa.bool_()), ("language", pa.string()), ("source", pa.string()), ("line", pa.int64())])


@dataclass(frozen=True)
class Select:
    extracted: Folder
    document_key: str
    dropped: np.ndarray
    """Rows of the shard that are duplicates, ascending."""
    validation_fraction: float


def select(payload: Select, out: Folder, key: str) -> dict[str, Any]:
    """A stage: writes `KEY.parquet`, a shard's documents of the validation split."""
    first, rows = 0, 0
    with payload.extracted.open(f"{payload.document_key}.parquet") as source, ParquetSink(out, f"{key}.parquet", SCHEMA) as sink:
        for batch in pq.ParquetFile(source).iter_batches(BATCH, columns=[*SCHEMA.names, "family"]):
            numbers = np.arange(first, first + batch.num_rows)
            kept = [split_of(f, payload.validation_fraction) == "validation" for f in batch.column("family").to_pylist()]
            batch = batch.filter(pa.array(np.array(kept, bool) & ~np.isin(numbers, payload.dropped)))
            if batch.num_rows:
                sink.write([batch.column(name) for name in SCHEMA.names])
            first, rows = first + len(kept), rows + batch.num_rows
    return {"rows": rows}


def join(work: Folder, keys: Sequence[str], target: Folder) -> None:
    """Writes `held_out.parquet` from the shards' files, in their order."""
    with ParquetSink(target, HELD_OUT, SCHEMA) as sink:
        for key in keys:
            with work.open(f"{key}.parquet") as source:
                for batch in pq.ParquetFile(source).iter_batches(BATCH):
                    sink.write(batch.columns)


def texts(data: Folder, tokenizer: Any, seq_len: int, most: int | None) -> list[Text]:
    """Held-out documents in pieces of at most `seq_len` tokens; of more than `most` documents, so many spread over the file."""
    encoder, found = Encoder(tokenizer, seq_len), list[Text]()
    for rows in _rows(data, most, chats_only=False):
        plain = iter(encoder.documents([r["text"] for r in rows if not r["chat"]]))
        chats = iter(encoder.conversations([json.loads(r["text"]) for r in rows if r["chat"]]))
        for row in rows:
            pieces = [p for p in (next(chats).piece,) if p is not None] if row["chat"] else next(plain)
            for p in pieces:
                found.append(Text(len(found), tuple(p.ids.tolist()), tuple(map(int, p.spans)), row["language"], row["source"]))
    return found


def pairs(data: Folder, tokenizer: Any, most: int | None, longest_prompt: int) -> tuple[list[Pair], int, int]:
    """The assistant turns of held-out conversations with what they answer; how many turns were left out for a longer prompt, and how
    many conversations because the chat template cannot write them: those were not trained either (`tokens.Encoder`)."""
    layout, found, too_long, unusable = Prompts.of(tokenizer), list[Pair](), 0, 0
    encoder = Encoder(tokenizer, ANY_LENGTH)
    for rows in _rows(data, most, chats_only=True):
        conversations = [json.loads(row["text"]) for row in rows]
        for row, turns, made in zip(rows, conversations, encoder.conversations(conversations), strict=True):
            if made.piece is None:
                unusable += 1
                continue
            task = "question" if sum(role == "user" for role, _ in turns) == 1 else "conversation"
            for place, (role, content) in enumerate(turns):
                if role != "assistant":
                    continue
                prompt = layout.render(turns[:place], generation=True)
                ids = one_bos(tokenizer.encode(prompt, add_special_tokens=False), tokenizer.bos_token_id)
                if len(ids) > longest_prompt:
                    too_long += 1
                else:
                    found.append(Pair(len(found), tuple(ids), prompt, content, task, row["language"], row["source"]))
    return found, too_long, unusable


def _rows(data: Folder, most: int | None, chats_only: bool) -> Iterator[list[dict[str, Any]]]:
    """Batches of held-out rows; of more than `most`, so many spread over the file, and no other's text is read. Raises DataError where there is
    no such file."""
    if data.size(HELD_OUT) is None:
        raise DataError(f"{data.uri}: holds no {HELD_OUT}, so there is nothing to evaluate on; make the data set again with jobs/prepare.py")
    with data.open(HELD_OUT) as source:
        parquet, first = pq.ParquetFile(source), 0
        chosen = _chosen(parquet, most, chats_only)
        for group in range(parquet.num_row_groups):
            stop = first + parquet.metadata.row_group(group).num_rows
            rows = chosen[np.searchsorted(chosen, first) : np.searchsorted(chosen, stop)] - first
            if len(rows):
                yield parquet.read_row_group(group).take(rows).to_pylist()
            first = stop


def _chosen(parquet: pq.ParquetFile, most: int | None, chats_only: bool) -> np.ndarray:
    """Numbers of the rows to read, ascending."""
    chats = [batch.column(0).to_numpy(zero_copy_only=False) for batch in parquet.iter_batches(CHAT_ROWS, columns=["chat"])] if chats_only else []
    rows = np.flatnonzero(np.concatenate([*chats, np.zeros(0, bool)])) if chats_only else np.arange(parquet.metadata.num_rows)
    return rows[np.linspace(0, len(rows) - 1, most).astype(np.int64)] if most is not None and len(rows) > most else rows
