"""Fills a sharded model: random weights or safetensors, each worker only its own rows.

Random weights are drawn module by module from a seed of their own, in full size in host memory, and cut: the same for every
world_size and on every device, so that an export and an evaluation draw them again. (A GPU would draw others, faster.)
Safetensors are read by row slices, a few megabytes at a time, so all workers together read the model once and none holds more
than its share; tensors that transformers stores in another layout than it computes with (stacked experts) pass through its own converters, and a
quantised layer is quantised row by row as it arrives.
"""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import MergeModulelist, WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from raytune70b.config import UserError
from raytune70b.model.nf4 import Nf4Linear, quantise
from raytune70b.model.shard import local_rows
from raytune70b.model.zero3 import is_cut, touched_rows, whole_shape, write_rows


def base_name(name: str) -> str:
    """The checkpoint's name of a parameter: without what peft puts around an adapted or copied module."""
    for part in (".base_layer", ".original_module", ".modules_to_save.default"):
        name = name.replace(part, "")
    return name


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to a LoRA adapter, so that no checkpoint of the base has it."""
    return ".lora_" in name


def owned_modules(model: Any) -> Iterator[tuple[str, nn.Module, Any]]:
    """Every module once: its name, itself, and the innermost transformers model it lies in, whose `_init_weights` knows it."""
    owners: dict[str, Any] = {}
    for name, module in model.named_modules():
        owners[name] = module if isinstance(module, PreTrainedModel) else owners[name.rpartition(".")[0]]
        yield name, module, owners[name]


@dataclass(frozen=True)
class Slot:
    """A tensor of the model to be filled: its shape in a checkpoint, and this worker's rows of it."""

    module: nn.Module
    key: str

    @property
    def tensor(self) -> Tensor:
        return getattr(self.module, self.key)

    @property
    def quantised(self) -> bool:
        return isinstance(self.module, Nf4Linear) and self.key == "weight"

    @property
    def shape(self) -> tuple[int, ...]:
        if self.quantised:
            return (self.module.out_features, self.module.in_features)  # type: ignore[return-value]
        return whole_shape(self.tensor)

    @property
    def stored(self) -> list[Tensor]:
        """The tensors that hold it."""
        return [self.tensor, self.module.weight_scale] if self.quantised else [self.tensor]  # type: ignore[list-item]

    def rows(self) -> tuple[int, int]:
        """First row and end of this worker's share; under ZeRO-3 two workers may share a row."""
        starts, ends = zip(*(_rows(t) for t in self.stored), strict=True)
        return min(starts), max(ends)

    def write(self, rows: Tensor, first: int = 0) -> None:
        """Takes this worker's rows from its `first` on, and quantises them where the layer is quantised."""
        if self.quantised and not len(rows):
            return
        values = quantise(rows.to(self.tensor.device)) if self.quantised else (rows,)
        for tensor, value in zip(self.stored, values, strict=True):
            if is_cut(tensor):
                write_rows(tensor, value, self.rows()[0] + first)
            else:
                _local(tensor)[slice(first, first + len(value)) if value.ndim else ...].copy_(value)


def _rows(tensor: Tensor) -> tuple[int, int]:
    if is_cut(tensor):
        return touched_rows(tensor)
    if not isinstance(tensor, DTensor):
        return 0, tensor.shape[0] if tensor.ndim else 0
    rows, start = local_rows(tensor)
    return start, start + len(rows)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _slots(module: nn.Module) -> dict[str, Slot]:
    """A module's own parameters; the scales of a quantised weight are written with it."""
    return {key: Slot(module, key) for key, _ in module.named_parameters(recurse=False) if key != "weight_scale"}


class full_parameters:
    """Within the context a module holds its own parameters in full size on a device, uninitialised; yields them by name."""

    def __init__(self, module: nn.Module, device: torch.device | str):
        self.module, self.device = module, device
        self.own = {key: p for key, p in module.named_parameters(recurse=False) if key != "weight_scale"}

    def __enter__(self) -> dict[str, nn.Parameter]:
        full = {key: nn.Parameter(torch.empty(slot.shape, device=self.device, dtype=torch.float32)) for key, slot in _slots(self.module).items()}
        self.module._parameters.update(full)
        return full

    def __exit__(self, *_: object) -> None:
        self.module._parameters.update(self.own)


