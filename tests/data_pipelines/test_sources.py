"""Reading raw documents: every row is a document, a conversation or a quarantined row, whatever the files hold."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.rows import RowError, interpret
from data_pipelines.sources import Bad, InputError, Row, Scan, find_files, plan_shards, read_shard, scan_files, scan_key
from raytune70b import storage
from raytune70b.storage import Folder


def read(path: Path, shard_bytes: int = 1 << 20, columns: dict[str, str] | None = None) -> list[Row | Bad]:
    files, _ = find_files([str(path)])
    shards = plan_shards(files, scan_files(files, shard_bytes, {}), shard_bytes, columns or {})
    return [item for shard in shards for item in read_shard(shard, columns or {})]


def places(items: list[Row | Bad]) -> list[tuple[str, int, str]]:
    return [(i.source, i.line, i.reason if isinstance(i, Bad) else i.text) for i in items]


def test_a_broken_line_and_a_cut_off_one_cost_only_themselves(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\nnot JSON\n{"text": "three"}\n{"text": "cut o')
    assert places(read(tmp_path / "a.jsonl")) == [
        ("a.jsonl", 1, "one"), ("a.jsonl", 2, "not JSON: Expecting value"), ("a.jsonl", 3, "three"),
        ("a.jsonl", 4, "not JSON: Unterminated string starting at"),
    ]  # fmt: skip


def test_one_column_of_several_types(tmp_path: Path):
    """tloen/alpaca-lora#239: {"a": 1} then {"a": "x"} must not crash."""
    (tmp_path / "a.jsonl").write_text('{"text": 1}\n{"text": "x"}\n{"text": null}\n{"text": {"b": [1]}}\n{"text": true}\n{}\n')
    found = read(tmp_path / "a.jsonl")
    assert [isinstance(f, Bad) for f in found] == [True, False, True, True, True, True]
    assert found[0].reason == "text must be a string, this is a number" and found[0].raw == b'{"text": 1}\n'


def test_parquet_files_of_different_schemas(tmp_path: Path):
    """ray-project/ray PR 49605: a column of nulls, then of strings; further columns, other types."""
    pq.write_table(pa.table({"text": pa.nulls(2)}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["a", "b"], "more": [1, 2]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"more": [[1], [2]], "text": pa.array(["c", None], pa.large_string())}), tmp_path / "c.parquet")
    pq.write_table(pa.table({"text": pa.array(["d", "d"]).dictionary_encode()}), tmp_path / "d.parquet")
    found = read(tmp_path)
    assert [f.text for f in found if isinstance(f, Row)] == ["a", "b", "c", "d", "d"]
    assert [(f.source.split("/")[1], f.line) for f in found if isinstance(f, Bad)] == [("a.parquet", 1), ("a.parquet", 2), ("c.parquet", 2)]


def every_parquet_type() -> list[pa.Array]:
    return [pa.array(v, t) for v, t in [
        ([1], pa.int8()), ([2**63], pa.uint64()), ([1.5], pa.float16()), ([True], pa.bool_()), ([b"\xff"], pa.binary()), ([b"ab"], pa.binary(2)),
        ([1], pa.date32()), ([1], pa.timestamp("ns", "UTC")), ([1], pa.time64("us")), ([1], pa.duration("s")), ([1], pa.decimal128(5, 2)),
        ([[1]], pa.list_(pa.int8())), ([{"a": 1}], pa.struct([("a", pa.int8())])), ([[("k", 1)]], pa.map_(pa.string(), pa.int8())), ([None], pa.null()),
    ]]  # fmt: skip


@pytest.mark.parametrize("values", every_parquet_type(), ids=lambda a: str(a.type))
def test_every_parquet_type_as_text_is_quarantined(tmp_path: Path, values: pa.Array):
    pq.write_table(pa.table({"text": values}), tmp_path / "a.parquet")
    (bad,) = read(tmp_path / "a.parquet")
    assert isinstance(bad, Bad) and bad.line == 1 and bad.reason.startswith("text ")
    json.loads(bad.to_json())


def test_a_damaged_row_group_counts_all_its_rows(tmp_path: Path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"text number {n}" for n in range(100)]}), path, row_group_size=50, compression="zstd", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[40:200] = bytes(160)
    path.write_bytes(content)
    found = read(path)
    assert sum(f.rows if isinstance(f, Bad) else 1 for f in found) == 100
    assert sum(isinstance(f, Row) for f in found) == 50


