"""LoRA adapters (peft) on a model that is still on the meta device: adapters added after sharding would not be synchronised.

The base is frozen and rests in the compute dtype, or in NF4 with qlora; adapters and further trained modules are fp32 unless
`model.precision` is bf16.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from raytune70b import schema
from raytune70b.config import UserError
from raytune70b.model.nf4 import quantise_linears
from raytune70b.model.shard import decoder_layers

if TYPE_CHECKING:
    from peft import LoraConfig  # takes 4 s to import: only runs with adapters pay for it


def add_adapters(model: Any, config: schema.Model) -> None:
    """Freezes the base (in NF4 with qlora) and adds trained adapters, in place. Raises UserError for names that fit nothing."""
    if config.method == "qlora":
        quantise_linears(model, decoder_layers(model))
    from peft import inject_adapter_in_model

    inject_adapter_in_model(lora_config(model, config.lora), model, low_cpu_mem_usage=True)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def lora_config(model: Any, lora: schema.Lora) -> LoraConfig:
    """peft's configuration, as it is also saved beside exported adapters. Raises UserError."""
    from peft import LoraConfig

    linears = linear_names(model)
    if not linears:
        raise UserError(f"model.method: {model.config.model_type} has no linear layer that takes an adapter; use model.method=full")
    taken = _taken_for_experts(model, linears)
    for name in lora.targets:
        _require(name, linears, "model.lora.targets", "a linear layer of the decoder")
        if name in taken:
            raise UserError(f"model.lora.targets: peft takes {name} of {model.config.model_type} for its stacked experts, whose adapters cannot be exported; leave it out")
    modules = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if name and any(True for _ in module.parameters())}
    for name in lora.modules_to_save:
        _require(name, modules, "model.lora.modules_to_save", "a module of the model")
    _refuse_tied(model, lora.modules_to_save)
    return LoraConfig(
        task_type="CAUSAL_LM", r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout,  # type: ignore[arg-type]
        target_modules=sorted(lora.targets or linears - taken), modules_to_save=list(lora.modules_to_save) or None,
    )  # fmt: skip


def _taken_for_experts(model: Any, names: set[str]) -> set[str]:
    """Of some linear layers' names those that peft takes for experts: so these were called before transformers stacked them."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    trial = LoraConfig(target_modules=sorted(names | {"gate_proj", "up_proj", "w1", "w3"}))  # it refuses one of a pair alone
    convert_peft_config_for_transformers(trial, model, None)
    return names - set(trial.target_modules or ())


def frozen_experts(model: Any) -> float:
    """The share of a model's parameters that lies in stacked experts, which get no adapters."""
    stacked = sum(p.numel() for name, p in model.named_parameters() if "experts" in name and p.ndim > 2)
    return float(stacked / sum(p.numel() for p in model.parameters()))


def linear_names(model: Any) -> set[str]:
    """Names of the linear layers inside the decoder layers: q_proj, up_proj, ... (the output head lies outside)."""
    return {name.rsplit(".", 1)[-1] for layer in decoder_layers(model) for name, m in layer.named_modules() if isinstance(m, nn.Linear)}


def _require(name: str, known: set[str], key: str, what: str) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, sorted(known), 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
        extra = "; name the output head in model.lora.modules_to_save to train it" if name == "lm_head" else ""
        raise UserError(f"{key}: {name} is not {what}; {hint}{extra}")


def _refuse_tied(model: Any, modules_to_save: list[str]) -> None:
    """One of two tied modules cannot be trained on its own: the copies would part."""
    tied = {part.rsplit(".", 2)[-2] for pair in (model.all_tied_weights_keys or {}).items() for part in pair}
    both = tied & set(modules_to_save)
    if both:
        raise UserError(f"model.lora.modules_to_save: {min(both)} shares its weight with {', '.join(sorted(tied - {min(both)}))} in this model; use model.method=full")