@torch.no_grad()
def initialise(model: Any, seed: int, only_adapters: bool = False) -> None:
    """Random weights as the architecture's authors draw them; adapters as peft does (A uniform, B zero)."""
    done: set[int] = set()
    for name, module, owner in owned_modules(model):
        own = {key: slot for key, slot in _slots(module).items() if id(slot.tensor) not in done}
        if not own or (only_adapters and not is_adapter(name)):
            continue
        done |= {id(slot.tensor) for slot in own.values()}
        places = {key: slot.rows() for key, slot in own.items()}
        with torch.random.fork_rng(devices=[]), full_parameters(module, "cpu") as full:
            torch.default_generator.manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{base_name(name)}".encode()) >> 1)
            if is_adapter(name):
                _initialise_adapter(name, full["weight"])
            else:
                owner._init_weights(module)
        for key, slot in own.items():
            slot.write(full[key][slice(*places[key])])


def _initialise_adapter(name: str, weight: Tensor) -> None:
    if ".lora_A." in name:
        nn.init.kaiming_uniform_(weight, a=5**0.5)
    else:
        nn.init.zeros_(weight)


@dataclass(frozen=True)
class StoredTensor:
    key: str
    """Name in the file."""
    file: Path
    pattern: str | None
    """The converter's pattern that matched, None for a tensor that is taken as it is."""


PIECE = 4 << 20
"""Bytes that are read at once."""
MAPPED = 8 << 20
"""Bytes that are read before the file is mapped anew: the pages of a mapped file count as this process's memory."""


