"""How a model generates: the base's own file, which goes with an export, and greedy decoding, which heeds none of it.

A base's `generation_config.json` may ask for sampling, a repetition penalty, suppressed or forced tokens. That is how the base is meant to be
served, so an export carries the file on. An evaluation and the check of an export compare models by their most likely tokens instead,
and transformers fills whatever a call leaves open from the model's own generation config: so that is replaced too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from raytune70b.config import UserError

FILE = "generation_config.json"


def read_generation_config(base: str | None) -> dict[str, Any]:
    """The values of a model folder's own file; {} where it has none. Raises UserError where they cannot be read."""
    if base is None or not (file := Path(base) / FILE).is_file():
        return {}
    try:
        values = json.loads(file.read_text("utf-8"))
        GenerationConfig.from_pretrained(base, local_files_only=True)
    except Exception as error:  # whatever json or transformers raises
        raise UserError(f"model.path: {file} cannot be read: {(str(error).splitlines() or [type(error).__name__])[0]}; mend that file, or remove it") from error
    return dict(values)


def end_tokens(values: dict[str, Any] | GenerationConfig) -> list[int]:
    """The tokens that end an answer by a generation config."""
    ends = values.get("eos_token_id") if isinstance(values, dict) else values.eos_token_id
    return [e for e in (ends if isinstance(ends, list) else [ends]) if e is not None]


def greedy(model: Any, max_new_tokens: int, pad: int, ends: list[int] | None = None) -> GenerationConfig:
    """For `model.generate(generation_config=...)`: always the most likely token, whatever the model's own generation config says, which is taken from it."""
    model.generation_config = GenerationConfig()
    return GenerationConfig(do_sample=False, num_beams=1, max_new_tokens=max_new_tokens, pad_token_id=pad, eos_token_id=ends)
