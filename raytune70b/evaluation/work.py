"""The units of an evaluation: each a pure function of a model folder and of what it scores, so that a killed one goes on.

A unit is some texts to score, or one batch of prompts to answer. Its key is the digest of all that determines its result; the
result is one JSON file of that name, written whole. Prompts are batched by length, longest first: padding costs little, and
memory runs out in the first minute or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from raytune70b.blocks.held_out import Pair, Text
from raytune70b.schema import Config
from raytune70b.storage import Folder

TEXTS_PER_UNIT = 512


@dataclass(frozen=True)
class Settings:
    """What shapes results, beside the model and the items."""

    batch_size: int
    batch_tokens: int
    max_new_tokens: int
    dtype: str
    ends: tuple[int, ...] = ()
    """Ids that end an answer, beside the tokenizer's and the model's own."""


def settings_of(config: Config, ends: Sequence[int] = ()) -> Settings:
    values = config.evaluation
    return Settings(values.batch_size, values.batch_tokens, values.max_new_tokens, values.dtype, tuple(ends))


@dataclass(frozen=True)
class Unit:
    """Texts to score or prompts to answer; one of the two is empty."""

    key: str
    texts: tuple[Text, ...] = ()
    pairs: tuple[Pair, ...] = ()


def plan(model: str, texts: Sequence[Text], pairs: Sequence[Pair], settings: Settings) -> list[Unit]:
    """All units for a model (named by its fingerprint), the longest first. Neither the cluster nor the number of workers matters."""
    longest_first = sorted(texts, key=lambda t: (-len(t.ids), t.number))
    prompts = sorted(pairs, key=lambda p: (-len(p.prompt_ids), p.number))
    units = []
    for group in _groups(prompts, settings.batch_size):
        content = [[p.number, p.prompt_ids] for p in group]
        units.append(Unit(_key("generate", model, content, settings.batch_size, settings.max_new_tokens, settings.dtype, settings.ends), pairs=tuple(group)))
    for texts_of_unit in _groups(longest_first, TEXTS_PER_UNIT):
        content = [[t.number, t.ids, t.spans] for t in texts_of_unit]
        units.append(Unit(_key("loss", model, content, settings.batch_tokens, settings.dtype), texts=tuple(texts_of_unit)))
    return units


def text_batches(texts: Sequence[Text], batch_tokens: int) -> list[list[Text]]:
    """Texts, longest first, in batches whose padded size stays below `batch_tokens`, or of one text."""
    batches: list[list[Text]] = []
    for text in texts:
        if not batches or (len(batches[-1]) + 1) * len(batches[-1][0].ids) > batch_tokens:
            batches.append([])
        batches[-1].append(text)
    return batches


def pending(units: Sequence[Unit], out: Folder) -> list[Unit]:
    """The units without a result."""
    done = set(out.names())
    return [u for u in units if f"{u.key}.json" not in done]


def write_result(out: Folder, unit: Unit, result: dict[str, Any]) -> None:
    out.write(f"{unit.key}.json", json.dumps(result, ensure_ascii=False).encode())


def read_results(units: Sequence[Unit], out: Folder) -> dict[str, dict[int, Any]]:
    """`losses`: text number -> (loss sum, trained tokens); `answers`: pair number -> (text, tokens, whether it ended by itself)."""
    found: dict[str, dict[int, Any]] = {"losses": {}, "answers": {}}
    for unit in units:
        for kind, values in json.loads(out.read(f"{unit.key}.json")).items():
            found[kind] |= {int(number): value for number, value in values.items()}
    return found


def _groups(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[n : n + size] for n in range(0, len(items), size)]


def _key(*parts: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())
