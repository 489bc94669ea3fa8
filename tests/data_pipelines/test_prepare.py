"""The whole pipeline: equal bytes on any number of CPUs and after a kill, counts that add up, nothing personal left."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray
from tests_tokenizers import CHATML, chatml, with_template

from data_pipelines import build
from data_pipelines.redact import KINDS, find
from data_pipelines.sample_corpus import write_sample
from data_pipelines.tokens import check_place, load_tokenizer, save_tokenizer
from raytune70b.blocks.manifest import SPLITS, Manifest, read_manifest, verify_file
from raytune70b.config import UserError, compose
from raytune70b.storage import Folder

ROOT = Path(__file__).parents[2]
SMALL = ["data.shard_mb=0.03", "data.vocab_size=400", "data.seq_len=64", "data.row_group_blocks=16", "data.file_blocks=64", "run.quiet=true"]


@pytest.fixture(scope="module")
def session():
    ray.init(address="local", num_cpus=4, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("raw") / "corpus"
    write_sample(folder, scale=0.12)
    return folder


@pytest.fixture(scope="module")
def made(session, corpus, tmp_path_factory) -> tuple[Path, Manifest]:
    target = tmp_path_factory.mktemp("made")
    return target, prepared(target, corpus)


def prepared(target: Path, *inputs: Path, more: tuple[str, ...] = ()) -> Manifest:
    return build.prepare(compose([f"data.path={target}", f"data.inputs=[{','.join(map(str, inputs))}]", *SMALL, *more]))


def contents(target: Path) -> dict[str, bytes]:
    """Every file that a reader may rely on."""
    names = ["manifest.json", "duplicates.parquet", "train", "validation", "tokenizer", "quarantine"]
    files = [p for n in names for p in ([target / n] if (target / n).is_file() else sorted((target / n).rglob("*"))) if p.is_file()]
    return {str(p.relative_to(target)): p.read_bytes() for p in files}


def rows(target: Path, split: str) -> list[dict]:
    return [row for path in sorted((target / split).glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def run_job(target: Path, corpus: Path, cpus: int) -> subprocess.Popen:
    code = (
        "import sys, ray; from data_pipelines.build import prepare; from raytune70b.config import compose\n"
        f"ray.init(address='local', num_cpus={cpus}, log_to_driver=False, include_dashboard=False); prepare(compose(sys.argv[1:]))"
    )
    arguments = [f"data.path={target}", f"data.inputs=[{corpus}]", *SMALL]
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_the_manifest_describes_the_blocks(made):
    target, manifest = made
    assert read_manifest(Folder(target)) == manifest
    for split in SPLITS:
        found = rows(target, split)
        assert [r["block_id"] for r in found] == list(range(manifest.rows(split))) and found
        for row in found:
            ends, spans = row["document_ends"], row["trained_spans"]
            assert len(row["input_ids"]) == 64 and ends == sorted(set(ends)) and 0 < ends[-1] <= 64
            assert spans == sorted(spans) and all(a < b for a, b in zip(spans[::2], spans[1::2], strict=True)) and (not spans or spans[-1] <= ends[-1])
            trained = {t for a, b in zip(spans[::2], spans[1::2], strict=True) for t in range(a, b)}
            assert not trained & {0, *ends}, "the first token of a document is trained"
        assert sum(b - a for r in found for a, b in zip(r["trained_spans"][::2], r["trained_spans"][1::2], strict=True)) == manifest.trained_tokens(split)
        for entry in manifest.splits[split]:
            verify_file(Folder(target), entry)
    assert all(0 <= i < manifest.vocab_size for s in SPLITS for r in rows(target, s) for i in r["input_ids"])


def test_every_row_and_token_is_accounted_for(made, corpus):
    target, manifest = made
    documents, tokens = manifest.lineage["documents"], manifest.lineage["tokens"]
    bad = [json.loads(line) for path in sorted((target / "quarantine").glob("*.jsonl")) for line in path.read_text().splitlines()]
    assert sum(documents["quarantined"].values()) == len(bad) == 6
    assert {(b["source"], b["line"]) for b in bad if "contracts" in b["source"]} == {("corpus/contracts.jsonl", n) for n in (4, 11, 14, 16)}
    ends = sum(sum(documents[k].values()) for k in ("quarantined", "dropped", "duplicates", "kept"))
    assert ends == documents["read"] == 6 + 50 + 2 + 2 + 840 + 180 + 1 + 50
    packed = sum(r["document_ends"][-1] for s in SPLITS for r in rows(target, s))
    assert tokens["in"] == tokens["out"] + sum(tokens["dropped"].values()) and tokens["out"] == packed
    assert tokens["padding"] + tokens["out"] == 64 * sum(manifest.lineage["blocks"].values())


def test_planted_copies_go_and_do_not_cross_the_split(made):
    target, manifest = made
    report = pq.read_table(target / "duplicates.parquet").to_pylist()
    assert [r["kind"] for r in report if "contracts" in r["source"]].count("near") >= 1
    assert sum(manifest.lineage["documents"]["duplicates"].values()) == len(report)
    dropped = {(r["source"], r["line"]) for r in report}
    assert all((r["kept_source"], r["kept_line"]) not in dropped for r in report), "what stands for a copy is dropped itself"


def test_nothing_personal_is_left(made):
    target, manifest = made
    tokenizer = load_tokenizer(str(target / "tokenizer"))
    text = "\n".join(tokenizer.decode(r["input_ids"]) for s in SPLITS for r in rows(target, s))
    assert manifest.lineage["redactions"]["email"] > 50 and "[EMAIL_1]" in text
    assert [s.kind for s in find(text.encode(), KINDS)] == []


def test_the_card_shows_counts_and_no_personal_data(made):
    target, manifest = made
    text = (target / "DATA.md").read_text()
    assert manifest.digest in text and "| redact | email |" in text and "[EMAIL_1]" in text
    found = [text.encode()[s.start : s.end].decode() for s in find(text.encode(), [k for k in KINDS if k != "name"])]
    assert found and all(set(value) <= set("x0@.-+() ") for value in found), "only shapes"
    for name in ("lengths", "languages", "redactions", "duplicates"):
        assert (target / "DATA" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("cpus", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_any_number_of_cpus_and_any_order_on_disk_give_the_same_bytes(made, corpus, tmp_path, cpus):
    copy = tmp_path / "elsewhere" / "corpus"
    copy.mkdir(parents=True)
    for path in sorted(corpus.iterdir(), reverse=cpus == 8):
        shutil.copy(path, copy)
    assert run_job(tmp_path / "data", copy, cpus).wait() == 0
    assert contents(tmp_path / "data") == contents(made[0])


def test_killed_and_started_again_it_redoes_only_what_is_missing(made, corpus, tmp_path):
    job, done = run_job(tmp_path, corpus, 1), []
    deadline = time.monotonic() + 60
    while len(done) < 3 and time.monotonic() < deadline and job.poll() is None:
        done = list((tmp_path / "work" / "extract").glob("*.json"))
        time.sleep(0.01)
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "work" / "extract").glob("*.json")}
    assert before and not (tmp_path / "manifest.json").exists()
    prepared(tmp_path, corpus, more=("data.keep_work=true",))
    assert {p: p.stat().st_mtime_ns for p in before} == before, "a finished unit was done again"
    assert contents(tmp_path) == contents(made[0])


def test_unchanged_input_is_recognised_and_not_made_again(made, corpus):
    target, manifest = made
    before, started = (target / "manifest.json").stat().st_mtime_ns, time.monotonic()
    assert prepared(target, corpus) == manifest and time.monotonic() - started < 5
    assert (target / "manifest.json").stat().st_mtime_ns == before


def key(corpus: Path, *more: str, tokenizer=None) -> str:
    config = compose([f"data.path={corpus.parent / 'x'}", f"data.inputs=[{corpus}]", *SMALL, *more])
    return build._key(config, build.plan(config, config.data.inputs), [], tokenizer)


def test_any_change_makes_another_data_set(corpus, tmp_path, monkeypatch):
    copy = tmp_path / "corpus"
    shutil.copytree(corpus, copy)
    first = key(copy)
    assert key(copy) == first == key(copy, "data.max_quarantined=0.5", "data.shuffle_window=9")
    keys = [first, key(copy, "data.seq_len=128"), key(copy, "data.redact=[email]"), key(copy, "data.near_duplicates=0.7")]
    keys += [key(copy, tokenizer=t) for t in (chatml(), with_template(CHATML + " "), with_template(CHATML), with_template(CHATML, eos_token="<s>"))]
    text = (copy / "notice.txt").read_text()
    (copy / "notice.txt").write_text(text.replace("e", "f", 1))
    keys.append(key(copy))
    monkeypatch.setattr(build, "code_version", lambda: "another")
    keys.append(key(copy))
    assert len(set(keys)) == len(keys)


def test_a_damaged_data_set_is_made_again(session, corpus, tmp_path):
    manifest = prepared(tmp_path, corpus)
    flip(tmp_path / manifest.splits["train"][0].name)
    assert prepared(tmp_path, corpus) == manifest
    verify_file(Folder(tmp_path), manifest.splits["train"][0])


def flip(path: Path) -> None:
    """Flips one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_what_is_damaged_is_mended_from_the_work_that_was_kept(session, corpus, tmp_path):
    keep = ("data.keep_work=true",)
    manifest = prepared(tmp_path, corpus, more=keep)
    block, held_out, stale = tmp_path / manifest.splits["train"][0].name, tmp_path / "held_out.parquet", tmp_path / "tokenizer/additional_chat_templates/tool.jinja"
    whole, held = contents(tmp_path), held_out.read_bytes()
    stale.parent.mkdir()
    for harm in (block.unlink, lambda: flip(block), lambda: flip(held_out), lambda: stale.write_text("of another tokenizer"), lambda: flip(tmp_path / "tokenizer/tokenizer.json")):
        harm()
        assert prepared(tmp_path, corpus, more=keep) == manifest
        assert contents(tmp_path) == whole and held_out.read_bytes() == held and not stale.exists()


