from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raytune70b.schema import Train
from raytune70b.training.schedule import decay, learning_rate


def test_a_resumed_cosine_goes_on_where_it_was():
    """pytorch/pytorch#60265: T=10, stop at 5; and torch's own scheduler undisturbed gives the same."""
    train = Train(learning_rate=1.0, warmup_steps=0, min_lr_ratio=0.0)
    ours = [learning_rate(train, step, 10) for step in range(10)]
    assert ours[6:9] == pytest.approx([0.3455, 0.2061, 0.0955], abs=1e-4)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    for rate in ours:
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()


def test_the_number_of_workers_does_not_shift_it():
    """huggingface/accelerate#2926: at step 25 of 100 a cosine stands at 0.8536, whatever the world size."""
    assert learning_rate(Train(learning_rate=1.0, warmup_steps=0, min_lr_ratio=0.0), 25, 100) == pytest.approx(0.8536, abs=1e-4)


@given(st.integers(0, 50), st.integers(1, 200), st.floats(0, 1), st.sampled_from(["cosine", "linear", "constant"]))
def test_it_rises_then_falls_between_floor_and_peak(warmup, total, floor, shape):
    train = Train(learning_rate=2.0, warmup_steps=warmup, min_lr_ratio=floor, schedule=shape)
    rates = [learning_rate(train, step, total) for step in range(total)]
    up = min(warmup, total)
    assert all(0 < a < b for a, b in pairwise(rates[:up]))
    assert all(a >= b - 1e-12 for a, b in pairwise(rates[up:]))
    assert all(2.0 * floor - 1e-12 <= rate <= 2.0 for rate in rates[up:])
    assert decay(shape, floor, 0.0) == 1.0
