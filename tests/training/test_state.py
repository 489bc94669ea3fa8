"""Saved by two workers, continued by three workers (some by one): every method with every optimizer, through plain torch.distributed.checkpoint."""

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
    ("full", "fp32", "adamw", "none"),
    ("full", "bf16_mixed", "adamw", "none"),
    ("full", "bf16_mixed", "adamw_bf16", "none"),
    ("full", "bf16_mixed", "adamw_8bit", "none"),
    ("full", "bf16", "adamw_bf16", "none"),
    ("full", "bf16", "adamw_8bit", "none"),
    ("full", "fp32", "adamw", "params"),
    ("full", "bf16_mixed", "adamw_8bit", "optimizer"),
    ("lora", "fp32", "adamw", "none"),
    ("lora", "fp32", "adamw_8bit", "none"),
    ("lora", "bf16", "adamw_bf16", "params"),
    ("qlora", "bf16_mixed", "adamw", "none"),
    ("qlora", "bf16_mixed", "adamw_bf16", "none"),
    ("qlora", "bf16_mixed", "adamw_8bit", "optimizer"),
]
SAVED, STEPS = 4, 8


def config_of(folder: Path, case: tuple[str, str, str, str]):
    method, precision, optimizer, offload = case
    rank = "model.lora.rank=64"  # wide enough for 8-bit blocks
    return common.config_for(folder, method, precision, f"train.optimizer={optimizer}", f"model.offload={offload}", rank, "train.learning_rate=3e-4")


def train_and_save(rank: int, world_size: int, folder: Path, out: Path, data: list) -> dict:
    from raytune70b.training.state import state_dict

    found = {}
    for number, case in enumerate(CASES):
        config = config_of(folder, case)
        model, optimizer = common.build(config)
        common.train(model, optimizer, config, data[:SAVED])
        dcp.save(state_dict(model, optimizer), checkpoint_id=out / str(number))
        found[case] = common.train(model, optimizer, config, data[SAVED:], first=SAVED)
    return found


def load_and_train(rank: int, world_size: int, folder: Path, out: Path, data: list) -> dict:
    from raytune70b.training.state import state_dict

    found = {}
    for number, case in enumerate(CASES):
        if world_size == 1 and number % 4:
            continue
        config = config_of(folder, case)
        model, optimizer = common.build(config)
        before = {name: common.full(p) for name, p in model.named_parameters() if not p.requires_grad}
        dcp.load(state_dict(model, optimizer), checkpoint_id=out / str(number))
        found[case] = common.train(model, optimizer, config, data[SAVED:], first=SAVED)
        assert all(torch.equal(common.full(p), before[name]) for name, p in model.named_parameters() if name in before), "the frozen base moved"
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    torch.set_num_threads(1)
    folder = reference.write_model(tmp_path_factory.mktemp("model"), "llama", common.VOCAB, spread=0.05)
    out = tmp_path_factory.mktemp("checkpoints")
    data = reference.batches(STEPS, rows=6, seq_len=16, vocab_size=common.VOCAB)
    undisturbed = run(train_and_save, 2, folder, out, data)[0]
    return undisturbed, {world_size: run(load_and_train, world_size, folder, out, data)[0] for world_size in (1, 3)}


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_checkpoint_continues_on_another_number_of_workers(results, case):
    undisturbed, resumed = results
    for world_size, found in resumed.items():
        if case not in found:
            continue
        worst = max(abs(a[0] - b[0]) for a, b in zip(undisturbed[case], found[case], strict=True))
        assert worst < tolerance(case), f"continued at world_size {world_size}"


def tolerance(case: tuple[str, str, str, str]) -> float:
    """Exact to 1e-5, but where 16 bits hold what is summed over workers: a sum in another order then rounds another way.

    bf16 moments move a bf16 copy of a weight by a whole step (5e-5 here); bf16 weights have gradients that are summed in
    bf16, eight bits of them (1e-3 here).
    """
    _, precision, optimizer, _ = case
    if precision == "bf16":
        return 1e-3
    return 5e-5 if (precision, optimizer) == ("bf16_mixed", "adamw_bf16") else 1e-5
