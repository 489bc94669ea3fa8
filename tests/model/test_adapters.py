from __future__ import annotations

import pytest
import torch

from raytune70b.config import UserError, compose
from raytune70b.model.adapters import add_adapters, frozen_experts, lora_config
from raytune70b.model.load import skeleton
from raytune70b.training.prepared import warn_of_frozen_experts
from tests import reference
from tests.model.architectures import config_of


def meta_model(*overrides: str, architecture: str = "llama"):
    config = compose(["model.method=lora", *overrides])
    config.model.config = reference.config_values(architecture)
    return skeleton(config.model, 96, torch.device("cpu")), config.model


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        ("llama", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("phi3", {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
        ("mixtral", {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_every_linear_layer_but_the_head_is_a_target_by_default(architecture, targets):
    model, config = meta_model(architecture=architecture)
    assert set(lora_config(model, config.lora).target_modules) == targets


def test_only_adapters_and_named_modules_are_trained_in_fp32_on_a_bf16_base():
    model, config = meta_model("model.lora.targets=[q_proj]", "model.lora.modules_to_save=[lm_head]", "model.lora.rank=4")
    add_adapters(model, config)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[-2] if "lora" not in name else name.split(".")[-3] for name in trained} == {"lora_A", "lora_B", "default"}
    assert len(trained) == 2 * 2 + 1 and {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert all(p.is_meta for p in model.parameters())


def test_names_that_peft_takes_for_stacked_experts_get_no_adapters():
    """The first layer of these mixtures is dense, and peft would move its adapters to the experts of the others, which no export can merge."""
    for name in ("ernie4_5_moe", "glm4_moe"):
        config = config_of(name, "model.method=lora").model
        model = skeleton(config, 50, torch.device("cpu"))
        assert frozen_experts(model) == sum(p.numel() for p in model.parameters() if p.ndim == 3) / sum(p.numel() for p in model.parameters()) > 0
        with pytest.raises(UserError, match=f"peft takes up_proj of {name} for its stacked experts, whose adapters cannot be exported; leave it out"):
            lora_config(model, compose(["model.lora.targets=[q_proj,up_proj]"]).model.lora)
        add_adapters(model, config)
        assert {key.split(".lora_A")[0].rpartition(".")[2] for key, p in model.named_parameters() if "lora_A" in key} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_a_run_with_adapters_says_that_the_experts_stay_frozen(capsys):
    for name, said in (("mixtral", "model.method is lora, so the stacked experts, "), ("gemma2", "")):
        for method in ("lora", "full"):
            config = config_of(name, f"model.method={method}")
            warn_of_frozen_experts(config, skeleton(config.model, 50, torch.device("cpu")))
            out = capsys.readouterr().out
            assert bool(out) == (name == "mixtral" and method == "lora") and (not out or said in out)


@pytest.mark.parametrize(
    ("overrides", "architecture", "message"),
    [
        (["model.lora.targets=[q_prj]"], "llama", "q_prj is not a linear layer of the decoder; did you mean q_proj?"),
        (["model.lora.targets=[lm_head]"], "llama", "name the output head in model.lora.modules_to_save"),
        (["model.lora.modules_to_save=[embed_token]"], "llama", "did you mean embed_tokens?"),
        (["model.lora.modules_to_save=[embed_tokens]"], "llama_tied", "embed_tokens shares its weight with lm_head"),
        (["model.method=qlora"], "mixtral", "cannot quantise mlp.experts.gate_up_proj, a stack of experts"),
    ],
)
def test_names_that_fit_nothing_are_refused_with_the_way_out(overrides, architecture, message):
    model, config = meta_model(*overrides, architecture=architecture)
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        add_adapters(model, config)


def test_qlora_refuses_layers_that_do_not_divide_into_blocks():
    config = compose(["model.method=qlora", "model.config.intermediate_size=176"]).model
    with pytest.raises(UserError, match="down_proj has 176 inputs, no multiple of it; use lora"):
        add_adapters(skeleton(config, 300, torch.device("cpu")), config)
