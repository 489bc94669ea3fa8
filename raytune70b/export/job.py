"""Exports a run's checkpoint as a Hugging Face model folder; the steps in order.

Peak memory of the writing is one worker's chunk of the largest tensor and a few pieces of 32 MB, whatever the model's size;
the check against the live model holds one model in fp32 (`export.verify_logits: false` leaves it out).
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from raytune70b.blocks.stream import Reader
from raytune70b.export.adapter import write_adapter
from raytune70b.export.card import CARD, FACTS, card, facts, serving_gpus
from raytune70b.export.folder import write_configs, write_tokenizer
from raytune70b.export.live import live_model
from raytune70b.export.merge import Rounding
from raytune70b.export.publish import check_target, staged
from raytune70b.export.source import Trained, open_run
from raytune70b.export.stream import Written, write_safetensors
from raytune70b.export.tensors import Checkpoint, Source
from raytune70b.export.verify import Reference, real_blocks, reference, verify
from raytune70b.export.weights import (
    DTYPES,
    Wanted,
    default_dtype,
    full_tensors,
    kept_in_fp32,
    merged_tensors,
    meta_model,
    reference_config,
)
from raytune70b.schema import Config
from raytune70b.storage import Folder

ADAPTER = "adapter"
ROOM = 64 << 20
"""Bytes for tokenizer, configs and card beside the weights."""


@dataclass(frozen=True)
class Exported:
    """A published export."""

    folder: Folder
    facts: dict[str, Any]


def export_run(config: Config) -> Exported:
    """Writes, checks and publishes the export that `config.export` asks for. Raises UserError; then nothing is published."""
    settings = config.export
    trained = open_run(config, settings.checkpoint)
    target = Folder(settings.path) if settings.path else trained.run / "export"
    check_target(target, settings.overwrite)
    model = meta_model(trained.config, trained.manifest.vocab_size)
    wanted = Wanted(DTYPES[settings.dtype] if settings.dtype != "auto" else default_dtype(trained.config.model), settings.merge_onto)
    checkpoint, rounding = Checkpoint(trained.checkpoint), Rounding()
    tensors = tensors_of(trained, model, checkpoint, wanted, rounding)
    begin = time.monotonic()
    with staged(target, sum(t.elements * t.dtype.itemsize for t in tensors.values()) + ROOM) as staging:
        tokenizer = write_tokenizer(staging, trained.data, trained.manifest)
        write_configs(staging, model, tokenizer, trained.manifest.answer_ends, wanted.dtype, config.model.path)
        written = write_safetensors(staging, tensors, int(settings.shard_gb * 1e9))
        if config.model.method != "full":
            write_adapter(staging / ADAPTER, trained.config, trained.manifest.vocab_size, checkpoint)
        seconds = time.monotonic() - begin
        expected = compared_with(trained, wanted, kept_in_fp32(model, wanted.dtype)) if settings.verify_logits else None
        checks = verify(staging, tensors, tokenizer, expected).facts()
        form = form_of(config, wanted, written, rounding, seconds) | {"serving_gpus": serving_gpus(model.config.get_text_config(), written.bytes)}
        values = facts(trained, form, checks, written.files)
        (staging / FACTS).write_text(json.dumps(values, indent=1, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
        (staging / CARD).write_text(card(values, config.run.name if target.name == "export" else target.name), encoding="utf-8")
    return Exported(target, values)


def tensors_of(trained: Trained, model: Any, checkpoint: Checkpoint, wanted: Wanted, rounding: Rounding) -> dict[str, Source]:
    """What the folder's weights will be."""
    if trained.config.model.method == "full":
        return full_tensors(model, checkpoint, wanted)
    return merged_tensors(trained.config, model, checkpoint, wanted, rounding)


def compared_with(trained: Trained, wanted: Wanted, fp32: Any) -> Reference:
    """What the live model says on blocks of the data set. Raises UserError where there are no blocks."""
    split = "validation" if trained.manifest.rows("validation") else "train"
    blocks = real_blocks(Reader(trained.data, trained.manifest, split))
    live = live_model(reference_config(trained.config, wanted.merge_onto), trained.manifest.vocab_size, trained.checkpoint)
    return reference(live, blocks, wanted.dtype, fp32)


def form_of(config: Config, wanted: Wanted, written: Written, rounding: Rounding, seconds: float) -> dict[str, Any]:
    """What the export is, for the card."""
    name = next(k for k, v in DTYPES.items() if v == wanted.dtype)
    form = {"dtype": name, "bytes": written.bytes, "seconds": round(seconds, 2), "vllm_dtype": {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[name]}
    if config.model.method != "full":
        onto = {"trained": "the base as it rested in training", "original": "the base's own weights"}[wanted.merge_onto]
        onto = "the dequantised base (NF4)" if config.model.method == "qlora" and wanted.merge_onto == "trained" else onto
        form |= {
            "merged_onto": onto, "adapter": ADAPTER, "rounding_error_of_change": rounding.relative_error,
            "lost_entries_share": rounding.lost_share, "merged_entries": rounding.entries,
        }  # fmt: skip
    return form


def summary(exported: Exported) -> str:
    """What the job prints at its end."""
    values = exported.facts
    form, checks = values["export"], values["checks"]
    lines = [f"{exported.folder.uri}", f"  step {values['run']['step']:,}, {form['dtype']}, {form['bytes'] / 1e9:.3f} GB in {form['seconds']} s, {checks['tensors']} tensors"]
    if "merged_onto" in form:
        lines.append(f"  merged in fp32 onto {form['merged_onto']}; rounding takes {form['rounding_error_of_change']:.2%} of the change,"
                     f" {form['lost_entries_share']:.2%} of the changed entries are lost")  # fmt: skip
    if checks["logit_error"] is not None:
        lines.append(f"  logits within {checks['logit_error']:.1e} of the live model's, {checks['rounding_error']:.1e} before rounding ({checks['tokens_compared']:,} tokens)")
    return "\n".join(lines)


