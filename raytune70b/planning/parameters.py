"""Every parameter of a model with its exact shape, from its Hugging Face config.

Families that write their tensors down in a few lines (llama, mistral, qwen2, mpt) are counted here in microseconds, without torch;
any other config is built on the meta device by accelerate, which allocates nothing and costs the import of transformers
(a few seconds). Tests hold both ways equal.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from raytune70b.config import UserError


class ModelError(UserError):
    """A model whose shape cannot be worked out."""


@dataclass(frozen=True)
class Tensor:
    """One parameter. `linear`: the weight of a linear layer, [out, in], that adapters or 4-bit storage can apply to."""

    name: str
    shape: tuple[int, ...]
    linear: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def layer(self) -> int | None:
        """Index of the decoder layer; None for embeddings, the last norm and the output head."""
        found = re.search(r"\.(\d+)\.", self.name)
        return int(found[1]) if found else None


@dataclass(frozen=True)
class ModelShape:
    """What memory and time depend on. `gated`: the MLP multiplies two projections (SwiGLU)."""

    model_type: str
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    gated: bool
    tensors: tuple[Tensor, ...]

    @cached_property
    def parameters(self) -> int:
        return sum(t.numel for t in self.tensors)

    @cached_property
    def layer_tensors(self) -> tuple[Tensor, ...]:
        """The largest decoder layer: the unit of sharding, gathering and recomputing."""
        by_layer: dict[int, list[Tensor]] = {}
        for tensor in self.tensors:
            if tensor.layer is not None:
                by_layer.setdefault(tensor.layer, []).append(tensor)
        return tuple(max(by_layer.values(), key=lambda group: sum(t.numel for t in group)))

    @cached_property
    def root_tensors(self) -> tuple[Tensor, ...]:
        """Embeddings, the last norm and the head."""
        return tuple(t for t in self.tensors if t.layer is None)

    @cached_property
    def layer_parameters(self) -> int:
        return sum(t.numel for t in self.layer_tensors)

    @cached_property
    def root_parameters(self) -> int:
        return sum(t.numel for t in self.root_tensors)

    @cached_property
    def linear_parameters(self) -> int:
        """Weights of the linear layers inside the decoder layers."""
        return sum(t.numel for t in self.tensors if t.linear and t.layer is not None)

    @property
    def head_parameters(self) -> int:
        """Weights of the output head, multiplied for every token even where they are the embedding's."""
        return self.vocab * self.hidden

    def linear_names(self) -> list[str]:
        """Names of the linear layers inside a decoder layer, such as q_proj."""
        return [t.name.removesuffix(".weight").rsplit(".", 1)[-1] for t in self.layer_tensors if t.linear]


def model_shape(config: dict[str, Any]) -> ModelShape:
    """The shape of a Hugging Face config. Raises ModelError."""
    family = config.get("model_type")
    try:
        return _FAMILIES[family](config) if family in _FAMILIES else from_meta_device(config)
    except KeyError as error:
        raise ModelError(f"model.config.{error.args[0]}: is missing, and a {family} model needs it") from error
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise ModelError(f"model.config: its values make no {family} model: {error}") from error


def read_config(path: str) -> dict[str, Any]:
    """config.json of a model folder. Raises ModelError."""
    file = Path(path) / "config.json"
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path: {file} cannot be read ({error}); it takes a Hugging Face model folder") from error


