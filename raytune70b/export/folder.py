"""What stands beside the weights in a model folder: config, generation config, tokenizer, chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from raytune70b.blocks.manifest import DataError, Manifest, tokenizer_digest
from raytune70b.config import UserError
from raytune70b.model.generation import FILE, end_tokens, read_generation_config
from raytune70b.storage import Folder

TOKENIZER = "tokenizer"


def write_tokenizer(staging: Path, data: Folder, manifest: Manifest) -> Any:
    """Copies the tokenizer that made the token blocks, chat template included, and loads the copy. Raises DataError, UserError."""
    source = data / TOKENIZER
    files = {name: source.read(name) for name, _ in source.files()}
    for name, content in files.items():
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).write_bytes(content)
    if tokenizer_digest(files) != manifest.tokenizer:
        raise DataError(f"{source.uri}: is not the tokenizer that the token blocks were made with; run jobs/prepare.py again, or give data.path=FOLDER")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(staging), local_files_only=True)
    except Exception as error:  # transformers raises whatever its tokenizers do
        raise UserError(f"{source.uri}: transformers cannot load it: {str(error).splitlines()[0]}") from error


def write_configs(staging: Path, model: Any, tokenizer: Any, answer_ends: Sequence[int], dtype: torch.dtype, base: str | None) -> None:
    """config.json and generation_config.json; tokens that the model's config leaves open are the tokenizer's. Raises UserError."""
    config = model.config
    config.use_cache, config.dtype, config.architectures = True, dtype, [type(model).__name__]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(config.get_text_config(), name, None) is None:
            setattr(config.get_text_config(), name, getattr(tokenizer, name))
    config.save_pretrained(staging)
    values = generation_values(config, tokenizer, answer_ends, base)
    (staging / FILE).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def generation_values(config: Any, tokenizer: Any, answer_ends: Sequence[int], base: str | None) -> dict[str, Any]:
    """The base's own generation config where it has one; an answer also ends at the tokens that training ended it with.

    It is kept as the file has it: transformers would refuse to save several that published bases have, and greedy decoding of their exports
    is that of the base. Raises UserError.
    """
    values = read_generation_config(base) or GenerationConfig.from_model_config(config).to_diff_dict()
    ends = list(dict.fromkeys(e for e in (*end_tokens(values), *answer_ends, tokenizer.eos_token_id) if e is not None))
    values["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    if values.get("pad_token_id") is None:
        values["pad_token_id"] = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
    return values
