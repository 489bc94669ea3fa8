"""The adapters of a LoRA or QLoRA run as a peft folder: `PeftModel.from_pretrained(base, folder)` loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from raytune70b import schema
from raytune70b.export.stream import write_safetensors
from raytune70b.export.tensors import Checkpoint
from raytune70b.model.adapters import lora_config
from raytune70b.model.load import skeleton
from raytune70b.model.weights import base_name, is_adapter


def write_adapter(folder: Path, config: schema.Config, vocab_size: int, checkpoint: Checkpoint) -> None:
    """Writes adapter_model.safetensors and adapter_config.json, in the dtype that was trained."""
    folder.mkdir(parents=True)
    peft: Any = lora_config(skeleton(config.model, vocab_size, torch.device("cpu")), config.model.lora)
    peft.base_model_name_or_path = config.model.path
    peft.inference_mode = True
    peft.save_pretrained(str(folder))
    tensors = {f"base_model.model.{adapter_key(name)}": checkpoint.source(name) for name in checkpoint.names()}
    write_safetensors(folder, tensors, 1 << 40, "adapter_model{suffix}.safetensors")


def adapter_key(name: str) -> str:
    """peft's stored name of a trained tensor: without the adapter's name, and a module trained in full under its own."""
    return name.replace(".default.", ".") if is_adapter(name) else base_name(name)
