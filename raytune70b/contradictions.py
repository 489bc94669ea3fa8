"""Settings that are right one by one and contradict each other. Pure; the limits of single fields stand beside them in `schema.py`."""

from __future__ import annotations

from collections.abc import Iterator

from raytune70b.schema import Config, Sweep

Problem = tuple[str, str]
"""A dotted key and what is wrong with its value."""
LONGEST_NAME = 200
"""Bytes of a folder's name; file systems take 255, and temporary names beside it are longer."""


def problems(config: Config) -> Iterator[Problem]:
    """Contradictions between fields; the limits of single fields are checked by `config.check`."""
    micro, batch = config.train.micro_batch_size, config.train.global_batch_size
    if isinstance(micro, str):
        if micro != "auto":
            yield "train.micro_batch_size", f"is {micro!r}; it takes a whole number or auto"
    elif micro < 1 or batch % micro:
        yield "train.micro_batch_size", f"is {micro}, which does not divide train.global_batch_size ({batch})"
    every = config.checkpoint.every
    if every != "auto" and (isinstance(every, str) or every < 1):
        yield "checkpoint.every", f"is {every!r}; it takes a number of steps from 1, or auto"
    which = config.export.checkpoint
    if which not in ("newest", "best") and (isinstance(which, str) or which < 1):
        yield "export.checkpoint", f"is {which!r}; it takes newest, best, or a step from 1"
    for section in ("run", "sweep"):
        name = getattr(config, section).name
        if not name or "/" in name or name in (".", ".."):
            yield f"{section}.name", f"is {name!r}; it is the name of one folder under run.path ({config.run.path})"
        if len(name.encode()) > LONGEST_NAME:
            yield f"{section}.name", f"has {len(name.encode())} bytes; the most is {LONGEST_NAME}, since file systems take no longer names"
    workers = config.cluster.workers
    if len(workers) != 2 or not 1 <= workers[0] <= workers[1]:
        yield "cluster.workers", f"is {workers}; it takes [least, most] with 1 <= least <= most"
    elif workers[1] % config.model.replicate or workers[0] % config.model.replicate:
        yield "model.replicate", f"is {config.model.replicate}, which does not divide cluster.workers {workers}"
    if config.sweep.workers is not None and config.sweep.workers % config.model.replicate:
        yield "sweep.workers", f"is {config.sweep.workers}, which is no multiple of model.replicate ({config.model.replicate})"
    if config.tracking.mlflow == "sqlite" and (odd := set("?#%") & set(config.run.path)):
        yield "run.path", f"is {config.run.path}, but MLflow's database lies there, and its address cannot hold {min(odd)}; name the folder otherwise, or set tracking.mlflow"
    if config.tracking.mlflow == "sqlite" and "://" in config.run.path:
        yield "tracking.mlflow", f"is sqlite, a database in run.path, but run.path is {config.run.path}; give the URI of an MLflow server, or null for none"
    if config.tracking.tensorboard and "://" in config.run.path:
        yield "tracking.tensorboard", f"is true, but run.path is {config.run.path}; event files need a local or shared folder"
    for section in ("budget", "sweep"):
        usd = getattr(config, section).usd
        if usd is not None and not config.budget.price_per_gpu_hour:
            yield f"{section}.usd", f"is {usd}, but budget.price_per_gpu_hour is {config.budget.price_per_gpu_hour}; set the price"
    if config.budget.fit_schedule and config.budget.hours is None and config.budget.usd is None:
        yield "budget.fit_schedule", "is true, but neither budget.hours nor budget.usd is set"
    if config.model.method == "full" and config.model.precision == "fp32" and config.train.optimizer != "adamw":
        yield "train.optimizer", f"is {config.train.optimizer}, but model.precision is fp32; use adamw, or bf16_mixed or bf16"
    if config.model.sharding == "zero3":
        yield from _zero3(config)
    yield from _sweep(config.sweep, config.train.learning_rate)


def _zero3(config: Config) -> Iterator[Problem]:
    """What DeepSpeed ZeRO-3 does not do, or not exactly."""
    way_out = "or model.sharding=fsdp"
    if config.model.precision == "bf16":
        yield "model.precision", f"is bf16, but model.sharding is zero3, which trains fp32 master weights; use bf16_mixed, {way_out}"
    if config.train.optimizer != "adamw":
        yield "train.optimizer", f"is {config.train.optimizer}, but model.sharding is zero3, which keeps states in fp32; use adamw, {way_out}"
    if config.model.replicate != 1:
        yield "model.replicate", f"is {config.model.replicate}, but model.sharding is zero3, which keeps one copy of the model; use 1, {way_out}"
    if config.model.compile:
        yield "model.compile", f"is true, but model.sharding is zero3, whose hooks cannot be compiled; use false, {way_out}"


def _sweep(sweep: Sweep, learning_rate: float) -> Iterator[Problem]:
    low, high = sweep.range(learning_rate)
    if low >= high:
        set_by = "" if sweep.low is not None and sweep.high is not None else f", with train.learning_rate={learning_rate:g} as its middle"
        yield ("sweep.low" if sweep.low is not None else "sweep.high"), f"the range of rates goes from {low:g} to {high:g}{set_by}; set both ends, the lower one as sweep.low"
    if sweep.share is not None and sweep.share < sweep.data_fraction:
        yield "sweep.share", f"is {sweep.share:g}, but one trial takes {sweep.data_fraction:g} of the full run's tokens (sweep.data_fraction); raise it, or lower that"
    for name in ("batch_factors", "warmup_factors", "rank_factors"):
        wrong = [factor for factor in getattr(sweep, name) if factor < 0 or (factor == 0 and name != "warmup_factors")]
        if wrong:
            yield f"sweep.{name}", f"holds {wrong[0]}; factors are positive"
