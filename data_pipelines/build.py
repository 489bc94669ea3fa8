"""Raw documents to a data set of token blocks: `prepare` runs the stages and writes the manifest.

    extract -> candidates -> fetch -> verify -> (tokenizer) -> encode -> publish
    a shard    duplicates over all shards                      a shard   a file

Promises: the same inputs give the same bytes and the same manifest digest on any number of CPUs; a killed run goes on
where it stopped; an unchanged data set is recognised as fast as its files can be read, and a damaged one is made whole; any change
of input, setting, tokenizer, template or code makes another one. Wrong, missing or empty input is one UserError before Ray
starts. The manifest is removed first and written last, so a half-made data set does not exist.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from data_pipelines import card, held_out, lineage, stages
from data_pipelines.duplicates import Duplicates, find_duplicates
from data_pipelines.existing import TOKENIZER, block_file, existing, is_whole
from data_pipelines.extract import Extract, Rules, evaluation_hashes, extract
from data_pipelines.progress import Progress
from data_pipelines.redact import KINDS
from data_pipelines.rows import NAMES
from data_pipelines.sample_corpus import write_sample
from data_pipelines.sources import InputError, Scan, Shard, find_files, plan_shards, scan_files
from data_pipelines.tokens import TokenizerError, answer_ends, check_place, load_tokenizer, save_tokenizer, train_tokenizer
from data_pipelines.work import Result, Unit, code_version, connect, digest_of, run_stage
from raytune70b.blocks.manifest import MANIFEST, SPLITS, BlockFile, Manifest
from raytune70b.config import ConfigError, UserError
from raytune70b.places import check_places
from raytune70b.schema import Config
from raytune70b.storage import Folder

SCANS = "inputs.json"
"""In the data folder: checksums of input files by size and date, so that unchanged ones are not read again."""
TRAIN_CHARACTERS = 50_000_000
"""Of the kept documents, so much is read to train a tokenizer."""
PARTITION_BYTES = 500_000_000
"""Of the inputs, so much is searched for duplicates at once: about 130 MB of hashes."""
NOT_IN_KEY = ("path", "inputs", "tokenizer", "evaluation", "max_quarantined", "shuffle_window", "keep_work")


class QuarantineError(UserError):
    """More bad rows than `data.max_quarantined` allows."""


def prepare(config: Config) -> Manifest:
    """Makes the data set of `config.data` in `data.path`, or recognises the one that is there. Raises UserError."""
    started = time.monotonic()
    target = Folder(config.data.path)
    check(config)
    check_places(config, "data.path", target, mlflow=False)
    shards = plan(config, config.data.inputs)
    evaluation = plan(config, config.data.evaluation) if config.data.evaluation else []
    tokenizer = None if config.data.tokenizer == "train" else load_tokenizer(config.data.tokenizer)
    _check_vocabulary(config, tokenizer)
    check_place(tokenizer, Folder(config.data.tokenizer), target, target / TOKENIZER)
    key = _key(config, shards, evaluation, tokenizer)
    there = existing(target, key)
    if there is not None:
        _say(config, f"{target.uri}: unchanged, {there.rows('train'):,} + {there.rows('validation'):,} blocks")
        return there
    questions = evaluation_hashes(evaluation, config.data.columns) if evaluation else np.zeros(0, np.uint64)
    connect(config)
    (target / "work").make()  # it tells a killed run's folder from one of somebody else
    target.delete(MANIFEST)
    build = _Build(config, target, key)
    manifest = build.run(shards, evaluation, questions, tokenizer)
    seconds = time.monotonic() - started
    card.write(target, config, manifest, build.figures, {**build.progress.seconds, "in all": seconds})
    target.write(MANIFEST, manifest.to_json().encode())
    if not config.data.keep_work:
        target.delete("work")
    _say(config, lineage.printed(manifest.lineage, seconds) + f"\n{target.uri}: {manifest.digest}")
    return manifest


def check(config: Config) -> None:
    """Raises ConfigError for names that no rule or reader knows."""
    for kind in config.data.redact:
        if kind not in KINDS:
            raise ConfigError(f"data.redact: {kind!r} is no kind of personal data; it takes {', '.join(KINDS)}")
    for name in config.data.columns:
        if name not in NAMES:
            raise ConfigError(f"data.columns: {name!r} is none of ours; it maps {', '.join(NAMES)} to your columns' names")


def plan(config: Config, inputs: list[str]) -> list[Shard]:
    """The shards of the inputs; `sample` among them is made on the spot. Raises InputError."""
    target = Folder(config.data.path)
    files, others = find_files([_sample(target) if name == "sample" else name for name in inputs])
    if others:
        _say(config, "left out (hidden, or of no known kind): " + ", ".join(f"{n} {suffix}" for suffix, n in sorted(others.items())))
    shard_bytes = int(config.data.shard_mb * 1_000_000)
    known = _known_scans(target)
    scans = scan_files(files, shard_bytes, known)
    if not scans.items() <= known.items():
        target.write(SCANS, json.dumps({k: asdict(s) for k, s in {**known, **scans}.items()}).encode())
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


def _key(config: Config, shards: list[Shard], evaluation: list[Shard], tokenizer: Any) -> str:
    """Names everything that the data set depends on."""
    own = None if tokenizer is None else [tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, tokenizer.special_tokens_map]
    settings = {k: v for k, v in asdict(config.data).items() if k not in NOT_IN_KEY}
    return digest_of(code_version(), settings, own, [s.content for s in shards], [s.content for s in evaluation])


class _Build:
    """One run of the stages; what they hand on stands in the work folder."""

    def __init__(self, config: Config, target: Folder, key: str):
        self.config, self.target, self.key = config, target, key
        self.work = target / "work"
        self.progress = Progress(config.run.quiet)
        self.figures: card.Figures

    def run(self, shards: list[Shard], evaluation: list[Shard], questions: np.ndarray, tokenizer: Any) -> Manifest:
        data = self.config.data
        rules = self.rules(shards, evaluation, questions)
        extracts = [self.extract_unit(shard, rules) for shard in shards]
        extracted = run_stage("extract", self.work, extract, extracts, self.progress)
        self.check_quarantine(extracts, extracted)
        duplicates = find_duplicates(self.work, extracts, rules.partitions, data.near_duplicates, self.progress)
        if tokenizer is None:
            tokenizer = train_tokenizer(self.training_texts(extracts, duplicates), data.vocab_size)
        fingerprint, template = save_tokenizer(tokenizer, self.target / TOKENIZER, alone=True)
        encodes = [self.encode_unit(u, r, duplicates, fingerprint) for u, r in zip(extracts, extracted, strict=True)]
        encoded = run_stage("encode", self.work, stages.encode, encodes, self.progress)
        files = self.publish(encodes, encoded)
        self.write_held_out(extracts, duplicates)
        if not files["train"]:
            raise InputError(f"data.inputs: {', '.join(data.inputs)}: no document is left to train on; {_reasons(extracted, encoded)}")
        counts = lineage.accounts(extracted, duplicates, encoded, data.seq_len)
        self.figures = card.Figures.of(extracted, encoded, duplicates)
        self.write_duplicates(duplicates)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        return Manifest(data.seq_len, len(tokenizer), pad, fingerprint, template, files, {"key": self.key, "answer_ends": answer_ends(tokenizer), "held_out": self.target.checksum(held_out.HELD_OUT), **counts})

    def rules(self, shards: list[Shard], evaluation: list[Shard], questions: np.ndarray) -> Rules:
        """`questions`: the hashes of the evaluation files."""
        data, name = self.config.data, ""
        if evaluation:
            name = f"evaluation-{digest_of([s.content for s in evaluation], data.columns)}.bin"
            self.work.write(name, questions.tobytes())
        size = sum(p.stop - p.start if p.file.format == "jsonl" else p.file.bytes for s in shards for p in s.pieces)
        partitions = 1 + size // PARTITION_BYTES
        return Rules(data.columns, tuple(data.languages), data.min_words, tuple(data.redact), data.near_duplicates > 0, partitions, name)

    def extract_unit(self, shard: Shard, rules: Rules) -> Unit:
        weight = sum(p.stop - p.start if p.file.format == "jsonl" else p.file.bytes for p in shard.pieces)
        return Unit(digest_of("extract", code_version(), shard.index, shard.content, asdict(rules)), Extract(shard, rules, self.work), weight)

    def check_quarantine(self, units: list[Unit], results: list[Result]) -> None:
        """Writes the quarantine; stops when more than `data.max_quarantined` of the rows are in it."""
        self.target.delete("quarantine")
        bad, rows, example = sum(lineage.total(results, "quarantined").values()), lineage.total(results, "counts").get("read", 0), ""
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

    def training_texts(self, extracts: list[Unit], duplicates: Duplicates) -> Iterator[str]:
        """The first documents of the training split, as the tokenizer will see them."""
        left = TRAIN_CHARACTERS
        for unit in extracts:
            dropped = _dropped(duplicates, unit)
            for batch in stages.kept_documents(self.work / "extract", unit.key, dropped, self.config.data.validation_fraction):
                for text, chat, split in batch:
                    if split == "train":
                        yield from [content for _, content in json.loads(text)] if chat else [text]
                        left -= len(text)
                if left <= 0:
                    return

    def encode_unit(self, unit: Unit, result: Result, duplicates: Duplicates, fingerprint: str) -> Unit:
        data, dropped = self.config.data, _dropped(duplicates, unit)
        key = digest_of("encode", unit.key, dropped.tobytes().hex(), fingerprint, data.seq_len, data.validation_fraction)
        payload = stages.Encode(self.work / "extract", unit.key, dropped, data.validation_fraction, self.target / TOKENIZER, fingerprint, data.seq_len)
        return Unit(key, payload, max(1, result["counts"].get("characters", 0)))

    def write_held_out(self, extracts: list[Unit], duplicates: Duplicates) -> None:
        """The validation split's documents as text, for evaluations."""
        fraction, units = self.config.data.validation_fraction, []
        for unit in extracts:
            payload = held_out.Select(self.work / "extract", unit.key, _dropped(duplicates, unit), fraction)
            units.append(Unit(digest_of("held out", unit.key, payload.dropped.tobytes().hex(), fraction), payload))
        run_stage("held-out", self.work, held_out.select, units, self.progress)
        held_out.join(self.work / "held-out", [u.key for u in units], self.target)

    def publish(self, units: list[Unit], results: list[Result]) -> dict[str, tuple[BlockFile, ...]]:
        """The data set's files: encoded shards in order, `data.file_blocks` blocks a file."""
        work: list[tuple[str, Unit]] = []
        for split in SPLITS:
            shards = [(u.key, r["rows"][split]) for u, r in zip(units, results, strict=True)]
            first = 0
            for number, slices in enumerate(stages.file_slices(shards, self.config.data.file_blocks)):
                name = f"{split}/{number:05d}.parquet"
                payload = stages.Publish(self.work / "encode", slices, split, first, self.target, name, self.config.data.row_group_blocks)
                blocks = sum(s.stop - s.start for s in slices)
                work.append((split, Unit(digest_of([asdict(s) for s in slices], name), payload, blocks)))
                first += blocks
        stage = f"publish-{self.key[:12]}"
        self.drop_stale({u.payload.name for _, u in work}, stage)
        written = run_stage(stage, self.work, stages.publish, [u for _, u in work], self.progress, lambda r: is_whole(self.target, block_file(r)))
        files: dict[str, tuple[BlockFile, ...]] = {split: () for split in SPLITS}
        for (split, _), w in zip(work, written, strict=True):
            files[split] += (block_file(w),)
        return files

    def drop_stale(self, names: set[str], stage: str) -> None:
        """Removes files of an earlier data set, and the marks that say they were written."""
        for split in SPLITS:
            for name in (self.target / split).names():
                if f"{split}/{name}" not in names:
                    self.target.delete(f"{split}/{name}")
        for name in self.work.names():
            if name.startswith("publish-") and name != stage:
                self.work.delete(name)

    def write_duplicates(self, duplicates: Duplicates) -> None:
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        pq.write_table(duplicates.report, sink)
        self.target.write("duplicates.parquet", sink.getvalue())


def _dropped(duplicates: Duplicates, unit: Unit) -> np.ndarray:
    return duplicates.dropped.get(unit.payload.shard.index, np.zeros(0, np.int64))


def _reasons(extracted: list[Result], encoded: list[Result]) -> str:
    reasons = {**lineage.total(extracted, "quarantined"), **lineage.total(extracted, "dropped"), **lineage.total(encoded, "dropped")}
    return ", ".join(f"{reason}: {n}" for reason, n in reasons.items()) or "all went to validation; raise the number of documents"


def _say(config: Config, text: str) -> None:
    if not config.run.quiet:
        print(text, flush=True)
