"""Text to tokens, with the spans that are trained.

A document is one BOS (where the tokenizer has one), its text, one EOS; all but the first token is trained. In a
conversation each assistant turn is trained from the first token behind the generation prompt to the end token behind
its content, and nothing else. Text that spells a special token is plain text in a document; in a conversation, where the
template's own special tokens must be read as such, it drops the conversation with a count.

Costs: 4-5 MB/s of text a core with `encode_batch_fast`; conversations need character offsets and run at about two thirds.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data_pipelines.packing import Piece, document_pieces
from data_pipelines.prompts import DEFAULT_TEMPLATE, PromptError, Prompts, Turn
from raytune70b.blocks.manifest import MANIFEST, tokenizer_digest
from raytune70b.config import UserError
from raytune70b.storage import Folder

LONG_TEXT = 50_000
"""Characters tokenised at once: a text of millions drops the tokenizer to a third of its speed."""


class TokenizerError(UserError):
    """A tokenizer that cannot be used."""


def load_tokenizer(folder: str | Folder) -> Any:
    """The Hugging Face tokenizer of a folder or URI, with a chat template. Raises TokenizerError."""
    where = folder if isinstance(folder, Folder) else Folder(folder)
    try:
        names = where.names()
    except OSError as error:
        raise TokenizerError(f"data.tokenizer: {where.uri} cannot be read ({error})") from error
    if not {"tokenizer.json", "tokenizer_config.json", "tokenizer.model"} & set(names):
        raise TokenizerError(f"data.tokenizer: {where.uri} is not a Hugging Face tokenizer folder (no tokenizer.json in it)")
    with tempfile.TemporaryDirectory() as temporary:
        local = where.local or _copied(where, names, Path(temporary))
        tokenizer = _loaded(local, "tokenizer.json" in names)
    if tokenizer.eos_token_id is None:
        raise TokenizerError(f"data.tokenizer: {where.uri} names no eos_token, so no answer could ever end")
    if not tokenizer.chat_template:
        tokenizer.chat_template = DEFAULT_TEMPLATE
    return tokenizer


def _copied(where: Folder, names: list[str], target: Path) -> Path:
    for name in names:
        if where.size(name) is not None and not name.endswith((".safetensors", ".bin")):
            (target / name).write_bytes(where.read(name))
    return target


def _loaded(local: Path, fast: bool) -> Any:
    try:
        if fast:  # the general class reads every fast tokenizer, and does not import torch
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(str(local))
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(local), use_fast=True)
    except Exception as error:
        raise TokenizerError(f"data.tokenizer: {local} cannot be loaded ({str(error).splitlines()[0]})") from error


def save_tokenizer(tokenizer: Any, folder: Folder, alone: bool = False) -> tuple[str, str]:
    """Writes the tokenizer as a Hugging Face folder; returns the fingerprints of its files and of its chat template.

    `alone` removes whatever else is in the folder, such as the files of another tokenizer.
    """
    files = saved_files(tokenizer)
    for name, content in files.items():
        folder.write(name, content)
    for name in [n for n, _ in folder.files() if alone and n not in files]:
        folder.delete(name)
    return tokenizer_digest(files), xxhash.xxh3_128_hexdigest(Prompts.of(tokenizer).template.encode())


def saved_files(tokenizer: Any) -> dict[str, bytes]:
    """Relative name -> content of the files of a tokenizer's Hugging Face folder."""
    with tempfile.TemporaryDirectory() as temporary:
        tokenizer.save_pretrained(temporary)
        return {str(path.relative_to(temporary)): path.read_bytes() for path in Path(temporary).rglob("*") if path.is_file()}


def check_place(tokenizer: Any | None, given: Folder | None, data: Folder, own: Folder) -> None:
    """Refuses what the writing of the data set's own tokenizer, in `own`, would remove: a given tokenizer that lies there, and files that are
    not of a data set in `data`. Raises TokenizerError."""
    there = {name for name, _ in own.files()}
    if tokenizer is not None and given is not None and (given.uri == own.uri or given.uri.startswith(own.uri + "/")):
        lost = there - saved_files(tokenizer).keys()
        if lost:
            raise TokenizerError(f"data.tokenizer: {given.uri} lies in {own.uri}, where data.path keeps its own tokenizer and would remove {min(lost)}; copy it elsewhere and give that folder")
    elif there and data.size(MANIFEST) is None and not data.exists("work"):
        raise TokenizerError(f"data.path: {data.uri} holds no data set, but files in {own.uri} ({min(there)}), where its tokenizer would go; give another folder")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer learned from the texts: any text decodes back to itself. The same texts give the same bytes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<s>", "</s>"]
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=DEFAULT_TEMPLATE)


@dataclass(frozen=True)
class Conversation:
    """An encoded conversation: its tokens, or the reason why there are none, or not all."""

    piece: Piece | None
    tokens: int
    """Tokens before anything was dropped."""
    reason: str = ""


