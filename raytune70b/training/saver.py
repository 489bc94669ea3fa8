"""Writes and loads checkpoints with all ranks together; training waits only for the copy to host memory.

A save copies the state to host memory (pinned and reused on a GPU), then a thread writes it with
`torch.distributed.checkpoint` over a gloo group of its own, gathers the checksums, and rank 0 publishes: ledger segment,
cursor, manifest last. Every rank learns the same outcome. One save is in flight at a time; its price is one copy of the
rank's shard in host memory.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from raytune70b.blocks.ledger import Entry, write_segment
from raytune70b.schema import Checkpoint
from raytune70b.storage import Folder, retried
from raytune70b.training.checkpoint import (
    CURSOR,
    MANIFEST,
    CheckpointError,
    Cursor,
    Losses,
    cursor_bytes,
    folder_name,
    known,
    prune,
    read_cursor,
    read_manifest,
    saved_steps,
    scores,
    set_aside,
    superfluous,
    wrong_checksum,
)
from raytune70b.training.shards import ShardReader, ShardWriter
from raytune70b.training.staging import HostCopy
from raytune70b.training.state import State


@dataclass
class Outcome:
    """How a save ended, the same on every rank."""

    step: int
    path: str
    error: str | None
    stall_s: float
    """Seconds that training waited: for the copy, and for the writing too where saves are synchronous."""
    seconds: float
    """Seconds of the writing."""
    bytes: int
    cursor: Cursor | None
    total_s: float
    """Seconds from the beginning of the copy to the end."""


class Saver:
    """One rank's part in the checkpoints of a run. `group` is a gloo group that nothing else uses."""

    def __init__(self, run: Folder, settings: Checkpoint, group: dist.ProcessGroup, on_warning: Callable[[str], None]):
        self._run, self._checkpoints, self._settings, self._group, self._warn = run, run / "checkpoints", settings, group, on_warning
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._host = HostCopy("cuda" if torch.cuda.is_available() else "cpu")
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._whole: Losses = {}
        """Rank 0: the checkpoints there are."""

    def start(self, state: State, cursor: Cursor, entries: list[Entry]) -> None:
        """Copies the state to host memory and begins to write it; all ranks call it at the same step.

        `entries` (rank 0) are the ledger's steps since the newest published checkpoint; `cursor.ledger` names its segment.
        """
        self.wait()
        begin = time.monotonic()
        staged = self._host.of(state)
        copied = time.monotonic() - begin
        self._thread = threading.Thread(target=self._write, args=(staged, cursor, entries, copied), name="checkpoint", daemon=True)
        self._thread.start()
        if not self._settings.asynchronous:
            self._thread.join()

    @property
    def busy(self) -> bool:
        """Whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Returns when no save is in flight; its outcome is still there to be taken."""
        if self._thread is not None:
            self._thread.join()

    @property
    def ended(self) -> bool:
        """Whether a save has ended whose outcome was not taken."""
        return self._outcome is not None

    def take(self) -> Outcome:
        """The outcome of the save that ended."""
        assert self._outcome is not None
        outcome, self._outcome = self._outcome, None
        return outcome

    def _write(self, staged: State, cursor: Cursor, entries: list[Entry], copied: float) -> None:
        begin, folder = time.monotonic(), self._checkpoints / folder_name(cursor.step)
        error, size = None, 0
        try:
            sums = self._write_shards(folder, staged)
            size = sum(b for b, _ in sums.values())
            self._on_rank_0(lambda: self._publish(folder, sums, cursor, entries))
        except BaseException as failure:  # CheckpointException is no Exception; whatever it is, training goes on and says so
            error = _root_cause(failure)
            self._clear(folder)
        seconds = time.monotonic() - begin
        stall = copied if self._settings.asynchronous else copied + seconds
        self._outcome = Outcome(cursor.step, folder.uri, error, stall, seconds, size, None if error else cursor, copied + seconds)

    def _clear(self, folder: Folder) -> None:
        """Makes room for the next save: on a full disk a half-written checkpoint would keep it from fitting.

        One that is published stays: a worker may have died between the manifest and the word of it.
        """
        if self._rank == 0:
            with contextlib.suppress(OSError):
                if folder.size(MANIFEST) is None:
                    folder.delete()

    def _write_shards(self, folder: Folder, staged: State) -> dict[str, tuple[int, str]]:
        def clear() -> None:
            folder.delete()
            folder.make()

        self._on_rank_0(lambda: retried(clear, self._settings.retries))

        def write() -> ShardWriter:
            writer = ShardWriter(folder)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a retry finds its own earlier files
                try:
                    dcp.save(staged, storage_writer=writer, process_group=self._group)
                except CheckpointException as failure:
                    raise OSError(_root_cause(failure)) from failure
            return writer

        # The exception reaches all ranks alike, so all try again together.
        writer = retried(write, self._settings.retries, on_retry=lambda n, e: self._warn(f"checkpoint of step {folder.name}: {e}; try {n + 1}"))
        parts: list[Any] = [None] * self._world
        dist.all_gather_object(parts, writer.files.sums, group=self._group)
        return {name: tuple(entry) for part in parts for name, entry in part.items()}

    def _publish(self, folder: Folder, sums: dict[str, tuple[int, str]], cursor: Cursor, entries: list[Entry]) -> None:
        parent = cursor.ledger

        def publish() -> None:
            if entries:
                cursor.ledger = write_segment(self._run / "ledger", entries, parent)  # a second try must not follow the first one's segment
            cursor.kept = self._stay(cursor)
            folder.write(CURSOR, cursor_bytes(cursor))
            check_all_there(folder, sums)
            files = {**sums, CURSOR: (folder.size(CURSOR), folder.checksum(CURSOR))}
            folder.write(MANIFEST, json.dumps({"step": cursor.step, "world_size": self._world, "files": files}, indent=1).encode())

        try:
            retried(publish, self._settings.retries)
        except BaseException:
            cursor.ledger = parent
            raise
        self._whole[cursor.step] = cursor.validation_loss
        try:
            self._whole = prune(self._checkpoints, self._whole, self._settings.keep_last, self._settings.keep_best, self._settings.keep_every)
        except Exception as error:  # this one is published, whatever an old one holds
            self._warn(f"old checkpoints could not be removed: {_root_cause(error)}")

    def _stay(self, cursor: Cursor) -> list[tuple[int, float | None]]:
        """The known checkpoints that retention leaves beside a new one; what goes is not named, for it may be gone in part."""
        whole, settings = self._whole | {cursor.step: cursor.validation_loss}, self._settings
        gone = superfluous([*whole], scores(whole), settings.keep_last, settings.keep_best, settings.keep_every)
        return [(step, loss) for step, loss in sorted(whole.items()) if step not in {*gone, cursor.step}]

    def _on_rank_0(self, action: Callable[[], Any]) -> None:
        """Runs `action` on rank 0; an error there is raised on every rank."""
        error: str | None = None
        if self._rank == 0:
            try:
                action()
            except Exception as failure:
                error = str(failure) or type(failure).__name__
        failed = from_rank_0(error, self._group)
        if failed is not None:
            raise OSError(failed)

    def choose(self) -> Cursor | None:
        """The cursor of the newest checkpoint that holds; a bad one is set aside and the one before is tried. None where there is none.

        All ranks call it together; each checks a part of the files' checksums, before anything is unpickled.
        """
        steps = from_rank_0(self._retried(lambda: saved_steps(self._checkpoints)) if self._rank == 0 else None, self._group)
        for step in reversed(steps):
            folder = self._checkpoints / folder_name(step)
            reason = self._refuse(folder)
            if reason is None:
                cursor = self._retried(lambda folder=folder: read_cursor(folder))  # type: ignore[misc]
                self._whole = known(cursor)
                return cursor
            if self._rank == 0:
                self._warn(f"checkpoint of step {step} is not used: {reason}")
        return None

    def load(self, state: State, cursor: Cursor) -> None:
        """Fills `state`'s tensors from the checkpoint that `choose` returned, whatever number of workers wrote it."""
        reader = ShardReader(self._checkpoints / folder_name(cursor.step))

        def load() -> None:
            try:
                dcp.load(state, storage_reader=reader, process_group=self._group)
            except CheckpointException as failure:  # raised on all ranks alike, so all try again together
                raise OSError(_root_cause(failure)) from failure

        self._retried(load)

    def _refuse(self, folder: Folder) -> str | None:
        """Why a checkpoint cannot be used, the same on all ranks; one with wrong bytes is set aside.

        Raises OSError where only some workers can read it: that is their storage's fault, and says nothing of the checkpoint.
        """
        reason, damaged = None, False
        try:
            files = self._retried(lambda: read_manifest(folder))["files"]
            reason = self._retried(lambda: wrong_checksum(folder, sorted(files)[self._rank :: self._world], files))
            damaged = reason is not None
        except (CheckpointError, OSError) as error:
            reason = str(error)
        found: list[Any] = [None] * self._world
        dist.all_gather_object(found, (reason, damaged), group=self._group)
        wrong = next((r for r, damaged in found if damaged), None)
        if wrong is not None:
            if self._rank == 0:
                set_aside(folder, wrong)
            return wrong
        unreadable = [(rank, r) for rank, (r, _) in enumerate(found) if r is not None]
        if unreadable and len(unreadable) < self._world:
            rank, why = unreadable[0]
            raise OSError(f"{folder.uri} can be read by {self._world - len(unreadable)} of {self._world} workers, but not by worker {rank} ({why}); run.path must be on storage that all nodes share")
        return found[0][0]

    def _retried(self, action: Callable[[], Any]) -> Any:
        return retried(action, self._settings.retries, on_retry=lambda n, e: self._warn(f"reading checkpoints: {e}; try {n + 1}"))


def check_all_there(folder: Folder, sums: dict[str, tuple[int, str]]) -> None:
    """Raises OSError where a file that another worker has written is not seen from here: then no restart could read it either."""
    there = dict(folder.files())
    lost = next((name for name, (size, _) in sums.items() if there.get(name) != size), None)
    if lost is not None:
        raise OSError(f"{folder.uri}/{lost}: another worker has written it, but it is not seen here; run.path must be on storage that all nodes share")


def from_rank_0(value: Any, group: dist.ProcessGroup) -> Any:
    """Rank 0's value, on every rank of a gloo group; all call it together."""
    box = [value]
    dist.broadcast_object_list(box, group_src=0, group=group)
    return box[0]


def _root_cause(failure: BaseException) -> str:
    """The first line that says what went wrong, not DCP's wrapping of it."""
    if isinstance(failure, CheckpointException) and failure.failures:
        rank, wrapped = next(iter(failure.failures.items()))
        cause = wrapped[0] if isinstance(wrapped, tuple) else wrapped
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(failure).__name__}: {failure}" if not isinstance(failure, OSError) else str(failure)
