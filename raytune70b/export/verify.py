"""Compares an export with the model that was trained, as a user would load it: plain transformers from the folder alone.

Checked: the keys, dtypes and shapes of the files against the architecture; ties; the tokenizer's round trip; logits on blocks of
the data set against the live model, within 1e-5 of the largest logit (a 16-bit export against the live model rounded to 16
bits, and the distance to the unrounded one is reported); one greedy generation, token by token against the live model.
A failed check raises VerifyError. Costs one model in fp32 in host memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from raytune70b.blocks.stream import Reader
from raytune70b.config import UserError
from raytune70b.export.live import logits, round_weights
from raytune70b.export.tensors import Source
from raytune70b.model.generation import greedy

TOLERANCE = 1e-5
"""Of the largest logit."""
BLOCKS, TOKENS, GENERATED = 2, 1024, 8
"""Blocks that are compared, tokens of each, tokens that are generated."""
SAMPLES = ("The parties agree as follows.", "L'été dernier, la « Cour » a jugé : 1 234,56 €.", "§ 12 (a)\n\n\tNaïve café - 合同 🙂")
"""What a tokenizer must give back: accents, typographic marks, whitespace, other scripts."""


class VerifyError(UserError):
    """An export that is not the model that was trained."""


@dataclass
class Verified:
    """What was compared."""

    tensors: int
    tied: bool
    logit_error: float | None = None
    """Largest difference over largest logit, against the live model in the export's own precision."""
    rounding_error: float | None = None
    """The same against the live model as it was trained."""
    tokens_compared: int = 0
    generated: str = ""

    def facts(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Reference:
    """What the live model says, taken before the export is loaded, so that one model at a time is in memory."""

    blocks: dict[str, Tensor]
    trained: Tensor
    """Logits of the model as it was trained."""
    rounded: Tensor
    """Logits of the model rounded as the export is."""
    prompt: Tensor
    """[1, P] token ids of the first document's beginning."""
    steps: Tensor
    """[GENERATED, V] fp32 logits of the rounded model where it goes on from the prompt greedily, without a cache."""


def reference(live: Any, blocks: dict[str, Tensor], dtype: torch.dtype, kept_in_fp32: Any) -> Reference:
    """The live model's logits; rounds the live model in place."""
    trained = logits(live, blocks)
    round_weights(live, dtype, {name for name, _ in live.named_parameters() if kept_in_fp32(name)})
    prompt = prompt_of(blocks)
    return Reference(blocks, trained, logits(live, blocks), prompt, greedy_logits(live, prompt))


def prompt_of(blocks: dict[str, Tensor]) -> Tensor:
    """The first tokens of the first document."""
    first = blocks["position_ids"][0].tolist()
    length = next((n for n, p in enumerate(first) if n and p == 0), len(first))
    return blocks["input_ids"][:1, : min(16, length)]


def greedy_logits(model: Any, prompt: Tensor) -> Tensor:
    """[GENERATED, V]: what each token that follows the prompt greedily was chosen from."""
    ids, rows = prompt, []
    for _ in range(GENERATED):
        rows.append(logits(model, {"input_ids": ids, "position_ids": torch.arange(ids.shape[1]).unsqueeze(0)})[0, -1])
        ids = torch.cat([ids, rows[-1].argmax().reshape(1, 1)], dim=1)
    return torch.stack(rows)


def real_blocks(reader: Reader) -> dict[str, Tensor]:
    """The first blocks of a split, as the model is fed with them."""
    count = min(BLOCKS, reader.manifest.rows(reader.split))
    rows = reader.rows(np.arange(count))
    return {name: torch.from_numpy(rows[name][:, :TOKENS].copy()).long() for name in ("input_ids", "position_ids")}


def check_files(folder: Path, expected: dict[str, Source]) -> int:
    """Compares the headers of the files with what was to be written; returns the number of tensors. Raises VerifyError."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as handle:
            for key in handle.keys():  # noqa: SIM118 - not a mapping
                view = handle.get_slice(key)
                found[key] = (view.get_dtype(), tuple(view.get_shape()))
    from raytune70b.export.stream import NAMES

    wanted = {key: (NAMES[s.dtype], tuple(s.shape)) for key, s in expected.items()}
    wrong = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
    if wrong:
        raise VerifyError(f"{folder}: {len(wrong)} tensors are not as planned, the first is {wrong[0]}: {found.get(wrong[0])}, planned {wanted.get(wrong[0])}")
    return len(found)


def load(folder: Path) -> Any:
    """The export as plain transformers loads it, in fp32. Raises VerifyError for keys that are missing, unexpected or of another shape."""
    logging.disable_progress_bar()
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True, output_loading_info=True)
    model, info = loaded
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(what):
            raise VerifyError(f"{folder}: transformers reports {what}: {sorted(map(str, info[what]))[:3]}")
    return model.eval()


def check_ties(model: Any) -> bool:
    """Whether input embedding and output head share one weight; raises VerifyError where the config says otherwise."""
    shared = model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    wanted = bool(model.config.get_text_config().tie_word_embeddings)
    if shared != wanted:
        raise VerifyError(f"config.json says tie_word_embeddings={wanted}, the loaded model has {'one weight' if shared else 'two weights'}")
    return shared


def check_tokenizer(folder: Path, trained: Any) -> None:
    """The exported tokenizer gives the ids of the one that trained, the text back, and has its chat template."""
    exported = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    if exported.chat_template != trained.chat_template:
        raise VerifyError(f"{folder}: the chat template differs from the training tokenizer's")
    for text in SAMPLES:
        ids, wanted = exported.encode(text, add_special_tokens=False), trained.encode(text, add_special_tokens=False)
        if ids != wanted or exported.decode(ids) != trained.decode(wanted):
            raise VerifyError(f"{folder}: the tokenizer encodes {text!r} as {ids[:8]}, the training tokenizer as {wanted[:8]}")


def check_logits(model: Any, expected: Reference) -> tuple[float, float]:
    """(error against the rounded live model, distance to the unrounded one), of the largest logit. Raises VerifyError."""
    got = logits(model, expected.blocks)
    error, rounding = _relative(got, expected.rounded), _relative(got, expected.trained)
    if not error <= TOLERANCE:  # not-a-number fails as well
        raise VerifyError(f"logits of the export differ from the live model's by {error:.2e} of the largest, at most {TOLERANCE} is allowed")
    return error, rounding


def _relative(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))


def check_generation(model: Any, tokenizer: Any, expected: Reference) -> str:
    """Generates with a cache and compares every token with the live model's, up to one that it chose from equals. Raises VerifyError."""
    prompt = expected.prompt
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=greedy(model, GENERATED, pad=int(prompt[0, 0])))
    for number, (token, row) in enumerate(zip(made[0, prompt.shape[1] :].tolist(), expected.steps, strict=False), start=1):
        if row.max() - row[token] > 10 * TOLERANCE * row.abs().max().clamp(min=1.0):
            raise VerifyError(f"generated token {number} is {token}, the live model's is {int(row.argmax())}")
        if token != int(row.argmax()):
            break  # of two equal ones the other: from here on the texts differ rightly
    return tokenizer.decode(made[0, prompt.shape[1] :])


def verify(folder: Path, planned: dict[str, Source], tokenizer: Any, expected: Reference | None) -> Verified:
    """All checks; without a `Reference` those that need no model in memory. Raises VerifyError."""
    tensors = check_files(folder, planned)
    check_tokenizer(folder, tokenizer)
    if expected is None:
        return Verified(tensors, check_meta(folder))
    model = load(folder)
    result = Verified(tensors, check_ties(model), tokens_compared=expected.blocks["input_ids"].numel())
    result.logit_error, result.rounding_error = check_logits(model, expected)
    result.generated = check_generation(model, tokenizer, expected)
    return result


def check_meta(folder: Path) -> bool:
    """The keys and shapes of the files against the architecture, without memory for the weights. Raises VerifyError."""
    from transformers import AutoConfig

    from raytune70b.model.weights import slots_by_name, stored_tensors

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    slots = slots_by_name(model)
    groups, _ = stored_tensors(model, folder, slots)
    plain = {target for target, sources in groups if sources[0].pattern is None}
    missing: Iterable[str] = slots.keys() - plain if plain == {t for t, _ in groups} else ()
    if missing:
        raise VerifyError(f"{folder}: lacks {min(missing)}")
    return bool(config.get_text_config().tie_word_embeddings)
