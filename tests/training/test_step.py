"""The arithmetic of one step on several gloo processes: norms, skips, and independence of the number of workers."""

import numpy as np
import pytest
import torch

from raytune70b.blocks.order import rounds, share
from raytune70b.config import compose
from raytune70b.training.step import seed_micro_batch
from tests import distributed, reference

ROWS, SEQ, VOCAB, STEPS = 8, 16, 64, 4


def settings():
    values = ", ".join(f"{k}: {v}" for k, v in reference.config_values("llama").items())
    return compose([f"model.config={{{values}}}", "model.precision=fp32", "train.warmup_steps=0", "train.max_grad_norm=1.0"])


def poison(module, inputs, output):
    """Makes the gradient that comes back through a module's output NaN."""
    output.register_hook(lambda gradient: gradient * float("nan"))


def steps_of_a_rank(rank, world, poisoned):
    from raytune70b.model.load import build_model
    from raytune70b.model.shard import make_mesh
    from raytune70b.training.engine import Fsdp
    from raytune70b.training.guards import Guard
    from raytune70b.training.optimizer import build_optimizer
    from raytune70b.training.step import train_step

    torch.set_num_threads(1)
    config, device = settings(), torch.device("cpu")
    model = build_model(config, VOCAB, make_mesh(world, 1, "cpu"), device)
    engine, guard, results = Fsdp(model, build_optimizer(model, config)), Guard(0.0, 5), []
    for step, batch in enumerate(reference.batches(STEPS, ROWS, SEQ, VOCAB)):
        arrays = {name: values.numpy().astype(np.int32) for name, values in batch.items()}
        turns = rounds(ROWS, 2, world)
        own = share(np.arange(ROWS), rank, world, 2, turns)
        mine = {name: np.where(own[:, None] >= 0, values[own], -100 if name == "labels" else 0) for name, values in arrays.items()}
        micro = [{name: values[n : n + 2] for name, values in mine.items()} for n in range(0, len(own), 2)]
        if step == poisoned and rank == world - 1:
            hook = model.get_decoder().norm.register_forward_hook(poison)
        before = [p.detach().to_local().clone() for p in model.parameters()]
        trained = int((arrays["labels"] >= 0).sum())
        result = train_step(engine, micro, trained_tokens=trained, learning_rate=1e-2, max_grad_norm=1.0, loss_chunk_tokens=8,
                            seed=1, step=step, guard=guard, device=device)  # fmt: skip
        same = all(torch.equal(a, p.detach().to_local()) for a, p in zip(before, model.parameters(), strict=True))
        results.append((result.loss, result.grad_norm, result.skipped, same))
        if step == poisoned and rank == world - 1:
            hook.remove()
    return results


@pytest.fixture(scope="module")
def alone():
    return distributed.run(steps_of_a_rank, 1, None)[0]


@pytest.mark.parametrize("world", [2, 3])
def test_losses_and_norms_do_not_depend_on_the_number_of_workers(alone, world):
    for of_rank in distributed.run(steps_of_a_rank, world, None):
        for (loss, norm, skipped, same), (theirs, their_norm, _, _) in zip(of_rank, alone, strict=True):
            assert loss == pytest.approx(theirs, abs=1e-5) and norm == pytest.approx(their_norm, rel=1e-5)
            assert skipped is None and not same


def test_a_gradient_that_is_not_a_number_on_one_rank_is_skipped_on_all():
    """pytorch/pytorch#46849: the step is skipped and every weight stays as it was, on every rank; the next step goes on."""
    for of_rank in distributed.run(steps_of_a_rank, 2, 1):
        assert [skipped is not None for _, _, skipped, _ in of_rank] == [False, True, False, False]
        assert [same for *_, same in of_rank] == [False, True, False, False]


def norm_of_ones(rank, world):
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from raytune70b.model.shard import make_mesh
    from raytune70b.training.engine import Fsdp

    model = nn.Linear(2, 2, bias=False)
    fully_shard(model, mesh=make_mesh(world, 1, "cpu"))
    engine, before = Fsdp(model, torch.optim.SGD(model.parameters())), model.weight.full_tensor().detach().clone()
    model.weight.grad = torch.ones_like(model.weight)
    norm = engine.grad_norm()
    engine.update(norm, max_norm=1.0, learning_rate=1.0)
    return norm.item(), (model.weight.full_tensor() - before).norm().item()


def test_the_norm_is_that_of_all_shards():
    """pytorch/pytorch#170862: four gradients of one on two ranks have the norm 2.0, and clipping makes it 1.0."""
    assert distributed.run(norm_of_ones, 2) == [pytest.approx((2.0, 1.0))] * 2


@pytest.mark.parametrize("seed", [17, 2**32 - 1, 2**62])
def test_dropout_is_seeded_by_any_seed(seed):
    draws = []
    for step, micro_batch in ((1, 0), (1, 1), (2, 0), (1, 0)):
        seed_micro_batch(seed, step, micro_batch)
        draws.append(torch.rand(8).tolist())
    assert draws[0] == draws[3] and len({tuple(d) for d in draws}) == 3