def test_a_tokenizer_that_lies_where_the_data_sets_own_is_written(tmp_path):
    data, own = Folder(tmp_path), Folder(tmp_path / "tokenizer")
    save_tokenizer(chatml(), own)
    check_place(chatml(), own, data, own)  # written as it is: nothing is lost
    save_tokenizer(chatml(), own / "mine")
    for given in (own, own / "mine"):
        with pytest.raises(UserError, match=r"data\.tokenizer: .*tokenizer.* would remove mine/"):
            check_place(chatml(), given, data, own)


@pytest.mark.parametrize("tokenizer", [chatml(), None], ids=["given", "train"])
def test_files_that_are_of_no_data_set_are_not_removed(tmp_path, tokenizer):
    data, own, elsewhere = Folder(tmp_path), Folder(tmp_path / "tokenizer"), Folder(tmp_path / "tokenizer-2")
    check_place(tokenizer, elsewhere, data, own)
    own.write("llama3/tokenizer.json", b"{}")
    with pytest.raises(UserError, match=r"data\.path: .* holds no data set, but files in .*tokenizer \(llama3/tokenizer\.json\)"):
        check_place(tokenizer, elsewhere, data, own)
    (data / "work").make()  # what a killed preparation left is its own
    check_place(tokenizer, elsewhere, data, own)