@pytest.mark.parametrize("shard_bytes", [1, 7, 64, 1000, 100_000])
def test_shards_of_any_size_give_the_same_rows(tmp_path: Path, shard_bytes: int):
    lines = [json.dumps({"text": f"row {n} " + "é" * (n % 40)}, ensure_ascii=False) for n in range(30)]
    lines[7] = ""
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found = read(tmp_path / "a.jsonl", shard_bytes)
    assert places(found) == [("a.jsonl", n + 1, json.loads(line)["text"]) for n, line in enumerate(lines) if line]


def test_line_separators_inside_a_row_do_not_split_it(tmp_path: Path):
    text = "a\u2028b\u2029c\x85d\x0be\x0cf"
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({"text": text}, ensure_ascii=False).encode() + b"\r\n")
    assert places(read(tmp_path / "a.jsonl")) == [("a.jsonl", 1, text)]


def test_compressed_lines(tmp_path: Path):
    content = b'{"text": "one"}\n{"text": "two"}\n' * 2000
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(content[:32]) + zstandard.compress(content[32:]))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(content)[:-20])
    (tmp_path / "d.jsonl.zst").write_bytes(b"no zstandard at all")
    found = read(tmp_path)
    by_file = {name: [f for f in found if f.source.endswith(name)] for name in ("a.jsonl.gz", "b.jsonl.zst", "c.jsonl.gz", "d.jsonl.zst")}
    assert len(by_file["a.jsonl.gz"]) == len(by_file["b.jsonl.zst"]) == 4000
    assert by_file["b.jsonl.zst"][-1].line == 4000
    for name in ("c.jsonl.gz", "d.jsonl.zst"):
        assert isinstance(by_file[name][-1], Bad) and "damaged" in by_file[name][-1].reason


def frame_with_a_window_of_1_gib(content: bytes) -> bytes:
    """RFC 8878, 3.1.1: magic, no content size, windowLog 30, one raw block, the last."""
    return b"\x28\xb5\x2f\xfd\x00\xa0" + (len(content) << 3 | 1).to_bytes(3, "little") + content


def test_zstandard_of_every_kind(tmp_path: Path):
    lines = [b'{"text": "row %d %s"}\n' % (n, os.urandom(40).hex().encode()) for n in range(3000)]
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip"
    content = b"".join(lines)
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(content[:1001]) + skippable + frame_with_a_window_of_1_gib(content[1001:5000]) + zstandard.compress(content[5000:]))
    assert [f.line for f in read(tmp_path / "a.jsonl.zst") if isinstance(f, Row)] == list(range(1, 3001))


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_an_archive_that_is_cut_off_says_what_is_missing(tmp_path: Path, suffix: str):
    content = b"".join(b'{"text": "row %d %s"}\n' % (n, os.urandom(40).hex().encode()) for n in range(3000))
    packed = gzip.compress(content) if suffix == "gz" else zstandard.ZstdCompressor().compress(content)
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(packed[: len(packed) * 3 // 4])
    *rows, bad = read(tmp_path / f"a.jsonl.{suffix}")
    assert len(rows) > 1000 and all(isinstance(r, Row) for r in rows)
    assert isinstance(bad, Bad) and bad.line == len(rows) + 1
    assert f"the file ends early and all rows from {len(rows) + 1} on are missing:" in bad.reason


class Unsteady:
    """A file whose reads fail, each as often as `failures` says, as those of a store far away."""

    def __init__(self, opened: Any, failures: list[int]):
        self.opened, self.failures = opened, failures

    def read(self, size: int) -> bytes:
        if self.failures[0]:
            self.failures[0] -= 1
            raise OSError("AWS Error NETWORK_CONNECTION during GetObject")
        return self.opened.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.opened, name)

    def __enter__(self) -> Unsteady:
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.close()


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt"])
def test_an_unsteady_network_damages_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str):
    path = tmp_path / f"a.{suffix}"
    lines = b'{"text": "one"}\n{"text": "two"}\n'
    if suffix == "parquet":
        pq.write_table(pa.table({"text": ["one", "two"]}), path)
    else:
        path.write_bytes({"jsonl": lines, "jsonl.gz": gzip.compress(lines), "jsonl.zst": zstandard.compress(lines), "txt": b"one"}[suffix])
    steady = read(path)
    files, _ = find_files([str(path)])
    (shard,) = plan_shards(files, scan_files(files, 1 << 20, {}), 1 << 20, {})
    failures, folder_open = [3], Folder.open
    monkeypatch.setattr(Folder, "open", lambda self, name: Unsteady(folder_open(self, name), failures))
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    assert list(read_shard(shard, {})) == steady and failures == [0]
    failures[0] = 1000
    with pytest.raises(InputError, match=rf"a\.{suffix} cannot be read \(AWS Error"):
        list(read_shard(shard, {}))
    if suffix == "parquet":
        with pytest.raises(InputError, match=r"cannot be read \(AWS Error"):
            plan_shards(files, {scan_key(files[0], 1): Scan("")}, 1, {})


