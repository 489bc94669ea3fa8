"""Builds the model that is trained: shape, adapters, sharding, weights - in the one order in which all of them work.

meta device -> adapters -> activation checkpointing -> compile -> fully_shard -> memory -> buffers -> weights. No worker ever
holds more than its shard plus one module: 70 billion parameters take the same path as the embedded default.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from raytune70b import schema
from raytune70b.config import UserError
from raytune70b.model.adapters import add_adapters
from raytune70b.model.attention import FLASH, kernels, repeat_backward, supports_flash
from raytune70b.model.buffers import restore_buffers
from raytune70b.model.loss import attach_loss, register_loss
from raytune70b.model.shard import decoder_layers, shard, sum_in_fp32
from raytune70b.model.weights import initialise, load_weights


def hf_config(model: schema.Model, vocab_size: int) -> PretrainedConfig:
    """The model's Hugging Face config: read from `model.path`, or made of `model.config` with the tokenizer's vocabulary.

    Raises UserError when it is missing, unknown to transformers or contradicts itself.
    """
    if model.path is not None:
        if not (Path(model.path) / "config.json").is_file():
            raise UserError(f"model.path: {model.path} holds no config.json; it takes a Hugging Face model folder")
        try:
            return AutoConfig.from_pretrained(model.path, local_files_only=True)
        except Exception as error:  # transformers raises whatever its config classes do
            raise UserError(f"model.path: {model.path}/config.json cannot be read: {_first_line(error)}") from error
    values = dict(model.config)
    kind = values.pop("model_type", None)
    if kind is None:
        raise UserError("model.config: has no model_type; it takes a transformers model type such as llama")
    tokens = {name: values.pop(name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    try:
        return AutoConfig.for_model(kind, **{**values, "vocab_size": vocab_size, **tokens})
    except Exception as error:
        raise UserError(f"model.config: transformers refuses it: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def check_model(hf: PretrainedConfig, seq_len: int, vocab_size: int, special_tokens: dict[str, int | None] | None = None) -> None:
    """Raises UserError when data and model cannot belong together.

    vocab_size: ids in the blocks lie below it. special_tokens: the tokenizer's `bos_token_id` and `eos_token_id`; a model's
    config may name several ends (an instruction model), then the tokenizer's must be one of them.
    """
    text = hf.get_text_config()
    if text.vocab_size < vocab_size:
        raise UserError(f"data.path: the tokenizer has {vocab_size} tokens, the model's vocabulary {text.vocab_size}; use the model's own tokenizer")
    context = getattr(text, "max_position_embeddings", None)
    if context is not None and seq_len > context:
        raise UserError(f"data.seq_len: is {seq_len}, the model's context is {context} (max_position_embeddings); prepare shorter blocks")
    _refuse_router_loss(text)
    _refuse_two_rotary_tables(text, seq_len)
    for name, ours in (special_tokens or {}).items():
        theirs = getattr(text, name, None)
        allowed = theirs if isinstance(theirs, list) else [theirs]
        if ours is not None and theirs is not None and ours not in allowed:
            raise UserError(f"data.tokenizer: {name} is {ours}, the model's config says {theirs}; use the model's own tokenizer")


def _refuse_router_loss(text: PretrainedConfig) -> None:
    """The loss is that of the next token alone: a mixture's load balancing, which transformers adds where its config asks for it, would be missing."""
    coefficient = getattr(text, "router_aux_loss_coef", None) or 0.0
    if getattr(text, "output_router_logits", False) and coefficient:
        raise UserError(
            f"model: its config asks for a load-balancing loss (output_router_logits is true, router_aux_loss_coef {coefficient:g}), which is not computed here; "
            "set output_router_logits to false, in model.config or in the config.json of model.path, to train without it"
        )


def _refuse_two_rotary_tables(text: PretrainedConfig, seq_len: int) -> None:
    """With longrope transformers chooses a table by the longest document of a batch: a loss would depend on what lies beside it."""
    rope = getattr(text, "rope_parameters", None) or {}
    for values in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        short = values.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        if values.get("rope_type") == "longrope" and short and seq_len > short:
            raise UserError(
                f"data.seq_len: is {seq_len}; this model (longrope) has another rotary table for documents over {short} tokens (original_max_position_embeddings), "
                f"and transformers takes one for all documents of a batch; prepare blocks of at most {short}"
            )


def check_buildable(config: schema.Config, vocab_size: int) -> Any:
    """The model without memory for weights. Raises UserError where transformers cannot build it, or leaves buffers of it uncomputed."""
    model, cpu = config.model, torch.device("cpu")
    if model.attention == FLASH:  # it may be on the workers
        model = dataclasses.replace(model, attention="auto")
    built = skeleton(model, vocab_size, cpu)
    restore_buffers(built, cpu)
    return built