class _Reader:
    """Reads tensors of safetensors files, one file mapped at a time. Tensors are views of the file."""

    def __init__(self) -> None:
        self.file: Path | None = None
        self.handle: Any = None
        self.mapped = 0

    def rows(self, source: StoredTensor, start: int | None = None, stop: int | None = None) -> Tensor:
        if source.file != self.file or self.mapped > MAPPED:
            self.handle, self.mapped = None, 0
            self.file, self.handle = source.file, safe_open(source.file, framework="pt")
        view = self.handle.get_slice(source.key)
        found = view[start:stop] if view.get_shape() else self.handle.get_tensor(source.key)
        self.mapped += found.nbytes
        return found

    def fill(self, slot: Slot, source: StoredTensor) -> None:
        """Reads this worker's rows of a tensor piece by piece."""
        start, stop = slot.rows()
        rows = max(1, PIECE * max(1, stop - start) // max(1, _local(slot.tensor).nbytes))
        for first in range(start, stop, rows) if slot.shape else (0,):
            slot.write(self.rows(source, first, min(first + rows, stop)), first - start)

    def shape(self, source: StoredTensor) -> list[int]:
        self.rows(source, 0, 0)
        return self.handle.get_slice(source.key).get_shape()


@torch.no_grad()
def load_weights(model: Any, folder: Path, seed: int) -> None:
    """Reads this worker's rows of every weight of a Hugging Face model folder; adapters start as peft's do.

    Raises UserError for tensors that are missing, unexpected or of another shape.
    """
    targets = slots_by_name(model)
    groups, converters = stored_tensors(model, folder, targets)
    reader, filled = _Reader(), set()
    for target, sources in groups:
        if sources[0].pattern is None:
            shape = tuple(reader.shape(sources[0]))
            for slot in targets[target]:
                if slot.shape != shape:
                    raise UserError(f"model.path: {folder}: {target} has shape {shape}, the config says {slot.shape}")
                reader.fill(slot, sources[0])
            filled.add(target)
        else:
            filled |= _convert(model, reader, target, sources, converters[sources[0].pattern], targets)
    missing = sorted(targets.keys() - filled)
    if missing:
        raise UserError(f"model.path: {folder} lacks {len(missing)} tensors of the model, the first is {missing[0]}")
    initialise(model, seed, only_adapters=True)


def slots_by_name(model: Any) -> dict[str, list[Slot]]:
    """Checkpoint name -> the parameters and persistent buffers that take it (two where peft keeps a copy); ties once."""
    found: dict[str, list[Slot]] = defaultdict(list)
    done: set[int] = set()
    kept = model.state_dict().keys()
    for name, module in model.named_modules():
        buffers = {key: Slot(module, key) for key, _ in module.named_buffers(recurse=False) if f"{name}.{key}" in kept}
        for key, slot in (_slots(module) | buffers).items():
            if id(slot.tensor) not in done and not is_adapter(name):
                done.add(id(slot.tensor))
                found[base_name(f"{name}.{key}")].append(slot)
    return dict(found)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else sorted(p.name for p in folder.glob("*.safetensors"))
    lost = [name for name in names if not (folder / name).is_file()]
    if not names or lost:
        raise UserError(f"model.path: {folder} lacks {lost[0] if lost else '*.safetensors files'}; fetch or convert the weights to safetensors")
    return [folder / name for name in names]


def stored_keys(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every tensor's name in a model folder with its file. Raises UserError."""
    for file in _files(folder):
        try:
            with safe_open(file, framework="pt") as handle:
                yield from ((key, file) for key in handle.keys())  # noqa: SIM118 - not a mapping
        except Exception as error:  # SafetensorError derives from Exception
            raise UserError(f"model.path: {file} is damaged: {error}") from error


def stored_tensors(model: Any, folder: Path, targets: dict[str, list[Slot]]) -> tuple[list[tuple[str, list[StoredTensor]]], dict[str, WeightConverter]]:
    """Where each target is stored, in file order, and the converters by their source patterns. Raises UserError for strangers."""
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    wanted: dict[str, Any] = dict.fromkeys(targets, True)
    groups: dict[str, list[StoredTensor]] = defaultdict(list)
    strangers = []
    for key, file in stored_keys(folder):
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if pattern is None and target not in targets:
            strangers += [] if _may_ignore(model, key, target) else [key]
            continue
        groups[target].append(StoredTensor(key, file, pattern))
    if strangers:
        raise UserError(f"model.path: {folder} holds {len(strangers)} tensors that its config.json has no place for, the first is {strangers[0]}")
    order = sorted(groups.items(), key=lambda item: (item[1][0].file, item[0]))
    return order, {pattern: c for c in converters for pattern in c.source_patterns}


def _may_ignore(model: Any, *names: str) -> bool:
    """Tied copies, tables that old checkpoints carry, and what transformers itself leaves out: heads that predict several tokens, causal masks."""
    tied = (model.all_tied_weights_keys or {}).keys()
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"(^|\.)inv_freq$", r"(^|\.)position_ids$", r"\.masked_bias$"]
    return any(name in tied or any(re.search(pattern, name) for pattern in patterns) for name in names)


def _convert(
    model: Any, reader: _Reader, target: str, sources: list[StoredTensor], converter: WeightConverter, targets: dict[str, list[Slot]]
) -> set[str]:
    """Fills what a converter makes of several stored tensors, and returns the names; experts of other workers are not read."""
    sources = sorted(sources, key=lambda s: dot_natural_key(s.key))
    cut = isinstance(converter.operations[0], MergeModulelist) and converter.operations[0].dim == 0 and target in targets
    start, stop = targets[target][0].rows() if cut else (0, len(sources))
    if start == stop:
        return {target}
    made = copy.deepcopy(converter)
    for pattern in converter.source_patterns:
        for source in [s for s in sources if s.pattern == pattern][start:stop]:
            made.add_tensor(target, source.key, pattern, reader.rows(source))  # type: ignore[arg-type]
    results = made.convert(target, model=model, config=model.config)
    for name, value in results.items():
        tensor = value[0] if isinstance(value, list) else value
        for slot in targets[name]:
            slot.write(tensor if cut else tensor[slice(*slot.rows())])
    return set(results)
