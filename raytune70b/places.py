"""Looks, before a job starts anything, whether the places it was given are there: folders to write, storage, MLflow's server, the cluster.

Libraries try an address that does not answer for minutes, and find a disk that is read-only after the work. Each check here takes
some seconds at most, and raises a UserError of one line.
"""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from raytune70b import cluster
from raytune70b.errors import UserError, first_line
from raytune70b.schema import Config
from raytune70b.storage import Folder

ANSWER_S = 10.0
"""How long storage or a server may take to answer."""


def check_places(config: Config, key: str, output: Folder, ray: bool = True, mlflow: bool = True) -> None:
    """Raises UserError for the first place of a job that does not hold. key: the setting that names the output.

    A run that has begun goes on without its MLflow server, which gets what it missed later.
    """
    check_writable(key, output)
    data = Folder(config.data.path)
    if data.local is None and data.uri != output.uri and (error := _answer(_look, data.uri)):
        raise UserError(f"data.path: {data.uri} cannot be read ({error}); check the address and this machine's credentials")
    if mlflow and output.size("config.yaml") is None:
        check_mlflow(config)
    if ray:
        cluster.check(config)


def check_writable(key: str, folder: Folder) -> None:
    """Raises UserError where nothing can be written into the folder, or into what is there of the way to it. Leaves nothing behind."""
    error = _failure(_write_here, folder.local) if folder.local is not None else _answer(_write_there, folder.uri)
    if error:
        raise UserError(f"{key}: {folder.uri} cannot be written to ({error}); give a folder that this job may write to")


def check_mlflow(config: Config) -> None:
    """Raises UserError where `tracking.mlflow` names a server that takes no connection."""
    server = urlsplit(config.tracking.mlflow or "")
    if server.scheme not in ("http", "https"):
        return
    address = server.hostname or "", server.port or {"http": 80, "https": 443}[server.scheme]
    if error := _failure(lambda where: socket.create_connection(where, ANSWER_S).close(), address):
        raise UserError(f"tracking.mlflow: no server answers at {config.tracking.mlflow} ({error}); start it, or use tracking.mlflow=sqlite, or null for none")


def _write_here(place: Path) -> None:
    while not place.exists():
        place = place.parent
    with tempfile.TemporaryFile(dir=place):
        pass


def _write_there(uri: str) -> None:
    name = f".{uuid.uuid4().hex}"
    Folder(uri).write(name, b"")
    Folder(uri).delete(name)


def _look(uri: str) -> None:
    Folder(uri).exists("manifest.json")


def _failure(action: Callable[[Any], None], place: Any) -> str:
    """What went wrong in an action; '' where nothing did."""
    try:
        action(place)
        return ""
    except Exception as error:
        return getattr(error, "strerror", None) or first_line(error)


def _answer(action: Callable[[str], None], uri: str) -> str:
    """The same for remote storage, in a process of its own: a library that tries for minutes lets itself neither be interrupted nor end with this one."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(there, action, uri), daemon=True)
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(ANSWER_S) else f"no answer within {ANSWER_S:.0f} s"
    except EOFError:
        return "the attempt crashed"
    finally:
        process.kill()


def _report(pipe: Any, action: Callable[[str], None], uri: str) -> None:
    pipe.send(_failure(action, uri))
