"""What stands beside the weights in a model folder: config, generation config, tokenizer, chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from raytune70b.blocks.manifest import DataError, Manifest, tokenizer_digest
from raytune70b.config import UserError
from raytune70b.storage import Folder

TOKENIZER = "tokenizer"
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "min_p": None, "top_h": None}
"""Values of a generation config that only sampling uses, with those that change nothing: transformers saves no config that has them without
`do_sample`, and several published bases have them so."""


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
    try:
        _generation_config(config, tokenizer, answer_ends, base).save_pretrained(staging)
    except ValueError as error:  # transformers loads configs that it refuses to save
        reason = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        raise UserError(f"{base}/generation_config.json: transformers refuses to save it: {reason} Mend that file") from error


def _generation_config(config: Any, tokenizer: Any, answer_ends: Sequence[int], base: str | None) -> GenerationConfig:
    """The base's generation config where it has one; an answer also ends at the tokens that training ended it with."""
    if base is not None and (Path(base) / "generation_config.json").is_file():
        made = GenerationConfig.from_pretrained(base, local_files_only=True)
    else:
        made = GenerationConfig.from_model_config(config)
    ends = made.eos_token_id if isinstance(made.eos_token_id, list) else [made.eos_token_id]
    every = [e for e in dict.fromkeys([*ends, *answer_ends, tokenizer.eos_token_id]) if e is not None]
    made.eos_token_id = every[0] if len(every) == 1 else every
    if made.pad_token_id is None:
        made.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else every[0]
    if made.do_sample is not True:
        sampling = [name for name, idle in SAMPLING.items() if getattr(made, name, None) not in (None, idle)]
        if made.do_sample is None:
            made.do_sample = bool(sampling) or None
        else:  # it says that it does not sample: then they mean nothing
            for name in sampling:
                setattr(made, name, None)
    return made
