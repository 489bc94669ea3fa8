"""Raw documents to a data set of token blocks: `prepare` runs the stages and writes the manifest.

Promises: the same inputs give the same bytes and the same manifest digest on any number of CPUs; a killed run goes on
where it stopped; an unchanged data set is recognised in seconds and not made again; any change of input, setting, tokenizer,
template or code makes another one. Wrong, missing or empty input is one UserError before Ray starts. The manifest is
removed first and written last, so a half-made data set does not exist.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from data_pipelines import stages
from data_pipelines.sample_corpus import write_sample
from data_pipelines.sources import InputError, Scan, Shard, find_files, plan_shards, scan_files
from data_pipelines.tokens import TokenizerError, load_tokenizer, save_tokenizer, train_tokenizer
from data_pipelines.work import Result, Unit, code_version, connect, digest_of, run_stage
from raytune70b.blocks.manifest import MANIFEST, SPLITS, BlockFile, DataError, Manifest, read_manifest
from raytune70b.config import UserError
from raytune70b.schema import Config
from raytune70b.storage import Folder

SCANS = "inputs.json"
"""In the data folder: checksums of input files by size and date, so that unchanged ones are not read again."""
TRAIN_CHARACTERS = 50_000_000
"""Of the kept documents, so much is read to train a tokenizer."""


class QuarantineError(UserError):
    """More bad rows than `data.max_quarantined` allows."""


def prepare(config: Config) -> Manifest:
    """Makes the data set of `config.data` in `data.path`, or recognises the one that is there. Raises UserError."""
    started = time.monotonic()
    target = Folder(config.data.path)
    shards = plan(config)
    tokenizer = None if config.data.tokenizer == "train" else load_tokenizer(config.data.tokenizer)
    _check_vocabulary(config, tokenizer)
    key = _key(config, shards, tokenizer)
    existing = _existing(target, key)
    if existing is not None:
        _say(config, f"{target.uri}: unchanged, {existing.rows('train'):,} + {existing.rows('validation'):,} blocks")
        return existing
    connect(config)
    target.delete(MANIFEST)
    manifest = _Build(config, target, key).run(shards, tokenizer)
    target.write(MANIFEST, manifest.to_json().encode())
    target.delete("work")
    _say(config, _table(manifest, time.monotonic() - started))
    return manifest


def plan(config: Config) -> list[Shard]:
    """The shards of the inputs; `sample` among them is made on the spot. Raises InputError."""
    target = Folder(config.data.path)
    inputs = [_sample(target) if name == "sample" else name for name in config.data.inputs]
    files, others = find_files(inputs)
    if others:
        _say(config, "left out, of no known kind: " + ", ".join(f"{n} {suffix}" for suffix, n in sorted(others.items())))
    shard_bytes = int(config.data.shard_mb * 1_000_000)
    known = _known_scans(target)
    scans = scan_files(files, shard_bytes, known)
    if scans != known:
        target.write(SCANS, json.dumps({k: asdict(s) for k, s in scans.items()}).encode())
    return plan_shards(files, scans, shard_bytes, config.data.columns)


def _known_scans(target: Folder) -> dict[str, Scan]:
    if target.size(SCANS) is None:
        return {}
    return {k: Scan(s["xxh3"], tuple(s["newlines"])) for k, s in json.loads(target.read(SCANS)).items()}


def _sample(target: Folder) -> str:
    if target.local is None:
        raise InputError(f"data.inputs: sample needs a local data.path, not {target.uri}")
    folder = target.local / "raw" / "sample"
    if not folder.is_dir():
        write_sample(folder)
    return str(folder)


def _check_vocabulary(config: Config, tokenizer: Any) -> None:
    """A model whose embedding has fewer rows than the tokenizer has ids would fail in the middle of a step."""
    size = config.data.vocab_size if tokenizer is None else len(tokenizer)
    path = Path(config.model.path or "") / "config.json"
    if config.model.path is None or not path.is_file():
        return
    rows = json.loads(path.read_text()).get("vocab_size")
    if isinstance(rows, int) and size > rows:
        raise TokenizerError(f"data.tokenizer: has {size} ids, the model of model.path has {rows}; use the model's own tokenizer")


def _key(config: Config, shards: list[Shard], tokenizer: Any) -> str:
    """Names everything that the data set depends on."""
    own = None if tokenizer is None else [tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, tokenizer.special_tokens_map]
    settings = {k: v for k, v in asdict(config.data).items() if k not in ("path", "inputs", "tokenizer", "max_quarantined", "shuffle_window")}
    return digest_of(code_version(), settings, own, [s.content for s in shards])


def _existing(target: Folder, key: str) -> Manifest | None:
    """The data set that is there, when it is the one that would be made and its files are in place."""
    try:
        manifest = read_manifest(target)
    except DataError:
        return None
    whole = all(target.size(f.name) == f.bytes for split in SPLITS for f in manifest.splits[split])
    return manifest if whole and manifest.lineage.get("key") == key else None


class _Build:
    """One run of the stages; what they hand on stands in the work folder."""

    def __init__(self, config: Config, target: Folder, key: str):
        self.config, self.target, self.key = config, target, key
        self.work = target / "work"

    def run(self, shards: list[Shard], tokenizer: Any) -> Manifest:
        data = self.config.data
        extracts = [Unit(digest_of("extract", code_version(), s.content, data.columns), stages.Extract(s, data.columns)) for s in shards]
        extracted = run_stage("extract", self.work, stages.extract, extracts)
        self.check_quarantine(extracts, extracted)
        splits, decided = self.decide(extracts)
        if tokenizer is None:
            tokenizer = train_tokenizer(self.training_texts(extracts, splits), data.vocab_size)
        fingerprint, template = save_tokenizer(tokenizer, self.target / "tokenizer")
        encodes = [self.encode_unit(u, s, fingerprint) for u, s in zip(extracts, splits, strict=True)]
        encoded = run_stage("encode", self.work, stages.encode, encodes)
        files = self.publish(encodes, encoded)
        if not files["train"]:
            raise InputError(f"data.inputs: {', '.join(data.inputs)}: no document is left to train on")
        lineage = {"key": self.key, **_lineage(extracted, encoded, decided), "blocks": {s: sum(f.rows for f in files[s]) for s in SPLITS}}
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        return Manifest(data.seq_len, len(tokenizer), pad, fingerprint, template, files, lineage)

    def check_quarantine(self, units: list[Unit], results: list[Result]) -> None:
        """Writes the quarantine; stops when more than `data.max_quarantined` of the rows are in it."""
        self.target.delete("quarantine")
        bad = sum(sum(r["quarantined"].values()) for r in results)
        rows = bad + sum(r["counts"].get("documents", 0) for r in results)
        example = ""
        for number, (unit, result) in enumerate(zip(units, results, strict=True)):
            if result["quarantined"]:
                content = (self.work / "extract").read(f"{unit.key}.bad.jsonl")
                self.target.write(f"quarantine/{number:05d}.jsonl", content)
                first = json.loads(content.split(b"\n", 1)[0])
                example = example or f"{first['source']}:{first['line']}: {first['reason']}"
        if not rows:
            raise InputError(f"data.inputs: {', '.join(self.config.data.inputs)}: no row in them")
        if bad > rows * self.config.data.max_quarantined:
            raise QuarantineError(
                f"data.max_quarantined: {bad} of {rows} rows cannot be read, more than {self.config.data.max_quarantined:.1%}; "
                f"the first is {example}; all are in {self.target.uri}/quarantine"
            )

    def decide(self, extracts: list[Unit]) -> tuple[list[np.ndarray], Counter[str]]:
        """For every document the index of its split, -1 where it is a duplicate."""
        limit = int(self.config.data.validation_fraction * 2**32)
        seen: set[bytes] = set()
        counts: Counter[str] = Counter()
        splits = []
        for unit in extracts:
            hashes = [h for batch in stages.documents(self.work / "extract", unit.key, ["hash"]) for h in batch["hash"]]
            split = np.array([int.from_bytes(h[:4], "little") < limit for h in hashes], np.int8)
            for n, h in enumerate(hashes):
                if h in seen:
                    split[n] = -1
                    counts["exact duplicate"] += 1
                seen.add(h)
            splits.append(split)
        return splits, counts

    def training_texts(self, extracts: list[Unit], splits: list[np.ndarray]) -> Iterator[str]:
        left = TRAIN_CHARACTERS
        for unit, split in zip(extracts, splits, strict=True):
            first = 0
            for batch in stages.documents(self.work / "extract", unit.key, ["text", "chat"]):
                for n, (text, chat) in enumerate(zip(batch["text"], batch["chat"], strict=True), first):
                    if split[n] == 0:
                        yield from [content for _, content in json.loads(text)] if chat else [text]
                        left -= len(text)
                first += len(batch["text"])
                if left <= 0:
                    return

    def encode_unit(self, unit: Unit, split: np.ndarray, fingerprint: str) -> Unit:
        key = digest_of("encode", unit.key, split.tobytes().hex(), fingerprint, self.config.data.seq_len)
        return Unit(key, stages.Encode(self.work / "extract", unit.key, split, self.target / "tokenizer", fingerprint, self.config.data.seq_len))

    def publish(self, units: list[Unit], results: list[Result]) -> dict[str, tuple[BlockFile, ...]]:
        """The data set's files: encoded shards in order, joined up to a good size."""
        work: list[tuple[str, Unit]] = []
        for split in SPLITS:
            self.target.delete(split)
            first, rows = 0, 0
            group: list[str] = []
            shards = [(u.key, r["rows"][split]) for u, r in zip(units, results, strict=True) if r["rows"][split]]
            for n, (key, count) in enumerate(shards):
                group, rows = [*group, key], rows + count
                if rows >= self.config.data.file_blocks or n == len(shards) - 1:
                    name = f"{split}/{sum(s == split for s, _ in work):05d}.parquet"
                    payload = stages.Publish(self.work / "encode", tuple(group), split, first, self.target, name, self.config.data.row_group_blocks)
                    work.append((split, Unit(digest_of("publish", group, first, name, payload.row_group_blocks), payload)))
                    first, group, rows = first + rows, [], 0
        self.work.delete("publish")
        written = run_stage("publish", self.work, stages.publish, [u for _, u in work])
        files: dict[str, tuple[BlockFile, ...]] = {split: () for split in SPLITS}
        for (split, _), w in zip(work, written, strict=True):
            files[split] += (BlockFile(w["name"], tuple(w["row_groups"]), w["trained_tokens"], w["bytes"], w["xxh3"]),)
        return files


