"""Everything that can be checked before Ray starts: data, model, batch, resume. Pure files and numbers; raises UserError."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raytune70b.blocks.manifest import DataError, Manifest, read_manifest, verify_file
from raytune70b.blocks.order import Order
from raytune70b.blocks.stream import Feed, Reader, row_groups
from raytune70b.config import UserError, get, known_keys, to_yaml
from raytune70b.model.fingerprint import base_fingerprint
from raytune70b.schema import Config
from raytune70b.storage import Folder
from raytune70b.tracking.journal import Record, lineage
from raytune70b.training.checkpoint import Cursor, newest

CONTINUITY = ("run.seed", "data.shuffle_window", "model.path", "model.config", "model.method", "model.lora", "model.precision", "model.gradients",
              "train.epochs", "train.steps", "train.global_batch_size", "train.learning_rate", "train.min_lr_ratio", "train.warmup_steps",
              "train.schedule", "train.optimizer", "train.weight_decay", "train.beta1", "train.beta2", "train.eps", "train.max_grad_norm")  # fmt: skip
"""Settings that a resumed run must share with its checkpoint: data order, batch, schedule, model. The data's digest is one more."""

LARGE = 5e8
"""Parameters from which on nobody means to train from scratch on a few billion tokens."""

LONGER = "the learning rate followed that length to its end; to train on, export the run (jobs/export.py) and start another run.name with model.path=EXPORT"
"""A way to more steps that works: a run that has begun keeps its schedule, which spans its steps."""


@dataclass(frozen=True)
class Prepared:
    config: Config
    """With absolute paths: workers run in other folders."""
    run: Folder
    data: Folder
    manifest: Manifest
    feed: Feed
    fingerprint: dict[str, Any]
    resumed: Cursor | None

    def ended(self, records: list[Record]) -> bool:
        """Whether there is nothing left to do: the newest checkpoint is that of the last step, and its validation was made.

        records: the run's journal. Where a stop fell between that checkpoint and its validation, the loss is there alone.
        """
        if self.resumed is None or self.resumed.step < self.feed.total_steps:
            return False
        measured = self.resumed.validation_loss is not None or any(r["step"] == self.resumed.step for r in lineage(records, "validation"))
        return measured or not self.manifest.trained_tokens("validation")


def prepare_run(config: Config) -> Prepared:
    """Checks a run's inputs and says what it will do."""
    config = absolute(config)
    data, run = Folder(config.data.path), Folder(config.run.path) / config.run.name
    manifest = read_manifest(data)
    check_data(data, manifest)
    # Imports torch: what is wrong with the data is said before.
    from raytune70b.model.load import check_buildable, check_libraries, check_model, hf_config

    check_libraries(config)
    special = special_tokens(data) if config.model.path else None  # a model made on the spot has no tokens of its own
    check_model(hf_config(config.model, manifest.vocab_size), manifest.seq_len, manifest.vocab_size, special)
    warn_of_frozen_experts(config, check_buildable(config, manifest.vocab_size))
    warn_of_random_weights(config, manifest.vocab_size)
    order = Order(row_groups(manifest, "train"), config.run.seed, config.data.shuffle_window, config.train.global_batch_size)
    from raytune70b.training.expected import fitted

    config = sized(config, manifest)  # before the schedule: a larger micro-batch makes faster steps
    check_length(config, order, run)
    config = fitted(config, run, manifest, total_steps(config, order))
    feed = Feed(Reader(data, manifest, "train"), order, int(config.train.micro_batch_size), total_steps(config, order))
    fingerprint = {key: get(config, key) for key in continuity_keys()}
    fingerprint["data"] = manifest.digest
    fingerprint["base"] = base_fingerprint(Folder(config.model.path)) if config.model.path else None
    return Prepared(config, run, data, manifest, feed, fingerprint, check_resume(config, run, fingerprint))


def warn_of_random_weights(config: Config, vocab_size: int) -> None:
    """Says so where a large model has no weights to start from: the shape alone is in `model.config`."""
    if config.model.path is not None:
        return
    from raytune70b.planning.workload import config_shape

    parameters = config_shape(config, vocab_size).parameters
    if parameters >= LARGE:
        print(f"warning: model.path is empty, so {parameters / 1e9:.1f} B random weights are trained from scratch; to fine-tune, name the folder of the model", flush=True)


def warn_of_frozen_experts(config: Config, model: Any) -> None:
    """Says so where adapters leave most of a mixture as it is."""
    from raytune70b.model.adapters import frozen_experts

    share = frozen_experts(model) if config.model.method != "full" else 0.0
    if share:
        print(f"warning: model.method is {config.model.method}, so the stacked experts, {share:.0%} of the parameters, stay as they are; model.method=full trains them", flush=True)


def absolute(config: Config) -> Config:
    """The configuration with absolute paths. Warns where a submitted job would write into the copy that Ray deletes after it."""
    if "_ray_pkg_" in str(Path.cwd()) and Folder(config.run.path).uri != config.run.path:
        print(f"warning: run.path={config.run.path} is relative, so it lies in this job's temporary copy of the working folder; "
              "give an absolute path on storage that all nodes share, or a URI", flush=True)  # fmt: skip

    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, path=Folder(config.run.path).uri),
        data=dataclasses.replace(config.data, path=Folder(config.data.path).uri),
        model=dataclasses.replace(config.model, path=Folder(config.model.path).uri if config.model.path else None),
    )


