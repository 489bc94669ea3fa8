"""Writes safetensors files front to back while the tensors stream in: a model never lies in memory, not even one tensor twice.

The layout (a little-endian length, a JSON header, then the tensors' bytes) is safetensors' own, and so are file names, index and
`metadata`: transformers, vLLM and others read the folder as they read one written by `save_pretrained`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from raytune70b.export.tensors import Source

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""safetensors' names of the dtypes."""


@dataclass(frozen=True)
class Written:
    """What was written: by file name its size and xxh3-128."""

    files: dict[str, tuple[int, str]]
    bytes: int


def plan_files(tensors: dict[str, Source], shard_bytes: int, pattern: str = "model{suffix}.safetensors") -> tuple[dict[str, list[str]], dict[str, str] | None]:
    """Which tensors go to which file, and the index's weight map where there is more than one file."""
    shapes = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}
    split = split_torch_state_dict_into_shards(shapes, filename_pattern=pattern, max_shard_size=shard_bytes)
    return split.filename_to_tensors, split.tensor_to_filename if split.is_sharded else None


def write_safetensors(folder: Path, tensors: dict[str, Source], shard_bytes: int, pattern: str = "model{suffix}.safetensors") -> Written:
    """Writes the tensors, in their sources' dtypes, as files of about `shard_bytes`, and an index where there are several. Raises OSError."""
    files, weight_map = plan_files(tensors, shard_bytes, pattern)
    written = {name: _write_file(folder / name, {key: tensors[key] for key in keys}) for name, keys in files.items()}
    total = sum(t.elements * t.dtype.itemsize for t in tensors.values())
    if weight_map is not None:
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
        (folder / (pattern.format(suffix="") + ".index.json")).write_text(index + "\n")
    return Written(written, total)


def _write_file(path: Path, tensors: dict[str, Source]) -> tuple[int, str]:
    """One file, flushed to disk; returns its size and checksum."""
    digest = xxhash.xxh3_128()
    with path.open("wb") as sink:
        for part in _file_parts(tensors):
            digest.update(part)
            sink.write(part)
        sink.flush()
        os.fsync(sink.fileno())
        return sink.tell(), digest.hexdigest()


def _file_parts(tensors: dict[str, Source]) -> Iterator[bytes | memoryview]:
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, t in tensors.items():
        size = t.elements * t.dtype.itemsize
        header[name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [offset, offset + size]}  # type: ignore[dict-item]
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name, t in tensors.items():
        yield from _tensor_parts(name, t)


def _tensor_parts(name: str, tensor: Source) -> Iterator[memoryview]:
    """The bytes of a tensor. Raises RuntimeError where its pieces are not what its source said: the file would be garbage."""
    written = 0
    for piece in tensor.pieces():
        if piece.dtype != tensor.dtype:
            raise RuntimeError(f"{name}: a piece has dtype {piece.dtype}, its source says {tensor.dtype}")
        written += piece.numel()
        yield _bytes(piece)
    if written != tensor.elements:
        raise RuntimeError(f"{name}: its pieces hold {written} elements, its shape {tensor.shape} has {tensor.elements}")


def _bytes(piece: Tensor) -> memoryview:
    return memoryview(piece.detach().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
