"""Where the tensors of an export come from, a piece at a time: a checkpoint's shards, a base model's files, or memory.

A piece is a run of whole rows. Reading a checkpoint holds one worker's chunk of one tensor; pieces of a file or of memory are
views or reads of about `PIECE` bytes. Nothing ever holds a second copy of a whole tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from raytune70b.storage import Folder
from raytune70b.training.shards import ShardReader

PIECE = 32 << 20
"""Bytes worked on at once."""


@dataclass(frozen=True)
class Source:
    """A tensor that can be read piece by piece, first row to last."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Callable[[], Iterator[Tensor]]

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()

    def whole(self) -> Tensor:
        """The tensor in one piece of its own memory."""
        made = torch.empty(self.shape, dtype=self.dtype)
        row = 0
        for piece in self.pieces():
            if made.ndim == 0:
                return piece.clone()
            made[row : row + len(piece)] = piece
            row += len(piece)
        return made


def row_pieces(tensor: Tensor, limit: int = PIECE) -> Iterator[Tensor]:
    """Views of a tensor's rows, each of about `limit` bytes."""
    if tensor.ndim == 0 or tensor.nbytes <= limit:
        yield tensor
    else:
        yield from tensor.split(max(1, limit // max(1, tensor[:1].nbytes)))


def of_memory(tensor: Tensor) -> Source:
    """A source of a tensor that is in memory already."""
    return Source(tuple(tensor.shape), tensor.dtype, lambda: row_pieces(tensor))


class Checkpoint:
    """The model's tensors in a checkpoint of a run; verify its checksums first: the shards are unpickled."""

    def __init__(self, folder: Folder):
        self._folder = folder
        self._reader = ShardReader(folder)
        metadata = self._reader.read_metadata()
        self._places: dict[MetadataIndex, Any] = metadata.storage_data or {}
        self._tensors: dict[str, TensorStorageMetadata] = {
            key.removeprefix("model."): entry for key, entry in metadata.state_dict_metadata.items()
            if key.startswith("model.") and isinstance(entry, TensorStorageMetadata)
        }  # fmt: skip

    def names(self) -> list[str]:
        """Parameters (and persistent buffers) as the trained model calls them."""
        return list(self._tensors)

    def source(self, name: str) -> Source:
        entry = self._tensors[name]
        return Source(tuple(entry.size), entry.properties.dtype, lambda: self._pieces(name))

    def _pieces(self, name: str) -> Iterator[Tensor]:
        entry = self._tensors[name]
        chunks = sorted((tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks)
        if any(sizes[1:] != tuple(entry.size)[1:] for _, sizes in chunks):  # cut along another dimension: put together first
            yield from row_pieces(self._assembled(name))
            return
        for offsets, _ in chunks:
            yield from row_pieces(self._chunk(f"model.{name}", torch.Size(offsets)))

    def _assembled(self, name: str) -> Tensor:
        made = torch.empty(self._tensors[name].size, dtype=self._tensors[name].properties.dtype)
        load_alone(self._folder, {"model": {name: made}})
        return made

    def _chunk(self, key: str, offsets: torch.Size) -> Tensor:
        """What one worker saved of a tensor."""
        place = self._places[MetadataIndex(key, offsets)]
        with self._reader.fs.create_stream(place.relative_path, "rb") as stream:
            return torch.load(self._reader._slice_file(stream, place), map_location="cpu", weights_only=True)


def load_alone(checkpoint: Folder, state: dict[str, Any]) -> None:
    """Fills a state's tensors from a checkpoint in this process, without a process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, storage_reader=ShardReader(checkpoint), no_dist=True)


def of_file(path: Path, key: str) -> Source:
    """A source of a tensor in a safetensors file. The file is opened anew for each reading: mapped pages count as memory."""
    with safe_open(path, framework="pt") as handle:
        view = handle.get_slice(key)
        shape, dtype = tuple(view.get_shape()), (view[:0] if view.get_shape() else handle.get_tensor(key)).dtype

    def pieces() -> Iterator[Tensor]:
        if not shape:
            with safe_open(path, framework="pt") as handle:
                yield handle.get_tensor(key)
            return
        rows = max(1, PIECE // max(1, torch.Size(shape[1:]).numel() * dtype.itemsize))
        for start in range(0, shape[0], rows):
            with safe_open(path, framework="pt") as handle:
                yield handle.get_slice(key)[start : start + rows]

    return Source(shape, dtype, pieces)