def legal(draw: random.Random, words: int = 60) -> str:
    vocabulary = ["the", "tenant", "landlord", "shall", "pay", "rent", "notice", "court", "judgment", "section"]
    vocabulary += ["agreement", "party", "claim", "costs", "appeal", "order", "evidence", "witness", "property"]
    return " ".join(draw.choice(vocabulary) for _ in range(words)) + "."


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n")
    return path


def test_a_model_with_its_own_tokenizer_and_template(session, tmp_path):
    chatml().save_pretrained(tmp_path / "tokenizer")
    chats = [{"messages": [{"role": "user", "content": f"Question {n}?"}, {"role": "assistant", "content": f"Answer number {n}."}]} for n in range(40)]
    path = write_lines(tmp_path / "chats.jsonl", chats)
    manifest = prepared(tmp_path / "data", path, more=(f"data.tokenizer={tmp_path / 'tokenizer'}", "data.near_duplicates=0", "data.validation_fraction=0.2"))
    tokenizer = load_tokenizer(str(tmp_path / "data" / "tokenizer"))
    assert tokenizer.chat_template == CHATML and manifest.lineage["documents"]["kept"]["validation"] > 0
    answers = [tokenizer.decode(r["input_ids"][a:b]) for s in SPLITS for r in rows(tmp_path / "data", s) for a, b in zip(r["trained_spans"][::2], r["trained_spans"][1::2], strict=True)]
    assert sorted(answers) == sorted(f"Answer number {n}.<|im_end|>" for n in range(40))
    assert manifest.answer_ends == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)


