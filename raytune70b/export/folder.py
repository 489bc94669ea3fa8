"""What stands beside the weights in a model folder: config, generation config, tokenizer, chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import GenerationConfig

from raytune70b.blocks.manifest import DataError, Manifest
from raytune70b.config import UserError
from raytune70b.storage import Folder

TOKENIZER = "tokenizer"


def write_tokenizer(staging: Path, data: Folder, manifest: Manifest) -> Any:
    """Copies the tokenizer that made the token blocks, chat template included, and loads the copy. Raises DataError, UserError."""
    source = data / TOKENIZER
    digest = xxhash.xxh3_128()
    names = [name for name, _ in source.files()]
    for name in names:
        content = source.read(name)
        digest.update(name.rsplit("/", 1)[-1].encode() + b"\0" + content)
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).write_bytes(content)
    if digest.hexdigest() != manifest.tokenizer:
        raise DataError(f"{source.uri}: is not the tokenizer that the token blocks were made with; run jobs/prepare.py again, or give data.path=FOLDER")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(staging), local_files_only=True)
    except Exception as error:  # transformers raises whatever its tokenizers do
        raise UserError(f"{source.uri}: transformers cannot load it: {str(error).splitlines()[0]}") from error


def write_configs(staging: Path, model: Any, tokenizer: Any, dtype: torch.dtype, base: str | None) -> None:
    """config.json and generation_config.json; tokens that the model's config leaves open are the tokenizer's."""
    config = model.config
    config.use_cache, config.dtype, config.architectures = True, dtype, [type(model).__name__]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(config.get_text_config(), name, None) is None:
            setattr(config.get_text_config(), name, getattr(tokenizer, name))
    config.save_pretrained(staging)
    _generation_config(config, tokenizer, base).save_pretrained(staging)


def _generation_config(config: Any, tokenizer: Any, base: str | None) -> GenerationConfig:
    """The base's generation config where it has one; an answer also ends at the token that training ended it with."""
    if base is not None and (Path(base) / "generation_config.json").is_file():
        made = GenerationConfig.from_pretrained(base, local_files_only=True)
    else:
        made = GenerationConfig.from_model_config(config)
    ends = made.eos_token_id if isinstance(made.eos_token_id, list) else [made.eos_token_id]
    every = [e for e in dict.fromkeys([*ends, tokenizer.eos_token_id]) if e is not None]
    made.eos_token_id = every[0] if len(every) == 1 else every
    if made.pad_token_id is None:
        made.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else every[0]
    return made
