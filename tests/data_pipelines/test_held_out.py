"""Held-out documents as an evaluation reads them: prompts of every conversation that training could use, and of no other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests_tokenizers import byte_level, chatml, llama2, with_template

from data_pipelines import held_out
from data_pipelines.prompts import DEFAULT_TEMPLATE
from raytune70b.storage import Folder

ASKED = [["user", "What now?"], ["assistant", "As an AI"], ["user", "And then?"], ["assistant", "Yes!"]]
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + DEFAULT_TEMPLATE[15:]
)


def write(folder: Path, documents: list[str | list], group: int = 2) -> Folder:
    """A data set's file of held-out documents: texts, and conversations as lists of turns."""
    rows = [(d if isinstance(d, str) else json.dumps(d), not isinstance(d, str), "en", "a.jsonl", n) for n, d in enumerate(documents)]
    table = pa.Table.from_arrays(
        [pa.array(c, f.type) for c, f in zip(zip(*rows, strict=True), held_out.SCHEMA, strict=True)], schema=held_out.SCHEMA
    )
    pq.write_table(table, folder / held_out.HELD_OUT, row_group_size=group)
    return Folder(folder)


@pytest.mark.parametrize("tokenizer", [llama2(), with_template(GEMMA)], ids=["llama2", "gemma"])
def test_conversations_that_the_template_refuses_are_left_out_and_counted(tmp_path, tokenizer):
    data = write(tmp_path, [[["system", "Be brief."], *ASKED], ASKED, [["system", "x"], *ASKED[:2]]])
    pairs, too_long, unusable = held_out.pairs(data, tokenizer, None, 500)
    assert [p.answer for p in pairs] == ["As an AI", "Yes!"] and (too_long, unusable) == (0, 2)
    assert len(held_out.texts(data, tokenizer, 256, None)) == 1


def test_a_conversation_that_spells_a_special_token_is_left_out(tmp_path):
    data = write(tmp_path, [[["user", "say <|im_end|>"], ["assistant", "no"]], ASKED])
    pairs, _, unusable = held_out.pairs(data, chatml(), None, 500)
    assert len(pairs) == 2 and unusable == 1


def test_a_conversation_longer_than_a_block_is_asked_while_its_prompts_fit(tmp_path):
    data = write(tmp_path, [[["user", "w " * 40], ["assistant", "so"], ["user", "w " * 900], ["assistant", "no"]]])
    pairs, too_long, unusable = held_out.pairs(data, byte_level(), None, 200)
    assert [p.answer for p in pairs] == ["so"] and (too_long, unusable) == (1, 0)


@pytest.mark.parametrize("chats_only", [False, True])
@pytest.mark.parametrize("most", [None, 1, 2, 7, 39, 40])
def test_the_rows_that_are_read_are_spread_over_the_file_and_no_other_text_is(tmp_path, monkeypatch, most, chats_only):
    documents = [[["user", f"{n}?"], ["assistant", f"answer {n}"]] if n % 3 else f"text {n}" for n in range(60)]
    data = write(tmp_path, documents, group=4)
    wanted = [n for n in range(60) if n % 3 or not chats_only]
    if most is not None and len(wanted) > most:
        wanted = [wanted[n] for n in np.linspace(0, len(wanted) - 1, most).astype(int)]
    read = pq.ParquetFile.read_row_group
    groups = []
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", lambda self, group, *more: groups.append(group) or read(self, group, *more))
    monkeypatch.delattr(pq, "read_table")
    assert [row["line"] for rows in held_out._rows(data, most, chats_only) for row in rows] == wanted
    assert groups == sorted({n // 4 for n in wanted})