def _lineage(extracted: list[Result], encoded: list[Result], decided: Counter[str]) -> dict[str, Any]:
    """What became of every row and token; the counts add up."""
    def total(results: list[Result], field: str) -> dict[str, int]:
        return dict(sorted(sum((Counter(r[field]) for r in results), Counter()).items()))

    counts, tokens = total(extracted, "counts"), total(encoded, "counts")
    quarantined = total(extracted, "quarantined")
    return {
        "documents": {
            "read": counts.get("documents", 0) + sum(quarantined.values()),
            "quarantined": quarantined,
            "duplicates": dict(decided),
            "dropped": total(encoded, "dropped"),
            "kept": {split: tokens.get(f"documents_{split}", 0) for split in SPLITS},
        },
        "tokens": {"in": tokens.get("tokens", 0), "trained": tokens.get("trained_tokens", 0)},
    }


def _table(manifest: Manifest, seconds: float) -> str:
    documents, lines = manifest.lineage["documents"], []
    lines.append(f"documents read {documents['read']:,}")
    for what in ("quarantined", "duplicates", "dropped", "kept"):
        lines += [f"  {what:<12}{name:<50}{count:>10,}" for name, count in documents[what].items()]
    lines += [f"  blocks      {split:<50}{manifest.rows(split):>10,}" for split in SPLITS]
    return "\n".join([*lines, f"{manifest.lineage['tokens']['in']:,} tokens in {seconds:.1f} s"])


def _say(config: Config, text: str) -> None:
    if not config.run.quiet:
        print(text, flush=True)
