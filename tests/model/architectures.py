"""Tiny configs of architectures that differ in what training must know of them: 32 wide, two layers."""

from __future__ import annotations

from typing import Any

import torch

from raytune70b.config import compose
from raytune70b.model.buffers import restore_buffers
from raytune70b.model.load import fill, unsharded
from raytune70b.schema import Config

VOCAB = 50
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 128, "pad_token_id": None}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
VALUES: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "cohere": {**SHAPE, "use_qk_norm": True},
    "ernie4_5_moe": {**SHAPE, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16},
    "falcon_h1": {**SHAPE, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "head_dim": 8},
    "gemma2": {**SHAPE, "head_dim": 8},
    "gemma3n_text": {**SHAPE, "head_dim": 8, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "laurel_rank": 4,
                     "activation_sparsity_pattern": None, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4_moe": {**SHAPE, **EXPERTS, "n_routed_experts": 8, "first_k_dense_replace": 1},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neo": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4, "max_position_embeddings": 128},
    "gpt_oss": {**SHAPE, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {**SHAPE, "layer_types": ["conv", "full_attention"]},
    "mixtral": {**SHAPE, "num_local_experts": 4},
    "opt": {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128, "word_embed_proj_dim": 32},
    "phi3": {**SHAPE, "max_position_embeddings": 256},
    "qwen3_next": {**SHAPE, **EXPERTS, **LINEAR, "head_dim": 8, "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"]},
}  # fmt: skip


def config_of(name: str, *overrides: str, **values: Any) -> Config:
    config = compose(list(overrides))
    config.model.config = {"model_type": name, **VALUES[name], **values}
    return config


def tiny_model(config: Config) -> Any:
    """The model on one CPU, with random weights, not sharded."""
    cpu = torch.device("cpu")
    model = unsharded(config, VOCAB, cpu)
    model.to_empty(device="cpu")
    model.tie_weights()
    restore_buffers(model, cpu)
    fill(model, config)
    return model