class Encoder:
    """A tokenizer made ready for pipelines: batches in, pieces of at most `seq_len` tokens out."""

    def __init__(self, tokenizer: Any, seq_len: int):
        self.prompts = Prompts.of(tokenizer)
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.seq_len = seq_len
        self.bos, self.eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.eos
        self.vocab_size = len(tokenizer)
        special = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self.special = np.zeros(self.vocab_size, bool)
        self.special[list(special)] = True
        self.special_texts = tuple(sorted(special.values()))
        self.breaks = self._breaks()
        self.line_end = self.backend.encode("\n", add_special_tokens=False).ids

    def _breaks(self) -> np.ndarray:
        """For each id 2 where the token ends with a blank line, 1 where it ends a line, else 0."""
        texts = self.backend.decode_batch([[i] for i in range(self.vocab_size)], skip_special_tokens=False)
        ends = [text.rstrip(" \t") for text in texts]
        return np.array([2 if t.endswith("\n\n") else int(t.endswith("\n")) for t in ends], np.int8)

    def documents(self, texts: Sequence[str]) -> list[list[Piece]]:
        """The pieces of each document."""
        self.backend.encode_special_tokens = True
        parts = [_parts(text) for text in texts]
        encoded = iter(self.backend.encode_batch_fast([p if n == 0 else "\n" + p for ps in parts for n, p in enumerate(ps)], add_special_tokens=False))
        head = np.array([] if self.bos is None else [self.bos], np.int32)
        found = []
        for ps in parts:
            own = [next(encoded).ids if n == 0 else self._continued(next(encoded).ids, p) for n, p in enumerate(ps)]
            ids = np.concatenate([head, *(np.array(i, np.int32) for i in own), np.array([self.eos], np.int32)])
            found.append(document_pieces(ids, self.seq_len, self._breaks_of(ids)))
        return found

    def _continued(self, ids: list[int], part: str) -> list[int]:
        """The tokens of a part that follows another, from those behind a line end: at a text's begin, SentencePiece would put a space before it."""
        end = self.line_end
        return ids[len(end) :] if ids[: len(end)] == end else self.backend.encode(part, add_special_tokens=False).ids

    def _breaks_of(self, ids: np.ndarray) -> np.ndarray:
        breaks = self.breaks[ids]
        if len(ids) > self.seq_len:  # two line ends in a row are a blank line too
            breaks[1:][(breaks[1:] > 0) & (breaks[:-1] > 0)] = 2
        return breaks

    def conversations(self, conversations: Sequence[Sequence[Turn]]) -> list[Conversation]:
        """Each conversation's tokens; one that is longer than a block keeps the turns up to the last answer that fits."""
        self.backend.encode_special_tokens = False
        rendered = [self._rendered(turns) for turns in conversations]
        encoded = iter(self.backend.encode_batch([r[0] for r in rendered if not isinstance(r, str)], add_special_tokens=False))
        return [Conversation(None, 0, r) if isinstance(r, str) else self._conversation(next(encoded), *r) for r in rendered]

    def _rendered(self, turns: Sequence[Turn]) -> tuple[str, list[tuple[int, int, str]]] | str:
        if any(s in content for _, content in turns for s in self.special_texts):
            return "spells a special token"
        try:
            return self.prompts.answers(turns)
        except PromptError as error:
            return str(error)

    def _conversation(self, encoding: Any, text: str, answers: list[tuple[int, int, str]]) -> Conversation:
        ids = np.array(encoding.ids, np.int32)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        spans: list[int] = []
        for start, end, asked in answers:
            first = int(np.searchsorted(offsets[:, 1], start, "right"))
            ending = np.flatnonzero(self.special[ids] & (offsets[:, 0] >= end))
            beyond = not len(ending) or (asked and text.find(asked, end, int(offsets[ending[0], 0])) >= 0)
            if beyond or (spans and first < spans[-1]):  # with the end token behind the next question, that would be trained
                return Conversation(None, len(ids), "no end token behind an answer")
            spans += [first, int(ending[0]) + 1]
        ids, spans = self._with_one_bos(ids, spans)
        whole = [s for s in zip(spans[::2], spans[1::2], strict=True) if s[1] <= self.seq_len]
        if not whole:
            return Conversation(None, len(ids), "the first answer does not fit in a block")
        kept = len(ids) if len(ids) <= self.seq_len else whole[-1][1]
        return Conversation(Piece(ids[:kept], tuple(i for s in whole for i in s)), len(ids), "" if kept == len(ids) else "turns behind the block")

    def _with_one_bos(self, ids: np.ndarray, spans: list[int]) -> tuple[np.ndarray, list[int]]:
        if self.bos is None:
            return ids, spans
        doubled = int(np.argmax(ids != self.bos)) if len(ids) else 0
        return np.concatenate([np.array([self.bos], np.int32), ids[doubled:]]), [s + 1 - doubled for s in spans]


def answer_ends(tokenizer: Any) -> list[int]:
    """The ids that training ends answers with, in a conversation's middle and at its end, ascending; empty where the template ends none."""
    toy = [("user", "Is it so?"), ("assistant", "Yes.")]
    made = Encoder(tokenizer, 1 << 20).conversations([toy, toy * 2])
    return sorted({int(c.piece.ids[end - 1]) for c in made if c.piece is not None for end in c.piece.spans[1::2]})


def _parts(text: str) -> list[str]:
    """A long text in parts that the tokenizer takes at full speed, cut behind a blank line where there is one."""
    if len(text) <= LONG_TEXT:
        return [text]
    parts, start = [], 0
    while len(text) - start > LONG_TEXT:
        middle, stop = start + LONG_TEXT // 2, start + LONG_TEXT
        found = max(text.rfind("\n\n", middle, stop) + 2, 1) if "\n\n" in text[middle:stop] else text.rfind("\n", middle, stop) + 1
        stop = found if found > middle else stop
        parts.append(text[start:stop])
        start = stop
    return [*parts, text[start:]]


def one_thread() -> None:
    """Keeps the tokenizer to the one core that its Ray task has."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