def check_libraries(config: schema.Config) -> None:
    """Raises UserError where the run needs bitsandbytes, whose numbers of 4 and 8 bits it uses, or DeepSpeed, and there is none."""
    users = [
        ("model.method", config.model.method, "qlora", "bitsandbytes", "qlora", "lora"),
        ("train.optimizer", config.train.optimizer, "adamw_8bit", "bitsandbytes", "qlora", "adamw_bf16"),
        ("model.sharding", config.model.sharding, "zero3", "deepspeed", "deepspeed", "fsdp"),
    ]
    for key, value, needs, library, extra, instead in users:
        if value == needs and importlib.util.find_spec(library) is None:
            raise UserError(f"{key}: {value} needs {library}, which is not installed; pip install 'raytune70b[{extra}]', or use {key}={instead}")


def build_model(config: schema.Config, vocab_size: int, mesh: DeviceMesh, device: torch.device, weights: bool = True) -> nn.Module:
    """The sharded model with its weights, in training mode.

    Weights come from `model.path`, or are random, equal for every world_size. Gradients are sums over all workers.
    device: where it trains; with `model.offload: params` the parameters rest in host memory. weights: False leaves them open, for a checkpoint
    that holds them all. Raises UserError.
    """
    model = unsharded(config, vocab_size, device)
    if config.model.compile:
        for layer in decoder_layers(model):
            layer.compile()
    shard(model, mesh, config.model)
    register_loss(model)
    model.to_empty(device="cpu" if config.model.offload == "params" else device)
    restore_buffers(model, device)
    if config.model.gradients == "fp32":
        sum_in_fp32(model)
    if weights:
        fill(model, config)
    return model.train()


def unsharded(config: schema.Config, vocab_size: int, device: torch.device) -> Any:
    """The model on the meta device with adapters, activation checkpointing and the loss, before it is cut. Raises UserError."""
    check_libraries(config)
    model = skeleton(config.model, vocab_size, device)
    if config.model.method != "full":
        add_adapters(model, config.model)
    checkpoint_activations(model, config.model.activation_checkpointing)
    attach_loss(model)
    return model


def fill(model: Any, config: schema.Config) -> None:
    """Gives a model that is cut its weights: from `model.path`, or random ones. Raises UserError."""
    if config.model.path is None:
        initialise(model, config.run.seed)
    else:
        load_weights(model, Path(config.model.path), config.run.seed)


def skeleton(model: schema.Model, vocab_size: int, device: torch.device) -> Any:
    """The model on the meta device: its modules and dtypes, no memory. Raises UserError."""
    hf = hf_config(model, vocab_size)
    if getattr(hf, "quantization_config", None):
        raise UserError(f"model.path: {model.path} is quantised already; take the 16-bit weights, model.method=qlora quantises them itself")
    built = _built_with_any(hf, kernels(model, device))
    for parameter in built.parameters():  # not built.to(): buffers such as rotary tables stay fp32
        parameter.data = parameter.data.to(weight_dtype(model))
    return built


def _built_with_any(hf: PretrainedConfig, implementations: list[str]) -> Any:
    """The modules with the first of several attention implementations that the architecture, and what is installed, has. Raises UserError."""
    for implementation in implementations[:-1]:
        try:
            return _built(hf, implementation)
        except UserError:
            continue
    return _built(hf, implementations[-1])


def _built(hf: PretrainedConfig, implementation: str) -> Any:
    """The modules in fp32 on the meta device. Raises UserError."""
    hf.use_cache = False
    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(hf, attn_implementation=implementation, dtype=torch.float32)
    except (ValueError, TypeError, AttributeError, KeyError, ImportError) as error:
        raise UserError(f"model: transformers cannot build {hf.model_type}: {_first_line(error)}") from error
    if implementation == FLASH:
        supports_flash(type(built), hf)
        repeat_backward()
    return built


def weight_dtype(model: schema.Model) -> torch.dtype:
    """fp32 master weights where weights are trained, unless `precision` is bf16; a frozen base rests in the compute dtype."""
    if model.precision == "fp32" or (model.precision == "bf16_mixed" and model.method == "full"):
        return torch.float32
    return torch.bfloat16


def checkpoint_activations(model: Any, mode: str) -> None:
    """Recomputes every decoder layer in the backward pass (`full`), every second (`selective`), or none."""
    if mode != "none":
        model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=2 if mode == "selective" else 1)
