"""From the full run to its trials: what may be tried, a trial's configuration and its data. Pure numbers and dataclasses.

A trial is the full run on a share of its tokens: the same model, the same schedule over its own steps with the same share of
warm-up, the same number of epochs, on row groups of the training split that are drawn once and are the same for every trial.
The validation split is never trained on, so the two are disjoint.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace

from raytune70b.blocks.order import Order, subset
from raytune70b.blocks.stream import row_groups
from raytune70b.config import UserError, get, known_keys
from raytune70b.planning.advice import expected_throughput, workload_of
from raytune70b.planning.hardware import find_gpu
from raytune70b.schema import Budget, Config
from raytune70b.storage import Folder
from raytune70b.sweep.budget import Price, beyond, price
from raytune70b.sweep.fit import spaced
from raytune70b.sweep.points import Point
from raytune70b.sweep.stages import Space
from raytune70b.training.expected import expected_validation
from raytune70b.training.prepared import Prepared, check_workers

VALIDATIONS = 4
"""Validations of a trial after its start: at these shares of its schedule it can be compared with others."""
PATIENT_S = 120.0
"""A trial's group has one size, so it waits this long for its resources instead of trying with fewer workers."""
TOUCHED = ("data.shuffle_window", "model.", "train.", "validation.max_blocks")
"""Settings that a trial's loss depends on, beside the data and the seed."""


def sweep_folder(config: Config) -> Folder:
    return Folder(config.run.path) / config.sweep.name


def check_trial_workers(prepared: Prepared) -> None:
    """Raises UserError where `sweep.workers` are too few for a trial by the memory plan."""
    config, workers = prepared.config, prepared.config.sweep.workers
    if workers is not None and config.hardware.gpu != "cpu":
        way_out = f"leave it empty for the least of cluster.workers ({config.cluster.workers[0]})"
        check_workers("sweep.workers", f"is {workers}", workers, config, prepared.manifest.vocab_size, way_out)


def sweep_price(prepared: Prepared) -> Price | None:
    """What the trials take by the plan; None on CPUs, of which it knows no more than the order of magnitude."""
    config, expected = prepared.config, space(prepared)
    if config.hardware.gpu == "cpu":
        return None
    workers, trial = config.sweep.workers or config.cluster.workers[0], trial_config(prepared, expected.start)
    speed, steps = expected_throughput(trial, workers, prepared.manifest.vocab_size), trial_steps(prepared, expected.start)
    load = workload_of(trial, workers, find_gpu(config.hardware.gpu).memory, prepared.manifest.vocab_size)
    validation = expected_validation(trial, prepared.manifest, load, speed.likely)
    return price(config, expected.expected, steps * speed.step_seconds + validation.total(steps))


def check_price(prepared: Prepared) -> None:
    """Raises UserError where a sweep that nothing bounds would by the plan spend more than the full run may."""
    found = sweep_price(prepared)
    over = beyond(prepared.config, found) if found is not None else None
    if found is not None and over is not None:
        raise UserError(
            f"sweep.data_fraction: at {prepared.config.sweep.data_fraction:g} of the full run's {prepared.feed.total_steps:,} steps, about {space(prepared).expected} trials of "
            f"{found.trial_hours:,.1f} h each take by the plan {over}; lower it or train.steps, or bound the sweep by sweep.hours, sweep.usd or sweep.share"
        )


def full_blocks(prepared: Prepared) -> int:
    """Blocks that the full run trains on, each as often as it does."""
    order, total = prepared.feed.order, prepared.feed.total_steps
    epochs, rest = divmod(total, order.steps_per_epoch)
    return epochs * order.blocks + rest * order.global_batch_size


def full_tokens(prepared: Prepared) -> int:
    return full_blocks(prepared) * prepared.manifest.seq_len


def space(prepared: Prepared) -> Space:
    """What the configuration lets the sweep try."""
    config = prepared.config
    sweep, train = config.sweep, config.train
    low, high = sweep.range(train.learning_rate)
    share = min(1.0, train.warmup_steps / prepared.feed.total_steps)
    start = Point(train.learning_rate, train.global_batch_size, _rounded(share), config.model.lora.rank, config.run.seed)
    batches = {max(config.cluster.workers[1], round(start.global_batch_size * f)) for f in sweep.batch_factors}
    warmups = {_rounded(min(0.5, start.warmup_share * f)) for f in sweep.warmup_factors}
    ranks = {max(1, round(start.lora_rank * f)) for f in sweep.rank_factors} if config.model.method != "full" else set()
    return Space(
        start, tuple(spaced(low, high, sweep.points)), tuple(sorted(batches - {start.global_batch_size})), tuple(sorted(warmups - {start.warmup_share})),
        tuple(sorted(ranks - {start.lora_rank})), sweep.extensions, sweep.repeats, sweep.patience, sweep.batch_exponent, sweep.horizon_exponent,
        full_blocks(prepared) / trial_blocks(prepared),
    )  # fmt: skip


