"""The first stage alone, without Ray: whatever the rows hold, it ends, and every row is counted once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.extract import Extract, Rules, evaluation_hashes, extract
from data_pipelines.redact import KINDS
from data_pipelines.sources import InputError, Shard, find_files, plan_shards, scan_files
from data_pipelines.stages import kept_documents
from raytune70b.storage import Folder

RULES = Rules({}, ("en", "fr"), 5, tuple(k for k in KINDS if k != "name"), True, 3)
SENTENCES = ["The tenant shall pay the rent within thirty days of notice.", "Le locataire doit payer le loyer dans les trente jours.", "write to a@b.ca or 416-555-0199 today",
             "Der Mieter hat die Miete zu zahlen.", "12 34 56 78", "x", "\u200b", "\ud800", "dÃ©jÃ  vu", "🙂" * 9, "Article 1\nPage 1 of 2\nText.", "\x00\x07", "a" * 3000]  # fmt: skip
texts = st.lists(st.sampled_from(SENTENCES), max_size=6).map(" ".join) | st.text(max_size=60)
contents = texts | st.none() | st.integers() | st.lists(texts, max_size=2)
messages = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "x"]), "content": contents}), max_size=4)
rows = st.one_of(
    st.fixed_dictionaries({"text": contents}), st.fixed_dictionaries({"messages": messages}), st.fixed_dictionaries({"instruction": contents, "output": contents, "input": contents})
)


def shards(place: Path) -> list[Shard]:
    files, _ = find_files([str(place)])
    return plan_shards(files, scan_files(files, 1 << 20, {}), 1 << 20, {})


def extracted(folder: Path, out: Path, rules: Rules = RULES) -> list[tuple[dict, Path]]:
    return [(extract(Extract(s, rules, Folder(out)), Folder(out), str(s.index)), out / f"{s.index}.parquet") for s in shards(folder)]


def dropped(folder: Path, training: dict, evaluation: dict) -> dict[str, int]:
    """Why one training row is dropped beside one evaluation row."""
    for name, row in (("train", training), ("held", evaluation)):
        (folder / name).mkdir()
        (folder / name / "a.jsonl").write_text(json.dumps(row))
    (folder / "hashes").write_bytes(evaluation_hashes(shards(folder / "held"), {}).tobytes())
    files = shards(folder / "train")
    return extract(Extract(files[0], dataclasses.replace(RULES, evaluation="hashes"), Folder(folder)), Folder(folder / "out"), "0")["dropped"]


QUESTION = "Which notice must the tenant who wrote to jane.roe@example.com or called 416-555-0199 give to the landlord before the first of May"
SPLIT = "The landlord shall give the tenant three months of\n{}notice before the end of the term unless the court orders otherwise."
SHARED = {"shares 13 words with the evaluation files": 1}


@pytest.mark.parametrize("training", [
    {"text": f"It was asked in court. {QUESTION}?"}, {"question": f"{QUESTION}?", "answer": "A month's notice."},
], ids=["document", "conversation"])  # fmt: skip
def test_words_with_personal_data_among_them_are_found_in_the_evaluation(tmp_path, training):
    assert dropped(tmp_path, training, {"question": f"{QUESTION}?", "answer": "It depends."}) == SHARED


@pytest.mark.parametrize("question", [SPLIT.format(""), SPLIT.format("Page 3 of 9\n")], ids=["without", "with"])
def test_a_line_of_boilerplate_does_not_hide_shared_words(tmp_path, question):
    assert dropped(tmp_path, {"text": SPLIT.format("Page 3 of 9\n")}, {"text": question}) == SHARED


def test_an_evaluation_row_that_cannot_be_read_is_one_clear_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "Who is bound by the lease?", "answer": "The tenant."}\n{"prompt": "Who is bound?"}\n')
    with pytest.raises(InputError, match=r"data\.evaluation: a\.jsonl:2: text is missing; .*data\.columns"):
        evaluation_hashes(shards(tmp_path / "a.jsonl"), {})


def test_evaluation_files_without_a_word_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "?!"}\n')
    with pytest.raises(InputError, match=r"data\.evaluation: no word in its files"):
        evaluation_hashes(shards(tmp_path / "a.jsonl"), {})


@settings(max_examples=60)
@given(st.lists(rows.map(lambda r: json.dumps(r).encode()) | st.binary(max_size=30), min_size=1, max_size=12))
def test_any_rows_are_counted_once(tmp_path_factory, lines: list[bytes]):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "a.jsonl").write_bytes(b"\n".join([b'{"text": "The landlord shall repair the roof before winter."}', *lines]))
    for result, path in extracted(folder, folder / "out"):
        counts = result["counts"]
        ends = sum(result["quarantined"].values()) + sum(result["dropped"].values()) + counts.get("documents", 0)
        assert counts["read"] == ends == sum(bool(line.strip()) for line in (folder / "a.jsonl").read_bytes().split(b"\n"))
        assert pq.read_metadata(path).num_rows == counts.get("documents", 0) == sum(result["languages"].values())


def test_a_conversation_and_its_continuations_are_in_one_split(tmp_path):
    more = [{"role": "user", "content": "And for a shop?"}, {"role": "assistant", "content": "Six months."}]
    lines = []
    for n in range(80):
        first = [{"role": "user", "content": f"How much notice must tenant {n} of a flat give?"}, {"role": "assistant", "content": f"It is {n} days, in writing."}]
        system = [{"role": "system", "content": f"You are lawyer {n}."}]
        lines += [json.dumps({"messages": m}) for m in (first, [*first, *more], [*system, *first, *more, *more])]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    extracted(tmp_path / "a.jsonl", tmp_path / "out")
    splits = [split for batch in kept_documents(Folder(tmp_path / "out"), "0", np.zeros(0, np.int64), 0.3) for _, _, split in batch]
    assert len(splits) == 240 and 10 < splits[::3].count("validation") < 40
    assert splits[::3] == splits[1::3] == splits[2::3]


LICENCES = Path("/usr/share/common-licenses")


@pytest.mark.skipif(not LICENCES.is_dir(), reason="no Debian system")
def test_licence_texts_of_this_system(tmp_path):
    """Real text, read in place: the licences that every Debian system carries."""
    ((result, path),) = extracted(LICENCES, tmp_path / "out")
    assert result["quarantined"] == {} and result["counts"]["documents"] == result["counts"]["read"] >= 8
    assert set(result["languages"]) == {"en"} and result["redactions"].get("card", 0) == result["redactions"].get("sin", 0) == 0
    first = pq.read_table(path, columns=["text"]).column("text")[0].as_py()
    assert "\r" not in first and "  " not in first
