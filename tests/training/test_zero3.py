"""DeepSpeed ZeRO-3 beside FSDP2: the same losses, gradients, weights and checkpoints, for every method, at any number of workers."""

from __future__ import annotations

import gc
import os
from importlib.util import find_spec
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from raytune70b.config import UserError, compose
from raytune70b.export.tensors import Checkpoint, load_alone
from raytune70b.model.zero3 import boxes, import_deepspeed
from raytune70b.storage import Folder
from raytune70b.training.checkpoint import Cursor, folder_name
from raytune70b.training.state import local_tensor
from tests import reference
from tests.distributed import run
from tests.model import common

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the extra deepspeed is not installed")
STEPS, HALF, ROWS = 20, 10, 12
METHODS = {
    "bf16": ("full", "bf16_mixed", "model.activation_checkpointing=full"),
    "lora": ("lora", "fp32", "model.lora.modules_to_save=[lm_head]", "model.activation_checkpointing=selective"),
    "lora bf16": ("lora", "bf16_mixed", "model.lora.dropout=0.1"),
    "qlora": ("qlora", "bf16_mixed", "model.activation_checkpointing=full"),
    "offloaded optimizer": ("full", "fp32", "model.offload=optimizer"),
    "offloaded": ("qlora", "bf16_mixed", "model.offload=params"),
}


def data(steps: int = STEPS) -> list:
    return reference.batches(steps, ROWS, 24, common.VOCAB)


def build(folder: Path, sharding: str, *settings: str, resumes: bool = False):
    from raytune70b.training.engine import build_engine

    if sharding == "zero3":
        import_deepspeed(common.CPU)
        gc.freeze()  # it collects garbage at every build: what is imported is none
    config = common.config_for(folder, *(settings or ("full", "fp32")), f"model.sharding={sharding}")
    return build_engine(config, common.VOCAB, common.CPU, resumes), config


def train(engine, batches: list, first: int = 0, guard=None) -> list:
    """(loss, gradient norm) of each step; None for both where it was skipped."""
    from raytune70b.training.guards import Guard
    from raytune70b.training.step import train_step

    found, guard = [], guard or Guard(0.0, 5)
    for step, batch in enumerate(batches, start=first):
        result = train_step(
            engine, common.micro_batches(batch), trained_tokens=int((batch["labels"] != -100).sum()), learning_rate=3e-3, max_grad_norm=1.0,
            loss_chunk_tokens=10, seed=0, step=step, guard=guard, device=common.CPU,
        )  # fmt: skip
        found.append((result.loss, result.grad_norm) if result.skipped is None else None)
    return found


def save(engine, run_folder: Path, step: int) -> None:
    from raytune70b.schema import Checkpoint as Settings
    from raytune70b.training.saver import Saver

    saver = Saver(Folder(run_folder), Settings(keep_last=9), dist.new_group(backend="gloo"), print)
    saver.start(engine.state(), Cursor(step=step), [])
    saver.wait()
    error = saver.take().error
    assert error is None, error


def load(engine, run_folder: Path) -> int:
    from raytune70b.schema import Checkpoint as Settings
    from raytune70b.training.saver import Saver

    saver = Saver(Folder(run_folder), Settings(), dist.new_group(backend="gloo"), print)
    cursor = saver.choose()
    saver.load(engine.state(), cursor)
    engine.loaded()
    return cursor.step


def poison(module, inputs, output) -> None:
    output.register_hook(lambda gradient: gradient * float("nan"))


def two_workers(rank: int, world: int, model: Path, runs: Path) -> dict:
    """Twenty steps by both engines, saved half way; every method; a step that is bad on one worker."""
    found = {}
    for sharding in ("fsdp", "zero3"):
        engine, _ = build(model, sharding)
        losses = train(engine, data()[:HALF])
        save(engine, runs / sharding, HALF)
        found[sharding] = losses + train(engine, data()[HALF:], HALF)
        for name, settings in METHODS.items():
            engine, _ = build(model, sharding, *settings)
            found[sharding, name] = train(engine, data(3))
        engine, _ = build(model, sharding)
        hook = engine.model.get_decoder().norm.register_forward_hook(poison) if rank == 1 else None
        bad = train(engine, data(1))
        if hook is not None:
            hook.remove()
        found[sharding, "after a bad step"] = bad + train(engine, data(2), 1)
    return found


def resume(rank: int, world: int, model: Path, runs: Path) -> dict:
    """The second ten steps, by each engine from each engine's checkpoint; ZeRO-3's end is saved."""
    found = {}
    for sharding, source in (("fsdp", "zero3"), ("zero3", "zero3"), ("zero3", "fsdp")):
        engine, _ = build(model, sharding, resumes=True)
        weights = engine.zero.fp32_partitioned_groups_flat if sharding == "zero3" else map(local_tensor, engine.state()["model"].values())
        for tensor in weights:  # those that the checkpoint did not bring would show
            tensor.data.fill_(float("nan"))
        assert load(engine, runs / source) == HALF
        found[source, sharding] = train(engine, data()[HALF:], HALF)
    save(engine, runs / f"by {world}", STEPS)
    return found


