"""Folders on a local disk, NFS, object stores and whatever else pyarrow or fsspec can open, behind one small class.

A write is whole or absent: on a local file system it goes to a temporary name, is flushed to disk and renamed; an object
store publishes an object only when its upload ends. Transient errors are retried with doubling waits (`retried`).
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from pyarrow import fs as pafs

T = TypeVar("T")
CHUNK = 8 << 20
FATAL_ERRNO = {errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS}

DAMAGE = ("checksum", "corrupt", "deserializ", "not a parquet file", "footer")
"""Words of pyarrow's errors about damaged files: they come without an errno, and reading again does not help."""


def retried(action: Callable[[], T], tries: int = 8, first_wait_s: float = 0.5, on_retry: Callable[[int, Exception], None] | None = None) -> T:
    """Runs `action`, again after an OSError that may pass; the waits double: 0.5, 1, 2, ... seconds."""
    for attempt in range(tries + 1):
        try:
            return action()
        except OSError as error:
            if attempt == tries or error.errno in FATAL_ERRNO or any(word in str(error).lower() for word in DAMAGE):
                raise
            if on_retry is not None:
                on_retry(attempt + 1, error)
            time.sleep(first_wait_s * 2**attempt)
    raise AssertionError("unreachable")


class Folder:
    """One folder of a file system, by path or URI. Picklable: the file system is opened where it is used."""

    def __init__(self, uri: str | Path):
        text = str(uri)
        self.uri = text.rstrip("/") if "://" in text else str(Path(text).expanduser().absolute())
        self._opened: tuple[Any, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"uri": self.uri, "_opened": None}

    def __repr__(self) -> str:
        return f"Folder({self.uri!r})"

    def __truediv__(self, name: str) -> Folder:
        return Folder(f"{self.uri}/{name}")

    @property
    def name(self) -> str:
        return self.uri.rsplit("/", 1)[-1]

    @property
    def local(self) -> Path | None:
        """The folder as a local path, None where it is not local."""
        if "://" not in self.uri:
            return Path(self.uri)
        return Path(self.uri.removeprefix("file://")) if self.uri.startswith("file://") else None

    @property
    def filesystem(self) -> Any:
        """The pyarrow file system."""
        return self._open()[0]

    def path(self, name: str = "") -> str:
        """The path of a file below, as the file system wants it."""
        root = self._open()[1]
        return f"{root}/{name}" if name else root

    def _open(self) -> tuple[Any, str]:
        if self._opened is None:
            if self.local is not None:
                self._opened = (pafs.LocalFileSystem(), str(self.local))
            else:
                try:
                    self._opened = pafs.FileSystem.from_uri(self.uri)
                except (ValueError, NotImplementedError):  # a scheme that pyarrow does not know
                    import fsspec

                    remote, path = fsspec.core.url_to_fs(self.uri)
                    self._opened = (pafs.PyFileSystem(pafs.FSSpecHandler(remote)), path)
        return self._opened

    def exists(self, name: str = "") -> bool:
        return self.filesystem.get_file_info(self.path(name)).type != pafs.FileType.NotFound

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""
        info = self.filesystem.get_file_info(self.path(name))
        return info.size if info.type == pafs.FileType.File else None

    def make(self) -> Folder:
        self.filesystem.create_dir(self.path(), recursive=True)
        return self

    def names(self) -> list[str]:
        """Names of the files and folders directly below, sorted; empty where the folder is absent."""
        selector = pafs.FileSelector(self.path(), allow_not_found=True)
        return sorted(info.base_name for info in self.filesystem.get_file_info(selector) if info.base_name)

    def files(self) -> Iterator[tuple[str, int]]:
        """(relative name, bytes) of every file below, at any depth, sorted."""
        selector = pafs.FileSelector(self.path(), allow_not_found=True, recursive=True)
        root = self.path()
        for info in sorted(self.filesystem.get_file_info(selector), key=lambda i: i.path):
            if info.type == pafs.FileType.File:
                yield info.path[len(root) :].lstrip("/"), info.size

    def open(self, name: str) -> Any:
        """A seekable binary file to read from."""
        return self.filesystem.open_input_file(self.path(name))

    def read(self, name: str) -> bytes:
        with self.open(name) as source:
            return source.read()

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, whole or not at all; folders on the way are made."""
        target = self.path(name)
        self.filesystem.create_dir(target.rsplit("/", 1)[0], recursive=True)
        if self.local is None:
            with self.filesystem.open_output_stream(target) as sink:
                sink.write(content)
            return
        temporary = Path(f"{target}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            with temporary.open("wb") as sink:
                sink.write(content)
                sink.flush()
                os.fsync(sink.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    def delete(self, name: str = "") -> None:
        """Deletes a file, or a folder with all below it; absence is no error."""
        info = self.filesystem.get_file_info(self.path(name))
        if info.type == pafs.FileType.Directory:
            self.filesystem.delete_dir(info.path)
        elif info.type == pafs.FileType.File:
            self.filesystem.delete_file(info.path)

    def checksum(self, name: str) -> str:
        """xxh3-128 of a file's bytes, read in pieces of 8 MiB."""
        digest = xxhash.xxh3_128()
        with self.open(name) as source:
            while piece := source.read(CHUNK):
                digest.update(piece)
        return digest.hexdigest()
