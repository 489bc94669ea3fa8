"""Saved by two workers, continued by three (some by one): every architecture, every method with every optimizer, through plain torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests import reference
from tests.distributed import run
from tests.model import common

pytestmark = pytest.mark.timeout(900)  # seconds where the cores are free
CASES = [
    ("llama", "full", "fp32", "adamw", ""),
    ("llama", "full", "bf16_mixed", "adamw", ""),
    ("llama", "full", "bf16_mixed", "adamw_bf16", ""),
    ("llama", "full", "bf16_mixed", "adamw_8bit", ""),
    ("llama", "full", "bf16", "adamw_bf16", ""),
    ("llama", "full", "bf16", "adamw_8bit", ""),
    ("llama", "full", "fp32", "adamw", "model.offload=params"),
    ("llama", "full", "bf16_mixed", "adamw_8bit", "model.offload=optimizer"),
    ("llama", "lora", "fp32", "adamw", ""),
    ("llama", "lora", "fp32", "adamw_bf16", ""),
    ("llama", "lora", "fp32", "adamw_8bit", ""),
    ("llama", "lora", "bf16", "adamw_bf16", "model.offload=params"),
    ("llama", "qlora", "bf16_mixed", "adamw", ""),
    ("llama", "qlora", "bf16_mixed", "adamw_bf16", ""),
    ("llama", "qlora", "bf16_mixed", "adamw_8bit", "model.offload=optimizer"),
    *((architecture, "full", "fp32", "adamw", "") for architecture in reference.SIZES if architecture != "llama"),
    ("mixtral", "lora", "bf16_mixed", "adamw", ""),
]
IN_BF16 = ("llama", "full", "bf16", "adamw_bf16", "model.gradients=bf16")
SAVED, STEPS = 3, 6

Steps = list[tuple[float, float]]
Found = dict[tuple, tuple[Steps, dict[str, torch.Tensor]]]


def config_of(folder: Path, case: tuple[str, ...]):
    architecture, method, precision, optimizer, extra = case
    rank = "model.lora.rank=64"  # wide enough for 8-bit blocks
    settings = [f"train.optimizer={optimizer}", rank, "train.learning_rate=3e-4", *([extra] if extra else [])]
    return common.config_for(folder / architecture, method, precision, *settings)


def go_on(model, optimizer, config, data: list) -> tuple[Steps, dict[str, torch.Tensor]]:
    """The steps behind the checkpoint, and the trained weights after them."""
    steps = common.train(model, optimizer, config, data[SAVED:], first=SAVED)
    return steps, {name: common.full(p) for name, p in model.named_parameters() if p.requires_grad}


def train_and_save(rank: int, world_size: int, folder: Path, out: Path, data: list) -> Found:
    from raytune70b.training.state import state_dict

    found = {}
    for number, case in enumerate([*CASES, IN_BF16]):
        config = config_of(folder, case)
        model, optimizer = common.build(config)
        common.train(model, optimizer, config, data[:SAVED])
        dcp.save(state_dict(model, optimizer), checkpoint_id=out / str(number))
        found[case] = go_on(model, optimizer, config, data)
    return found if rank == 0 else {}


def load_and_train(rank: int, world_size: int, folder: Path, out: Path, data: list) -> Found:
    from raytune70b.training.state import state_dict

    found = {}
    for number, case in enumerate([*CASES, IN_BF16]):
        if world_size == 1 and number % 5:
            continue
        config = config_of(folder, case)
        model, optimizer = common.build(config)
        before = {name: common.full(p) for name, p in model.named_parameters() if not p.requires_grad}
        dcp.load(state_dict(model, optimizer), checkpoint_id=out / str(number))
        found[case] = go_on(model, optimizer, config, data)
        assert all(torch.equal(common.full(p), before[name]) for name, p in model.named_parameters() if name in before), "the frozen base moved"
    return found if rank == 0 else {}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    torch.set_num_threads(1)
    folder, out = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("checkpoints")
    for name in reference.SIZES:
        reference.write_model(folder / name, name, common.VOCAB, spread=0.05)
    data = reference.batches(STEPS, rows=6, seq_len=16, vocab_size=common.VOCAB)
    undisturbed = run(train_and_save, 2, folder, out, data)[0]
    return undisturbed, {world_size: run(load_and_train, world_size, folder, out, data)[0] for world_size in (1, 3)}


def difference(a: Steps, b: Steps) -> float:
    return max(abs(x - y) for (x, _), (y, _) in zip(a, b, strict=True))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_checkpoint_continues_on_another_number_of_workers(results, case):
    """Losses to 1e-5; where micro-batches compute in 16 bits, every weight bit for bit."""
    undisturbed, resumed = results
    for world_size, found in resumed.items():
        if case not in found:
            continue
        (steps, weights), (theirs, their_weights) = found[case], undisturbed[case]
        assert difference(steps, theirs) < 1e-5, f"continued at world_size {world_size}"
        if case[2] != "fp32":
            changed = [name for name, weight in weights.items() if not torch.equal(weight, their_weights[name])]
            assert not changed, f"weights of another value at world_size {world_size}: {changed}"


def test_gradients_that_add_up_in_bf16_are_why_fp32_is_the_default(results):
    undisturbed, resumed = results
    worst = difference(resumed[3][IN_BF16][0], undisturbed[IN_BF16][0])
    assert 1e-5 < worst < 1e-3