def test_one_wrong_string_costs_only_its_row(tmp_path: Path):
    data = [b"one", b"t\xffo", b"three"]
    offsets = np.cumsum([0, *map(len, data)]).astype(np.int32)
    texts = pa.Array.from_buffers(pa.string(), 3, [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(data))])
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": pa.array([0, 2**50], pa.timestamp("s"))}), tmp_path / "b.parquet")
    found = read(tmp_path / "a.parquet")
    assert places(found) == [("a.parquet", 1, "one"), ("a.parquet", 2, found[1].reason), ("a.parquet", 3, "three")]
    assert found[1].reason.startswith("not UTF-8") and found[1].raw == b"t\xffo"
    assert [f.reason.split(":")[0] for f in read(tmp_path / "b.parquet")] == ["text must be a string, this is a datetime", "unreadable value"]


def test_half_surrogate_pairs_become_replacement_characters(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(rb'{"text": "\ud83d\ude00 \ud83d x \udc00"}')
    assert places(read(tmp_path / "a.jsonl")) == [("a.jsonl", 1, "😀 � x �")]


CALL = {"id": "1", "type": "function", "function": {"name": "rent", "arguments": "{}"}}


@pytest.mark.parametrize("message", [{"content": None, "tool_calls": [CALL]}, {"content": "Let me look.", "tool_calls": [CALL]}, {"content": "x", "function_call": CALL["function"]}])
def test_calls_of_tools_are_refused_by_name(message: dict):
    kind = min(message.keys() - {"content"})
    with pytest.raises(RowError, match=f"message 1 has {kind}, which are not trained"):
        interpret({"messages": [{"role": "user", "content": "How much?"}, {"role": "assistant", **message}]}, {})


@pytest.mark.parametrize("nothing", [{"tool_calls": None}, {"tool_calls": []}, {"function_call": {"name": None, "arguments": None}}])
def test_messages_that_only_have_room_for_calls_are_taken(nothing: dict):
    assert interpret({"messages": [{"role": "assistant", "content": "ten", **nothing}]}, {})[1] == (("assistant", "ten"),)


@pytest.mark.parametrize("line", [b"[1, 2]", b'"text"', b"3", b"null", b"NaN", b'{"text": ' + b"[" * 100_000, b'{"text": ' + b"9" * 5000 + b"}", b"\xff\xfe", b"\x00", b"{}",
                                  b'{"messages": []}', b'{"messages": "x"}', b'{"messages": [{"role": "assistant"}]}', b'{"messages": [3]}',
                                  b'{"messages": [{"role": "boss", "content": "x"}]}', b'{"messages": [{"role": "user", "content": "x"}]}',
                                  b'{"instruction": "x"}', b'{"output": "x"}', b'{"instruction": "x", "output": ""}', b'{"instruction": "x", "output": "y", "input": 3}',
                                  b'{"text": "  \\n "}'])  # fmt: skip
def test_every_bad_line_has_its_place_and_reason(tmp_path: Path, line: bytes):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "good"}\n')
    found = read(tmp_path / "a.jsonl")
    assert [type(f) for f in found] == [Row, Bad, Row]
    assert found[1].line == 2 and found[1].reason
    assert json.loads(found[1].to_json())["source"] == "a.jsonl"


values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=3))
known = st.dictionaries(st.sampled_from(["text", "instruction", "input", "output", "question", "answer", "messages"]), values)


