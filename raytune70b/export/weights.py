"""Which tensors an exported model folder holds, and where each comes from.

Full fine-tuning: the checkpoint's tensors, in the names and layout that transformers stores (stacked experts are cut up again).
Adapters: the base's own files tensor by tensor, with the adapters merged into those that have one; so a base keeps its layout.
Ties are stored once.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from raytune70b import schema
from raytune70b.config import UserError
from raytune70b.export.live import CPU, base_model
from raytune70b.export.merge import Adapter, Rounding, cast, merged
from raytune70b.export.tensors import Checkpoint, Source, of_file, of_memory, row_pieces
from raytune70b.model.adapters import add_adapters
from raytune70b.model.load import skeleton, weight_dtype
from raytune70b.model.nf4 import Nf4Linear, dequantise, quantise
from raytune70b.model.weights import base_name, is_adapter, slots_by_name, stored_keys, stored_tensors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class BaseError(UserError):
    """A base model that is not the one the run trained on."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The form of an export."""

    dtype: torch.dtype
    merge_onto: str
    """trained: the base as it rested in training (NF4, bf16); original: the base's own weights."""


def reference_config(config: schema.Config, merge_onto: str) -> schema.Config:
    """The configuration whose live model an export must equal: with the original base, one that was never rounded or quantised."""
    if config.model.method == "full" or merge_onto == "trained":
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, method="lora", precision="fp32"))


def default_dtype(model: schema.Model) -> torch.dtype:
    """The dtype of most of the base's weights as its files hold them, or without a base that of the weights that were trained.

    An export then has the base's size, whatever it was trained in. A config.json may name no dtype, or another one.
    """
    if model.path is None:
        return weight_dtype(model)
    elements: Counter[torch.dtype] = Counter()
    for key, file in stored_keys(Path(model.path)):
        source = of_file(file, key)
        if source.dtype in DTYPES.values():
            elements[source.dtype] += source.elements
    return elements.most_common(1)[0][0] if elements else weight_dtype(model)


def meta_model(config: schema.Config, vocab_size: int) -> Any:
    """The model's modules, adapters included, without memory."""
    model = skeleton(config.model, vocab_size, CPU)
    if config.model.method != "full":
        add_adapters(model, config.model)
    return model


def kept_in_fp32(model: Any, dtype: torch.dtype) -> Callable[[str], bool]:
    """Which weights transformers keeps in fp32 whatever dtype is asked for (a router's bias, a norm)."""
    parts = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        parts |= set(model._keep_in_fp32_modules or ())
    return lambda name: any(f".{part}." in f".{name}." for part in parts)


def full_tensors(model: Any, checkpoint: Checkpoint, wanted: Wanted) -> dict[str, Source]:
    """What a fully trained checkpoint exports. `model` is on the meta device. Raises BaseError."""
    expected = slots_by_name(model)
    _require_equal(expected.keys(), checkpoint.names())
    fp32 = kept_in_fp32(model, wanted.dtype)
    tensors = {}
    for name, (slot, *_) in expected.items():
        source = checkpoint.source(name)
        _require_shape(name, source.shape, slot.shape)
        tensors[name] = cast(source, torch.float32 if fp32(name) else wanted.dtype)
    return stored_layout(model, tensors)


def stored_layout(model: Any, tensors: dict[str, Source]) -> dict[str, Source]:
    """The tensors under the names and in the layout of a model folder."""
    found: dict[str, Source] = {}
    for name, source in tensors.items():
        shape = torch.empty(source.shape, dtype=source.dtype, device="meta")
        made = revert_weight_conversion(model, {name: shape})
        if len(made) == 1 and next(iter(made.values())) is shape:
            found[next(iter(made))] = source
        else:
            found |= _converted(model, name, source, made)
    return found


def _converted(model: Any, name: str, source: Source, made: dict[str, Tensor]) -> dict[str, Source]:
    """The stored tensors that one of the model's becomes; the latest is kept, since all of them are written in a row."""
    latest: dict[str, Tensor] = {}

    def pieces(key: str) -> Iterator[Tensor]:
        if key not in latest:
            latest.update(revert_weight_conversion(model, {name: source.whole()}))
        yield from row_pieces(latest.pop(key))

    return {key: Source(tuple(t.shape), source.dtype, lambda key=key: pieces(key)) for key, t in made.items()}  # type: ignore[misc]