def one_worker(rank: int, world: int, model: Path, runs: Path) -> dict:
    """All of it by one worker that has no compiler."""
    os.environ.update(PATH="/nowhere", CXX="/nowhere/c++", TORCH_EXTENSIONS_DIR=str(runs / "extensions"))
    found = {sharding: train(build(model, sharding)[0], data()) for sharding in ("fsdp", "zero3")}
    return {**found, **resume(rank, world, model, runs), "compiled": (runs / "extensions").exists()}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return reference.write_model(tmp_path_factory.mktemp("model"), "llama", common.VOCAB)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def two(model, runs) -> dict:
    return run(two_workers, 2, model, runs)[0]


@pytest.fixture(scope="module")
def one(two, model, runs) -> dict:
    return run(one_worker, 1, model, runs)[0]


@pytest.fixture(scope="module")
def three(two, model, runs) -> dict:
    return run(resume, 3, model, runs)[0]


def check_equal(found: list, expected: list, losses: float, norms: float) -> None:
    """Gradient norms too: AdamW would hide a wrong scale from the losses."""
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert (ours is None) == (theirs is None), step
        if ours is not None:
            assert ours[0] == pytest.approx(theirs[0], abs=losses), step
            assert ours[1] == pytest.approx(theirs[1], rel=norms), step


@needs_deepspeed
def test_twenty_steps_are_those_of_fsdp(one, two):
    for found in (one, two):
        check_equal(found["zero3"], found["fsdp"], 1e-5, 1e-5)
    check_equal(one["zero3"], two["zero3"], 1e-5, 1e-5)


@needs_deepspeed
@pytest.mark.parametrize(("source", "sharding"), [("zero3", "zero3"), ("fsdp", "zero3"), ("zero3", "fsdp")])
def test_a_checkpoint_is_continued_by_any_number_of_workers_and_by_either_engine(one, two, three, source, sharding):
    for found in (one, three):
        check_equal(found[source, sharding], two["fsdp"][HALF:], 1e-5, 1e-4)


@needs_deepspeed
@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_as_under_fsdp(two, name):
    exact = "fp32" in METHODS[name]
    check_equal(two["zero3", name], two["fsdp", name], 1e-5 if exact else 2e-3, 1e-5 if exact else 1e-2)


@needs_deepspeed
def test_a_step_that_is_bad_on_one_worker_is_skipped_by_all(two):
    found = two["zero3", "after a bad step"]
    assert found[0] is None and None not in found[1:]
    check_equal(found, two["fsdp", "after a bad step"], 1e-5, 1e-5)
    assert found[1][0] == pytest.approx(two["zero3"][0][0], abs=1e-6), "the bad step left the weights alone"


@needs_deepspeed
def test_nothing_is_compiled(one):
    assert not one["compiled"]


@needs_deepspeed
def test_an_export_reads_the_checkpoint_of_three_workers(one, three, runs):
    """Three workers cut within rows."""
    end = {n: Checkpoint(Folder(runs / f"by {n}" / "checkpoints" / folder_name(STEPS))) for n in (1, 3)}
    assert end[3].names() and set(end[3].names()) == set(end[1].names())
    whole = {"model": {name: torch.empty(end[3].source(name).shape) for name in end[3].names()}}
    load_alone(Folder(runs / "by 3" / "checkpoints" / folder_name(STEPS)), whole)
    for name in end[3].names():
        pieces = torch.cat([piece.flatten() for piece in end[3].source(name).pieces()]).view(end[3].source(name).shape)
        assert torch.equal(pieces, whole["model"][name])
        torch.testing.assert_close(pieces, end[1].source(name).whole(), rtol=0, atol=1e-4)


@given(st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple), st.integers(1, 7))
def test_the_boxes_of_all_workers_are_the_tensor(shape, workers):
    whole, size = torch.arange(prod(shape)).view(shape), -(-prod(shape) // workers)
    seen = torch.zeros(shape, dtype=torch.int64)
    for rank in range(workers):
        first, last = min(rank * size, prod(shape)), min((rank + 1) * size, prod(shape))
        found, flat = boxes(shape, first, last), []
        assert len(found) <= max(1, 2 * len(shape) - 1)
        for offsets, sizes in found:
            part = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            seen[part] += 1
            flat += whole[part].flatten().tolist()
        assert flat == list(range(first, last)), "in the order of the flat tensor"
    assert (seen == 1).all()


@pytest.mark.parametrize("setting", ["model.precision=bf16", "train.optimizer=adamw_8bit", "model.replicate=2", "model.compile=true"])
def test_what_deepspeed_does_not_do_is_refused(setting):
    key, value = setting.split("=")
    with pytest.raises(UserError, match=rf"{key}: is {value}, but model.sharding is zero3.*model.sharding=fsdp"):
        compose(["model.sharding=zero3", setting])
    compose(["model.sharding=fsdp", setting])
