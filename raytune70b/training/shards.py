"""torch.distributed.checkpoint on any storage, with each file's checksum taken while it is written.

DCP's own FileSystemWriter and FileSystemReader do the work; only the file system under them is ours, because DCP reads
back a flipped bit without an error (2000.0 became 8000.0) and knows local paths alone.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystemBase

from raytune70b.storage import Folder

Sums = dict[str, tuple[int, str]]
"""File name -> (bytes, xxh3-128)."""


class _Hashing(io.RawIOBase):
    """Passes writes on and hashes them."""

    def __init__(self, raw: Any):
        self._raw, self.digest, self.bytes = raw, xxhash.xxh3_128(), 0
        self.refused: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.bytes += memoryview(data).nbytes
        try:
            self._raw.write(data)
        except OSError as error:
            self.refused = error
            raise
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self.bytes

    def fileno(self) -> int:
        return self._raw.fileno()  # an object store has none: DCP then skips the fsync, see ShardWriter


class StorageFiles(FileSystemBase):
    """DCP's file operations inside one folder; paths are names in it."""

    def __init__(self, folder: Folder):
        self.folder, self.sums = folder, Sums()

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        name = str(path)
        if mode == "rb":
            with self.folder.open(name) as source:
                yield source
            return
        local = self.folder.local
        with (local / name).open("wb") if local else self.folder.filesystem.open_output_stream(self.folder.path(name)) as raw:
            stream = _Hashing(raw)
            try:
                yield stream
            except RuntimeError as error:  # torch.save hides a full disk behind "unexpected pos"
                raise stream.refused or error from error
        self.sums[name] = (stream.bytes, stream.digest.hexdigest())

    def concat_path(self, path: str | os.PathLike, suffix: str) -> str:
        return f"{path}/{suffix}" if str(path) else suffix

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        self.folder.filesystem.move(self.folder.path(str(path)), self.folder.path(str(new_path)))
        self.sums[str(new_path)] = self.sums.pop(str(path))

    def init_path(self, path: str | os.PathLike) -> str:
        return ""

    def mkdir(self, path: str | os.PathLike) -> None:
        self.folder.make()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True

    def exists(self, path: str | os.PathLike) -> bool:
        return self.folder.exists(str(path))

    def rm_file(self, path: str | os.PathLike) -> None:
        self.folder.delete(str(path))


class ShardWriter(FileSystemWriter):
    """Writes a checkpoint's shards into `folder`; `files.sums` then holds the checksums of what this rank wrote."""

    def __init__(self, folder: Folder):
        # What it writes lies in host memory: copying ahead would only open a CUDA context on the node's first GPU in every worker.
        super().__init__(Path(), sync_files=folder.local is not None, per_thread_copy_ahead=0)
        self.files = StorageFiles(folder)
        self.fs = self.files  # type: ignore[assignment]
        self.path = self.fs.init_path("")  # type: ignore[assignment]


class ShardReader(FileSystemReader):
    """Reads a checkpoint's shards from `folder`; each rank only the pieces that it needs."""

    def __init__(self, folder: Folder):
        super().__init__(Path())
        self.fs = StorageFiles(folder)  # type: ignore[assignment]
        self.path = self.fs.init_path("")  # type: ignore[assignment]
