"""Puts a finished folder in its place, whole or not at all.

It is made beside its place as `.NAME.partial` (for object stores in a local temporary folder) and renamed when every check has
passed; an export that was killed leaves only that folder, which the next one removes. An object store has no rename:
`config.json`, without which nothing takes the folder for a model, goes last.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raytune70b.config import UserError
from raytune70b.storage import CHUNK, Folder, retried

LAST = "config.json"


class DiskFull(UserError):
    """Too little room for an export."""


def check_target(target: Folder, overwrite: bool) -> None:
    """Raises UserError where something is in the way that may not be replaced."""
    names = target.names() if target.exists() else []
    if names and not (overwrite and LAST in names):
        way = "use export.overwrite=true, or another export.path" if LAST in names else "it holds no model; give another export.path"
        raise UserError(f"export.path: {target.uri} is there already ({len(names)} entries); {way}")


@contextmanager
def staged(target: Folder, bytes_needed: int) -> Iterator[Path]:
    """A local folder to fill; on success it takes the target's place, on an error it is removed. Raises DiskFull."""
    if target.local is not None:
        staging = target.local.parent / f".{target.name}.partial"
        staging.parent.mkdir(parents=True, exist_ok=True)
    else:
        staging = Path(tempfile.mkdtemp(prefix="export-")) / target.name
    shutil.rmtree(staging, ignore_errors=True)
    require_room(staging.parent, bytes_needed)
    staging.mkdir()
    try:
        yield staging
        _publish(staging, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"{staging.parent}: no space left; the export needs {bytes_needed / 1e9:.2f} GB; free some, or give another export.path") from error
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if target.local is None:
            shutil.rmtree(staging.parent, ignore_errors=True)


def require_room(folder: Path, bytes_needed: int) -> None:
    """Raises DiskFull unless the folder's disk has room."""
    free = shutil.disk_usage(folder).free
    if free < bytes_needed:
        raise DiskFull(f"{folder}: has {free / 1e9:.2f} GB free, the export needs {bytes_needed / 1e9:.2f} GB; free some, or give another export.path")


def _publish(staging: Path, target: Folder) -> None:
    if target.local is None:
        target.delete(LAST)
        target.delete()
        upload(staging, target)
        return
    old = target.local.parent / f".{target.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if target.local.exists():
        target.local.rename(old)
    staging.rename(target.local)
    _flush(target.local.parent)
    shutil.rmtree(old, ignore_errors=True)


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def upload(source: Path, target: Folder) -> None:
    """Copies a folder, config.json last; each file is tried again when storage fails in passing."""
    names = sorted((p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file()), key=lambda n: (n == LAST, n))
    for name in names:
        retried(lambda name=name: _copy(source / name, target, name))  # type: ignore[misc]


def _copy(source: Path, target: Folder, name: str) -> None:
    path = target.path(name)
    target.filesystem.create_dir(path.rsplit("/", 1)[0], recursive=True)
    with source.open("rb") as reader, target.filesystem.open_output_stream(path) as sink:
        while piece := reader.read(CHUNK):
            sink.write(piece)
