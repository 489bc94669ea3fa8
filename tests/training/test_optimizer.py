from __future__ import annotations

import pytest
import torch
from torch import nn

from raytune70b.config import UserError, compose
from raytune70b.model.load import skeleton
from raytune70b.training.optimizer import CompactAdamW, Noise, build_optimizer, dequantise, parameter_groups, quantise
from raytune70b.training.state import create_states, load_state_dict, optimizer_state, state_dict
from tests import reference
from tests.model.architectures import config_of


def train(make, dtype: torch.dtype, steps: int = 60) -> tuple[torch.Tensor, float]:
    """A matrix and a vector fitted to targets: the weights and the last loss."""
    generator = torch.Generator().manual_seed(0)
    start, bias, target = (torch.randn(s, generator=generator) for s in ((8, 256), (256,), (8, 256)))
    weights = [nn.Parameter(start.to(dtype)), nn.Parameter(bias.to(dtype))]
    optimizer = make(weights)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * (1 + step % 3)
        loss = ((weights[0].float() + weights[1].float() - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights[0].detach().float(), loss.item()


def plain(weights):
    return torch.optim.AdamW([{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:], "weight_decay": 0.0}], lr=0.02, betas=(0.9, 0.999), eps=1e-8)


def compact(states: str):
    return lambda weights: CompactAdamW(
        [{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:]}], 0.02, (0.9, 0.999), 1e-8, states, in_host_memory=states == "fp32"
    )