@given(values | known)
def test_any_value_is_a_document_or_has_a_reason(value):
    try:
        text, messages = interpret(value, {})
    except RowError as error:
        assert str(error)
    else:
        assert bool(text.strip()) != bool(messages)


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=30) | known.map(lambda v: json.dumps(v).encode()), max_size=8), st.integers(1, 40))
def test_any_bytes_are_read_and_counted(tmp_path_factory, lines: list[bytes], shard_bytes: int):
    path = tmp_path_factory.mktemp("fuzz") / "a.jsonl"
    path.write_bytes(b'{"text": "first"}\n' + b"\n".join(lines))
    filled = sum(bool(line.strip()) for line in path.read_bytes().split(b"\n"))
    assert len(read(path, shard_bytes)) == filled


def test_column_mapping_and_question_answer(tmp_path: Path):
    pq.write_table(pa.table({"body": ["a"], "text": ["not this"]}), tmp_path / "a.parquet")
    assert [f.text for f in read(tmp_path / "a.parquet", columns={"text": "body"})] == ["a"]
    (tmp_path / "b.jsonl").write_text('{"question": "q", "answer": "a"}\n{"instruction": "i", "input": "c", "output": "o"}\n')
    assert [f.messages for f in read(tmp_path / "b.jsonl")] == [(("user", "q"), ("assistant", "a")), (("user", "i\n\nc"), ("assistant", "o"))]


def test_files_folders_and_globs(tmp_path: Path):
    for name in ("b/two.txt", "b/GPL-2.0", "a/one.txt", "a/deep/three.txt", "a/.hidden.txt", "a/left.xml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    files, others = find_files([str(tmp_path / "b"), str(tmp_path / "a")])
    assert [f.label for f in files] == ["a/deep/three.txt", "a/one.txt", "b/GPL-2.0", "b/two.txt"] and others == {".xml": 1, "hidden": 1}
    assert [f.name for f in find_files([str(tmp_path / "*" / "*.txt")])[0]] == ["a/one.txt", "b/two.txt"]
    assert len(find_files([f"file://{tmp_path}/a", str(tmp_path / "a")])[0]) == 2  # the same folder, by path and by URI


@pytest.mark.parametrize(("pattern", "names"), [
    ("*.txt", ["top.txt"]), ("a/*", ["one.txt"]), ("**/*.txt", ["a/deep/three.txt", "a/one.txt", "top.txt"]), ("**", ["a/deep/three.txt", "a/one.txt", "top.txt"]),
    ("a/**/t*.txt", ["deep/three.txt"]), ("?/*/*.txt", ["a/deep/three.txt"]),
])  # fmt: skip
def test_a_star_stays_within_a_folder(tmp_path: Path, pattern: str, names: list[str]):
    for name in ("top.txt", "a/one.txt", "a/deep/three.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [f.name for f in find_files([str(tmp_path / pattern)])[0]] == names


def test_only_hidden_files_and_markers_are_passed_over(tmp_path: Path):
    for name in ("_private/_a.txt", "_SUCCESS", "_metadata", ".git/config.txt", "b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    files, others = find_files([str(tmp_path)])
    assert [f.name for f in files] == ["_private/_a.txt", "b.txt"]
    assert others == {"hidden": 1, "_SUCCESS": 1, "_metadata": 1}


def test_a_file_under_several_names_is_one(tmp_path: Path):
    (tmp_path / "raw" / "eval").mkdir(parents=True)
    for name in ("a.txt", "eval/b.txt", "c.xml"):
        (tmp_path / "raw" / name).write_text(name)
    (tmp_path / "raw" / "aa").symlink_to(".")
    files, others = find_files([str(tmp_path / "raw"), str(tmp_path / "raw" / "eval")])
    assert [f.label for f in files] == ["eval/b.txt", "raw/a.txt"] and others == {".xml": 1}


def test_wrong_inputs_are_one_clear_error(tmp_path: Path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "other.xml").touch()
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing PAR1")
    for name, words in [("missing", "does not exist"), ("*.doc", "matches nothing"), ("other.xml", "no file of a known kind"), ("empty.jsonl", "empty files"),
                        ("a.parquet", "data.columns"), ("broken.parquet", "not a readable Parquet")]:  # fmt: skip
        with pytest.raises(InputError, match=words):
            read(tmp_path / name)