def _llama(config: dict[str, Any]) -> ModelShape:
    hidden, layers, width, vocab = (config[k] for k in ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"))
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or (
        8 if config["model_type"] == "mistral" else 32 if config["model_type"] == "qwen2" else heads
    )
    head_dim = config.get("head_dim") or hidden // heads
    qkv_bias = config["model_type"] == "qwen2" or bool(config.get("attention_bias"))
    out_bias, mlp_bias = bool(config.get("attention_bias")) and config["model_type"] == "llama", bool(config.get("mlp_bias"))
    attention = [
        ("q_proj", heads * head_dim, hidden, qkv_bias),
        ("k_proj", kv_heads * head_dim, hidden, qkv_bias),
        ("v_proj", kv_heads * head_dim, hidden, qkv_bias),
        ("o_proj", hidden, heads * head_dim, out_bias),
    ]
    mlp = [("gate_proj", width, hidden, mlp_bias), ("up_proj", width, hidden, mlp_bias), ("down_proj", hidden, width, mlp_bias)]

    def tensors() -> Iterator[Tensor]:
        yield Tensor("model.embed_tokens.weight", (vocab, hidden))
        for n in range(layers):
            for block, parts in (("self_attn", attention), ("mlp", mlp)):
                for name, rows, columns, bias in parts:
                    yield Tensor(f"model.layers.{n}.{block}.{name}.weight", (rows, columns), linear=True)
                    if bias:
                        yield Tensor(f"model.layers.{n}.{block}.{name}.bias", (rows,))
            yield Tensor(f"model.layers.{n}.input_layernorm.weight", (hidden,))
            yield Tensor(f"model.layers.{n}.post_attention_layernorm.weight", (hidden,))
        yield Tensor("model.norm.weight", (hidden,))
        if not config.get("tie_word_embeddings", False):
            yield Tensor("lm_head.weight", (vocab, hidden), linear=True)

    context = config.get("max_position_embeddings") or {"llama": 2048, "mistral": 131072, "qwen2": 32768}[config["model_type"]]
    return ModelShape(config["model_type"], hidden, layers, width, heads, kv_heads, head_dim, vocab, context, True, tuple(tensors()))


def _mpt(config: dict[str, Any]) -> ModelShape:
    hidden, layers, heads, vocab = (config[k] for k in ("d_model", "n_layers", "n_heads", "vocab_size"))
    width = config.get("expansion_ratio", 4) * hidden

    def tensors() -> Iterator[Tensor]:
        yield Tensor("transformer.wte.weight", (vocab, hidden))
        for n in range(layers):
            yield Tensor(f"transformer.blocks.{n}.norm_1.weight", (hidden,))
            yield Tensor(f"transformer.blocks.{n}.attn.Wqkv.weight", (3 * hidden, hidden), linear=True)
            yield Tensor(f"transformer.blocks.{n}.attn.out_proj.weight", (hidden, hidden), linear=True)
            yield Tensor(f"transformer.blocks.{n}.norm_2.weight", (hidden,))
            yield Tensor(f"transformer.blocks.{n}.ffn.up_proj.weight", (width, hidden), linear=True)
            yield Tensor(f"transformer.blocks.{n}.ffn.down_proj.weight", (hidden, width), linear=True)
        yield Tensor("transformer.norm_f.weight", (hidden,))

    context = config.get("max_seq_len", 2048)
    return ModelShape("mpt", hidden, layers, width, heads, heads, hidden // heads, vocab, context, False, tuple(tensors()))


_FAMILIES: dict[Any, Callable[[dict[str, Any]], ModelShape]] = {"llama": _llama, "mistral": _llama, "qwen2": _llama, "mpt": _mpt}


def from_meta_device(config: dict[str, Any]) -> ModelShape:
    """The shape of any causal language model that transformers knows, built without memory. Raises ModelError."""
    from accelerate import init_empty_weights
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = dict(config)
    family = keys.pop("model_type", None)
    try:
        hf = AutoConfig.for_model(family, **keys)
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(hf)
        model.tie_weights()  # building without memory parts tied weights
    except Exception as error:
        raise ModelError(f"model.config: transformers builds no causal language model from it: {str(error).splitlines()[0]}") from error
    linear = {
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }
    tensors = tuple(Tensor(name, tuple(p.shape), name in linear) for name, p in model.named_parameters())
    text = hf.get_text_config()
    hidden, heads = text.hidden_size, text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    width = getattr(text, "intermediate_size", None) or getattr(text, "ffn_dim", None) or 4 * hidden
    return ModelShape(
        str(family),
        hidden,
        text.num_hidden_layers,
        width,
        heads,
        getattr(text, "num_key_value_heads", None) or heads,
        head_dim,
        text.vocab_size,
        getattr(text, "max_position_embeddings", 2048),
        any("gate" in t.name for t in tensors),
        tensors,
    )