def test_with_fp32_states_it_is_torchs_adamw():
    theirs, ours = train(plain, torch.float32), train(compact("fp32"), torch.float32)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("states", ["bf16", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_states_reach_the_loss_of_fp32_states(states, dtype):
    theirs, ours = train(plain, torch.float32)[1], train(compact(states), dtype)[1]
    assert ours == pytest.approx(theirs, rel=0.05)


@pytest.mark.parametrize("form", ["fp32", "bf16", "8bit"])
def test_two_hundred_small_updates_of_a_bf16_weight_add_up(form):
    """1.0 + 200 * 1e-3 is 1.2; plain bf16 stays at 1.0, because an update of 1e-3 is below half its spacing."""
    weight = nn.Parameter(torch.ones(16, 256, dtype=torch.bfloat16))
    optimizer = CompactAdamW([weight], 1e-3, (0.9, 0.95), 1e-8, form)
    for _ in range(200):
        weight.grad = -torch.ones_like(weight)
        optimizer.step()
    assert weight.float().mean().item() == pytest.approx(1.2, abs=0.005)
    for _ in range(200):  # and back: negative and positive moments are stored alike
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.float().mean().item() == pytest.approx(1.018, abs=0.01)  # Adam's momentum overshoots the turn by 18 steps


def test_stochastic_rounding_keeps_the_mean_and_does_not_depend_on_the_cut():
    value = torch.full((256, 1024), 1.002)
    whole = torch.empty_like(value, dtype=torch.bfloat16)
    Noise(0, step=7, number=3).round_into(whole, value, salt=1)
    assert set(whole.float().unique().tolist()) == {1.0, 1.0078125}
    assert whole.float().mean().item() == pytest.approx(1.002, abs=5e-5)
    rows = whole.float().mean(1)
    assert rows.std().item() == pytest.approx(0.0078125 * (0.256 * 0.744 / 1024) ** 0.5, rel=0.2), "rows are not independent"
    part = torch.empty(100, 1024, dtype=torch.bfloat16)
    Noise(156 * 1024, step=7, number=3).round_into(part, value[156:], salt=1)
    assert torch.equal(part, whole[156:])
    other = torch.empty_like(whole)
    Noise(0, step=8, number=3).round_into(other, value, salt=1)
    assert 0.3 < (other != whole).float().mean().item() < 0.45  # 2 * 0.256 * 0.744


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_eight_bit_states_keep_relative_precision_over_decades(name):
    value = 10 ** (-4 * torch.rand(16, 512))
    codes, scales = quantise(value.clone(), 2, name)
    assert codes.dtype == torch.uint8 and scales.shape == (16, 2)
    assert ((dequantise(codes, scales, name) - value).abs() <= 0.03 * scales.repeat_interleave(256, 1)).all()
    error = (dequantise(codes, scales, name) - value).abs() / value
    assert error.median() < 0.03


def test_vectors_have_no_weight_decay_and_frozen_weights_no_states():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[2].requires_grad_(False)
    decayed, free = parameter_groups(model, 0.1)
    assert [p.shape for p in decayed["params"]] == [(4, 4)] and decayed["weight_decay"] == 0.1
    assert [tuple(p.shape) for p in free["params"]] == [(4,)] * 3 and free["weight_decay"] == 0.0
    model.requires_grad_(False)
    with pytest.raises(UserError, match="nothing is trained"):
        build_optimizer(model, compose([]))


@pytest.mark.parametrize(
    ("name", "free"),
    [("cohere", {"input_layernorm.weight", "q_norm.weight", "k_norm.weight", "norm.weight"}),
     ("gpt_oss", {"input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight", "sinks", "q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias",
                  "router.bias", "experts.gate_up_proj_bias", "experts.down_proj_bias"})],
)  # fmt: skip
def test_norms_and_biases_that_are_stacked_to_matrices_have_no_weight_decay(name, free):
    model = skeleton(config_of(name).model, 50, torch.device("cpu"))
    decayed, without = parameter_groups(model, 0.1)
    names = {p: ".".join(key.split(".")[-2:]) for key, p in model.named_parameters()}
    found = {names[p] for p in without["params"]}
    assert {name.removeprefix("self_attn.") for name in found} == free
    assert not any("norm" in names[p] or "bias" in names[p] for p in decayed["params"])


def test_usual_architectures_have_the_groups_of_runs_before():
    """The groups' order numbers the random bits that round 16-bit states: a resumed run needs the same."""
    for name in reference.SIZES:
        values = reference.config_values(name)
        config = compose([])
        config.model.config = values
        model = skeleton(config.model, 50, torch.device("cpu"))
        parameters = list(model.parameters())
        for group, members in zip(parameter_groups(model, 0.1), ([p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]), strict=True):
            assert [id(p) for p in group["params"]] == [id(p) for p in members]


@pytest.mark.parametrize(
    ("overrides", "dtype", "kind"),
    [
        ([], torch.float32, torch.optim.AdamW),
        (["model.offload=optimizer"], torch.float32, CompactAdamW),
        (["model.precision=bf16"], torch.bfloat16, CompactAdamW),
        (["train.optimizer=adamw_8bit"], torch.float32, CompactAdamW),
    ],
)
def test_states_take_the_bytes_of_their_format(overrides, dtype, kind):
    config = compose(overrides)
    model = nn.Linear(1024, 64, bias=False).to(dtype)
    optimizer = build_optimizer(model, config)
    assert type(optimizer) is kind
    size = sum(t.nbytes for name, t in optimizer_state(model, optimizer).items() if not name.endswith("step")) / model.weight.numel()
    assert size == (2 + 2 * 4 / 256 if config.train.optimizer == "adamw_8bit" else 8)


def test_creating_states_early_changes_no_weight_and_no_later_step():
    def two_steps(early: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = build_optimizer(model, compose([]))
        if early:
            before = model.weight.detach().clone()
            create_states(optimizer)
            assert torch.equal(model.weight, before) and model.weight.grad is None and optimizer.param_groups[0]["lr"] > 0
        for _ in range(2):
            model(torch.ones(1, 8)).square().sum().backward()
            optimizer.step()
        return [model.weight.detach(), *optimizer_state(model, optimizer).values()]

    assert all(torch.equal(a, b) for a, b in zip(two_steps(True), two_steps(False), strict=True))


def test_a_state_of_other_names_is_refused():
    model = nn.Linear(4, 4)
    optimizer = build_optimizer(model, compose([]))
    state = state_dict(model, optimizer)
    load_state_dict(model, optimizer, {part: {name: t + 1 for name, t in tensors.items()} for part, tensors in state.items()})
    assert float(state["optimizer"]["weight.exp_avg"].mean()) == 1.0
    del state["model"]["bias"]
    with pytest.raises(KeyError, match="bias"):
        load_state_dict(model, optimizer, state)