def _rounded(share: float) -> float:
    return float(f"{share:.3g}")


def trial_blocks(prepared: Prepared) -> int:
    """Blocks that a trial trains on, about: its last step may be short of some."""
    return max(1, round(prepared.config.sweep.data_fraction * full_blocks(prepared)))


def trial_tokens(prepared: Prepared) -> int:
    """Tokens of one trial that runs to its end: with the most trials of `Space`, what the sweep costs at most."""
    return trial_blocks(prepared) * prepared.manifest.seq_len


def trial_order(prepared: Prepared, point: Point) -> Order:
    """The order of a trial's blocks; which row groups it draws from depends on the full run's seed, not on the trial's."""
    groups = row_groups(prepared.manifest, "train")
    drawn = subset(groups, prepared.config.sweep.data_fraction, prepared.config.run.seed)
    return Order(groups, point.seed, prepared.config.data.shuffle_window, point.global_batch_size, drawn)


def trial_steps(prepared: Prepared, point: Point) -> int:
    """Optimizer steps of a trial: the same tokens for every batch size."""
    most = prepared.config.train.epochs * trial_order(prepared, point).steps_per_epoch
    return min(most, max(1, round(trial_blocks(prepared) / point.global_batch_size)))


def with_point(prepared: Prepared, point: Point, total_steps: int) -> Config:
    """The full run's configuration with a point's settings, for a run of `total_steps`."""
    config = prepared.config
    train, lora = config.train, config.model.lora
    micro = math.gcd(point.global_batch_size, prepared.feed.micro_batch_size)
    warmup = round(point.warmup_share * total_steps)
    return replace(
        config,
        train=replace(train, learning_rate=point.learning_rate, global_batch_size=point.global_batch_size, micro_batch_size=micro, warmup_steps=warmup),
        model=replace(config.model, lora=replace(lora, rank=point.lora_rank, alpha=lora.alpha * point.lora_rank / lora.rank)),
    )


def trial_config(prepared: Prepared, point: Point) -> Config:
    """A trial's configuration: no trackers of its own, no state kept at its end, no budget but the sweep's."""
    config, steps = prepared.config, trial_steps(prepared, point)
    workers = config.sweep.workers or config.cluster.workers[0]
    changed = with_point(prepared, point, steps)
    return replace(
        changed,
        run=replace(config.run, name=point.name, path=(sweep_folder(config) / "runs").uri, seed=point.seed, resume="auto", quiet=True),
        train=replace(changed.train, steps=steps),
        validation=replace(config.validation, every=max(1, round(steps / VALIDATIONS)), at_start=True),
        checkpoint=replace(config.checkpoint, at_end=False, keep_last=1, keep_best=0, keep_every=0),
        cluster=replace(config.cluster, workers=[workers, workers], start_timeout_s=max(PATIENT_S, config.cluster.start_timeout_s)),
        tracking=replace(config.tracking, mlflow=None, wandb="off", tensorboard=False, report=False),
        budget=Budget(),
    )


def trial_prepared(prepared: Prepared, point: Point) -> Prepared:
    """A trial, ready to train. The full run's data and model have been checked; nothing is read again."""
    config = trial_config(prepared, point)
    feed = replace(prepared.feed, order=trial_order(prepared, point), micro_batch_size=int(config.train.micro_batch_size), total_steps=trial_steps(prepared, point))
    fingerprint = {key: get(config, key) if key in known_keys() else value for key, value in prepared.fingerprint.items()}
    fingerprint["subset"] = list(feed.order.only or ())
    return replace(prepared, config=config, run=Folder(config.run.path) / config.run.name, feed=feed, fingerprint=fingerprint, resumed=None)


def settings(prepared: Prepared) -> dict[str, object]:
    """What the losses and the choice of trials depend on: results of a sweep with other settings cannot be used again."""
    config = prepared.config
    values = {key: get(config, key) for key in known_keys() if key.startswith(TOUCHED)}
    kept = ("data_fraction", "low", "high", "points", "extensions", "repeats", "patience")
    values |= {f"sweep.{name}": value for name, value in asdict(config.sweep).items() if name in kept}
    return {**values, "run.seed": config.run.seed, "data": prepared.manifest.digest}