def check_data(folder: Folder, manifest: Manifest) -> None:
    """Compares every block file with the manifest, checksums included. Raises DataError."""
    files = [f for split in manifest.splits.values() for f in split]
    if not manifest.rows("train") or not manifest.trained_tokens("train"):
        raise DataError(f"{folder.uri}: holds {manifest.rows('train')} training blocks with {manifest.trained_tokens('train')} trained tokens; nothing to train on")
    with ThreadPoolExecutor(8) as pool:  # hashing releases the GIL
        list(pool.map(lambda f: verify_file(folder, f), files))


def special_tokens(data: Folder) -> dict[str, int | None]:
    """`bos_token_id` and `eos_token_id` of the tokenizer that made the blocks, from its files: no need to load it."""
    if data.size("tokenizer/tokenizer.json") is None or data.size("tokenizer/tokenizer_config.json") is None:
        return {}
    ids = {token["content"]: token["id"] for token in json.loads(data.read("tokenizer/tokenizer.json")).get("added_tokens", [])}
    named = json.loads(data.read("tokenizer/tokenizer_config.json"))
    found = {}
    for name in ("bos_token", "eos_token"):
        token = named.get(name)
        found[f"{name}_id"] = ids.get(token["content"] if isinstance(token, dict) else token)
    return found


def sized(config: Config, manifest: Manifest) -> Config:
    """The configuration with `train.micro_batch_size` as a number: `auto` is what the memory plan allows on the fewest workers.

    Raises UserError where the plan says that the fewest workers are too few for the GPUs that `hardware` names.
    """
    named, auto = config.hardware.gpu != "cpu", config.train.micro_batch_size == "auto"
    if not named and not auto:
        return config
    from raytune70b.planning.advice import auto_micro_batch
    from raytune70b.planning.hardware import machine

    config = dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=manifest.seq_len))
    least, memory = config.cluster.workers[0], machine(config.hardware).gpu.memory
    if named:
        check_workers("cluster.workers", f"the least is {least}", least, config, manifest.vocab_size, "jobs/plan.py shows what would change that")
    size = auto_micro_batch(config, least, memory, manifest.vocab_size) if auto else config.train.micro_batch_size
    return dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch_size=size))


def check_workers(key: str, said: str, workers: int, config: Config, vocab_size: int, way_out: str) -> None:
    """Raises UserError where the memory plan says that so many workers are too few for the GPUs that `hardware` names."""
    from raytune70b.planning.advice import minimum_workers
    from raytune70b.planning.hardware import machine

    enough = minimum_workers(config, machine(config.hardware).gpu.memory, vocab_size)
    if enough is None or enough > workers:
        takes = "no number of workers is enough" if enough is None else f"it takes {enough}"
        raise UserError(f"{key}: {said}, but by the memory plan {takes} on {config.hardware.gpu}; {way_out}")


def check_length(config: Config, order: Order, run: Folder) -> None:
    """Raises UserError where the epochs do not hold `train.steps`."""
    most, steps = config.train.epochs * order.steps_per_epoch, config.train.steps
    if steps is None or steps <= most:
        return
    begun = newest(run / "checkpoints")
    way_out = f"{run.uri} has a checkpoint of step {begun.step}, and {LONGER}" if begun else "raise train.epochs"
    raise UserError(f"train.steps: is {steps}, but train.epochs={config.train.epochs} has {most} steps ({order.blocks} blocks); {way_out}")


def total_steps(config: Config, order: Order) -> int:
    """Optimizer steps of the whole run."""
    return config.train.steps or config.train.epochs * order.steps_per_epoch


def continuity_keys() -> list[str]:
    return [k for k in known_keys() if k in CONTINUITY or k.startswith(tuple(f"{c}." for c in CONTINUITY))]


def check_resume(config: Config, run: Folder, fingerprint: dict[str, Any]) -> Cursor | None:
    """The cursor to resume from. Raises UserError where `run.resume` or the run's earlier settings forbid it."""
    cursor = newest(run / "checkpoints")
    if cursor is None:
        if config.run.resume == "must":
            raise UserError(f"run.resume: is must, but {run.uri} has no checkpoint; check run.name and run.path, or use run.resume=auto")
        return None
    if config.run.resume == "never":
        raise UserError(f"run.resume: is never, but {run.uri} has a checkpoint of step {cursor.step}; choose another run.name, or use run.resume=auto")
    changed = [f"{key}: {json.dumps(cursor.fingerprint.get(key))} -> {json.dumps(value)}" for key, value in fingerprint.items()
               if cursor.fingerprint.get(key) != json.loads(json.dumps(value))]  # fmt: skip
    if changed:
        longer = f"; {LONGER}" if any(line.startswith(("train.steps:", "train.epochs:")) for line in changed) else ""
        raise UserError(f"{run.uri} was started with other settings, so it cannot be continued: {'; '.join(changed)}. Set them back, or choose another run.name{longer}")
    return cursor


def write_resolved(prepared: Prepared) -> None:
    """Keeps the resolved configuration with the run, for people and for the other jobs."""
    prepared.run.write("config.yaml", to_yaml(prepared.config).encode())