def adapters_of(checkpoint: Checkpoint, lora: schema.Lora) -> dict[str, Adapter]:
    """Name of an adapted weight -> its adapter."""
    prefixes = [name.removesuffix(".lora_A.default.weight") for name in checkpoint.names() if name.endswith(".lora_A.default.weight")]
    return {
        base_name(f"{p}.weight"): Adapter(
            checkpoint.source(f"{p}.lora_A.default.weight").whole().float(), checkpoint.source(f"{p}.lora_B.default.weight").whole().float(),
            lora.alpha / lora.rank,
        ) for p in prefixes
    }  # fmt: skip


def merged_tensors(config: schema.Config, model: Any, checkpoint: Checkpoint, wanted: Wanted, rounding: Rounding) -> dict[str, Source]:
    """What a run with adapters exports: its base with the adapters merged in. Raises BaseError, UserError."""
    adapters = adapters_of(checkpoint, config.model.lora)
    saved = {base_name(n): checkpoint.source(n) for n in checkpoint.names() if not is_adapter(n)}
    fp32 = kept_in_fp32(model, wanted.dtype)
    base = _stored_base(config, model, wanted) if config.model.path else _random_base(config, wanted, model)
    used, found = set(), {}
    for key, (target, source, rest) in base.items():
        dtype = torch.float32 if fp32(key) else wanted.dtype
        if target in adapters:
            adapter = adapters[target]
            _require_shape(target, source.shape, (adapter.b.shape[0], adapter.a.shape[1]))
            found[key] = merged(source, adapter, dtype, rounding, rest)
        elif target in saved:
            _require_shape(target, saved[target].shape, source.shape)
            found[key] = cast(saved[target], dtype)
        else:
            found[key] = cast(source, dtype, rest)
        used.add(target)
    lost = sorted((adapters.keys() | saved.keys()) - used)
    if lost:
        raise BaseError(f"model.path: {config.model.path} has no {lost[0]}, which the checkpoint trained; give the base that the run was started with")
    return found if config.model.path else stored_layout(model, found)


Stored = dict[str, tuple[str, Source, Callable[[Tensor], Tensor]]]
"""Stored name -> (the model's name, the tensor, how its rows rest in the base that is merged onto)."""


def _stored_base(config: schema.Config, model: Any, wanted: Wanted) -> Stored:
    slots = slots_by_name(model)
    groups, _ = stored_tensors(model, Path(config.model.path or ""), slots)
    missing = sorted(slots.keys() - {target for target, _ in groups})
    if missing and all(sources[0].pattern is None for _, sources in groups):
        raise BaseError(f"model.path: {config.model.path} lacks {len(missing)} tensors of the model, the first is {missing[0]}")
    found: Stored = {}
    for target, sources in groups:
        for stored in sources:
            source = of_file(stored.file, stored.key)
            if stored.pattern is None:
                _require_shape(target, source.shape, slots[target][0].shape)
            quantised = target in slots and slots[target][0].quantised
            found[stored.key] = (target, source, _rest(config, wanted, quantised))
    return found


def _random_base(config: schema.Config, wanted: Wanted, model: Any) -> Stored:
    """The random weights of a run without `model.path`; they are drawn whole in memory."""
    base = base_model(reference_config(config, wanted.merge_onto), model.config.vocab_size)
    found: Stored = {}
    for target, (slot, *_) in slots_by_name(base).items():
        module = slot.module
        tensor = dequantise(module.weight, module.weight_scale, torch.float32) if isinstance(module, Nf4Linear) and slot.quantised else slot.tensor.detach()
        found[target] = (target, of_memory(tensor), lambda rows: rows)
    return found


def _rest(config: schema.Config, wanted: Wanted, quantised: bool) -> Callable[[Tensor], Tensor]:
    """How rows of the base's file lie in the base that is merged onto."""
    if wanted.merge_onto == "original":
        return lambda rows: rows
    if quantised:
        return lambda rows: dequantise(*quantise(rows), torch.float32)
    return lambda rows: rows.to(weight_dtype(config.model)) if rows.is_floating_point() else rows


def _require_equal(expected: Any, got: Any) -> None:
    differing = sorted(set(expected) ^ set(got))
    if differing:
        where = "checkpoint" if differing[0] in got else "model"
        raise BaseError(f"model: {len(differing)} tensors are in one of checkpoint and model only, the first is {differing[0]} (in the {where}); give the model that the run was started with")


def _require_shape(name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(got) != tuple(expected):
        raise BaseError(f"model.path: {name} has shape {tuple(got)}, the run trained {tuple(expected)}; give the base that the run was started with")
