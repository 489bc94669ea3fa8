"""The trained model in one process, unsharded and in fp32: what an export is compared with.

It is built by the code that trains (`raytune70b.model`), from the checkpoint as training loads it, and shares nothing with the
streaming export but the checkpoint's files. Costs 4 bytes of host memory a parameter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raytune70b import schema
from raytune70b.export.tensors import load_alone
from raytune70b.model.adapters import add_adapters
from raytune70b.model.buffers import restore_buffers
from raytune70b.model.load import skeleton
from raytune70b.model.nf4 import Nf4Linear, dequantise
from raytune70b.model.weights import initialise, load_weights
from raytune70b.storage import Folder
from raytune70b.training.state import model_state

CPU = torch.device("cpu")


def base_model(config: schema.Config, vocab_size: int) -> Any:
    """The model before training: from `model.path`, or the random weights that a run of this seed starts from; adapters are zero."""
    model = skeleton(config.model, vocab_size, CPU)
    if config.model.method != "full":
        add_adapters(model, config.model)
    model.to_empty(device="cpu")
    model.tie_weights()
    restore_buffers(model, CPU)
    if config.model.path is None:
        initialise(model, config.run.seed)
    else:
        load_weights(model, Path(config.model.path), config.run.seed)
    return model.eval()


@torch.no_grad()
def live_model(config: schema.Config, vocab_size: int, checkpoint: Folder) -> Any:
    """The model as training left it, its weights exactly those of the checkpoint and the base, computing in fp32."""
    model = base_model(config, vocab_size)
    load_alone(checkpoint, {"model": model_state(model)})
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    return model


@torch.no_grad()
def round_weights(model: Any, dtype: torch.dtype, kept: set[str]) -> None:
    """Merges adapters by peft's own arithmetic and rounds every weight to `dtype` and back, in place; `kept` names stay fp32."""
    for module in model.modules():
        if getattr(module, "lora_A", None):
            _merge(module)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and ".lora_" not in name and name not in kept:
            parameter.data = parameter.data.to(dtype).float()


def _merge(module: Any) -> None:
    base = module.get_base_layer()
    weight = dequantise(base.weight, base.weight_scale, torch.float32) if isinstance(base, Nf4Linear) else base.weight.data
    plain = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
    plain.weight = nn.Parameter(weight + module.get_delta_weight("default"), requires_grad=False)
    plain.bias = base.bias
    module.base_layer = plain
    for part in (module.lora_A, module.lora_B):
        part["default"].weight.zero_()


def logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """fp32 logits [B, S, V] of packed blocks."""
    with torch.no_grad():
        return model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits.float()