def test_documents_that_share_13_words_with_the_evaluation_are_left_out(session, tmp_path):
    draw = random.Random(0)
    texts = [legal(draw) for _ in range(60)]
    shared = texts[7].split()[20:33]
    path = write_lines(tmp_path / "train.jsonl", [{"text": t} for t in texts])
    held = write_lines(tmp_path / "held.jsonl", [{"question": " ".join(shared).upper() + "?", "answer": "Yes."}, {"text": " ".join(texts[9].split()[:12])}])
    manifest = prepared(tmp_path / "data", path, more=(f"data.evaluation=[{held}]", "data.near_duplicates=0"))
    assert manifest.lineage["documents"]["dropped"] == {"shares 13 words with the evaluation files": 1}


def test_near_copies_of_known_similarity(session, tmp_path):
    draw, documents = random.Random(1), []
    for _ in range(40):
        text = " ".join(f"{draw.choice(['lease', 'claim', 'appeal', 'court', 'tenant'])}{draw.randrange(900)}" for _ in range(200))
        words = text.split()
        documents += [text, " ".join([*words[:-2], "changed", "ending"])]  # Jaccard about 0.98
    path = write_lines(tmp_path / "a.jsonl", [{"text": t} for t in documents])
    manifest = prepared(tmp_path / "data", path, more=("data.languages=[]", "data.validation_fraction=0.3"))
    assert manifest.lineage["documents"]["duplicates"] == {"exact": 0, "near": 40}
    kept = pq.read_table(tmp_path / "data" / "duplicates.parquet").to_pylist()
    assert {frozenset((r["line"], r["kept_line"])) for r in kept} == {frozenset((2 * n + 1, 2 * n + 2)) for n in range(40)}


def test_too_many_bad_rows_stop_the_job(session, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "The tenant shall pay the rent."}\n' * 9 + "no\n")
    with pytest.raises(UserError, match=r"data.max_quarantined: 1 of 10 rows.*a.jsonl:10: not JSON"):
        prepared(tmp_path / "data", tmp_path / "a.jsonl")
    assert (tmp_path / "data" / "quarantine" / "00000.jsonl").exists() and not (tmp_path / "data" / "manifest.json").exists()


def test_nothing_left_says_why(session, tmp_path):
    (tmp_path / "a.txt").write_text("Der Mieter hat die Miete am ersten Tag jedes Monats zu zahlen, sofern nichts anderes vereinbart ist.")
    with pytest.raises(UserError, match="no document is left to train on; language de: 1"):
        prepared(tmp_path / "data", tmp_path / "a.txt")


@pytest.mark.parametrize(("arguments", "words"), [
    (["data.inputs=[/nowhere/at/all]"], "data.inputs: /nowhere/at/all does not exist"),
    (["data.inputs=[]"], "data.inputs: is empty"),
    (["data.redact=[emails]"], "data.redact: 'emails' is no kind of personal data"),
    (["data.columns={body: text}"], "data.columns: 'body' is none of ours"),
    (["data.tokenizer=/nowhere"], "data.tokenizer: /nowhere is not a Hugging Face tokenizer folder"),
])  # fmt: skip
def test_what_the_user_must_mend_is_one_line_before_ray_starts(tmp_path, arguments, words):
    started = time.monotonic()
    done = subprocess.run([sys.executable, "jobs/prepare.py", f"data.path={tmp_path}", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1
    assert time.monotonic() - started < 5


def test_a_vocabulary_larger_than_the_model_is_refused(tmp_path, corpus):
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    with pytest.raises(UserError, match=r"has 400 ids, the model of model\.path has 300"):
        prepared(tmp_path / "data", corpus, more=(f"model.path={tmp_path}",))


def test_evaluation_hashes_are_sorted_and_unique(tmp_path):
    path = write_lines(tmp_path / "held.jsonl", [{"text": legal(random.Random(2), 30)}] * 2)
    config = compose([f"data.path={tmp_path / 'x'}"])
    from data_pipelines.extract import evaluation_hashes

    hashes = evaluation_hashes(build.plan(config, [str(path)]), {})
    assert len(hashes) == 18 and (np.diff(hashes.astype(np.float64)) > 0).all()
