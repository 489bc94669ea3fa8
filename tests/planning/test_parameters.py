"""Parameter counts: what is written down here against what transformers builds, and published totals."""

import pytest

from raytune70b.config import compose
from raytune70b.planning.parameters import ModelError, from_meta_device, model_shape
from raytune70b.planning.workload import config_shape

SMALL = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300}
FAMILIES = [
    {"model_type": "llama", **SMALL},
    {"model_type": "llama", **SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True},
    {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    {"model_type": "mistral", **SMALL, "num_key_value_heads": 1},
    {"model_type": "qwen2", **SMALL, "num_key_value_heads": 2},
    {"model_type": "qwen2", **SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True},
    {"model_type": "mpt", "d_model": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 300},
]


@pytest.mark.parametrize("config", FAMILIES, ids=lambda c: f"{c['model_type']}-{len(c)}")
def test_written_down_equals_built(config):
    assert model_shape(config) == from_meta_device(config)


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox", "qwen3", "gemma2", "phi3"])
def test_any_family_is_counted_exactly(family):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300, "intermediate_size": 128, "pad_token_id": 0}
    if family == "opt":
        small |= {"ffn_dim": 128, "word_embed_proj_dim": 64}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **small))
    model.tie_weights()
    shape = model_shape({"model_type": family, **small})
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.layers == 2
    assert {t.name for t in shape.tensors} == {name for name, _ in model.named_parameters()}
    assert shape.linear_parameters + shape.root_parameters > 0.95 * shape.parameters


@pytest.mark.parametrize(("file", "billions"), [("llama-2-70b", 68.976648192), ("llama-3-70b", 70.553706496), ("llama-3-8b", 8.030261248)])
def test_shipped_models_have_their_published_size(file, billions):
    shape = config_shape(compose([f"conf/model/{file}.yaml"]))
    assert shape.parameters == round(billions * 1e9)


def test_what_is_missing_or_unknown_is_named():
    with pytest.raises(ModelError, match=r"num_hidden_layers: is missing, and a llama"):
        model_shape({"model_type": "llama", "hidden_size": 64, "vocab_size": 10})
    with pytest.raises(ModelError, match="transformers builds no causal language model"):
        model_shape({"model_type": "no-such-model", "hidden_size": 64})
    with pytest.raises(ModelError, match=r"model.path: .*config.json cannot be read"):
        config_shape(compose(["model.path=/nowhere"]))
