"""Checkpoints: whole or absent, checked before anything is unpickled, loadable by any number of workers.

`checkpoints/step-00001000/` holds DCP shards, `cursor.json` (where the run stands) and `manifest.json`, which lists size
and xxh3 of every other file and is published last, in one atomic step: a folder without a valid manifest does not exist.
This module holds what needs no process group: the cursor, the state of a folder, retention. `saver.py` writes and loads.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from raytune70b.config import UserError
from raytune70b.storage import Folder

MANIFEST, CURSOR, BAD = "manifest.json", "cursor.json", "bad.json"
FALLBACKS = 2
"""The newest checkpoints, which retention opens each time: one of them that was damaged since must not take the place of a whole one."""


class CheckpointError(UserError):
    """A checkpoint that cannot be used or made."""


@dataclass
class Cursor:
    """Where a run stands after `step` optimizer steps; all that a resumed run needs beside the tensors.

    There is no random generator state: dropout is seeded from (seed, step, micro-batch), so it is the same at any world size.
    """

    step: int = 0
    trained_tokens: int = 0
    tokens: int = 0
    world_size: int = 0
    """Workers that wrote the checkpoint."""
    recent_losses: list[float] = field(default_factory=list)
    bad_in_a_row: int = 0
    validation_loss: float | None = None
    """Of this very step, where it was measured."""
    ledger: str | None = None
    """The newest ledger segment."""
    seed: int = 0
    data: str = ""
    """Digest of the data set's manifest."""
    fingerprint: dict[str, Any] = field(default_factory=dict)
    """The settings that must not change when the run is resumed."""
    mlflow_run_id: str | None = None
    kept: list[tuple[int, float | None]] = field(default_factory=list)
    """The whole checkpoints that stay beside this one, as (step, validation loss): who looks for them later need not open each."""


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def saved_steps(checkpoints: Folder) -> list[int]:
    """The steps that have a folder, sorted by number, whole or not."""
    names = [n.removeprefix("step-") for n in checkpoints.names() if n.startswith("step-")]
    return sorted(int(n) for n in names if n.isdigit())


def read_manifest(folder: Folder) -> dict[str, Any]:
    """A checkpoint's manifest. Raises CheckpointError where it is missing, damaged, set aside or its files' sizes differ."""
    sizes = dict(folder.files())
    if BAD in sizes:
        raise CheckpointError(f"{folder.uri}: set aside: {json.loads(folder.read(BAD))['reason']}")
    if MANIFEST not in sizes:
        raise CheckpointError(f"{folder.uri}: it was never published ({MANIFEST} is missing)")
    try:
        manifest = json.loads(folder.read(MANIFEST))
        files = {name: (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder.uri}/{MANIFEST}: damaged ({error})") from error
    for name, (size, _) in files.items():
        if sizes.get(name) != size:
            raise CheckpointError(f"{folder.uri}/{name}: {'missing' if name not in sizes else f'{sizes[name]} bytes'}, the manifest says {size}")
    return {**manifest, "files": files}


def wrong_checksum(folder: Folder, names: list[str], files: dict[str, tuple[int, str]]) -> str | None:
    """The first of `names` whose bytes are not those of the manifest, with both checksums; None when all are right."""
    for name in names:
        digest = folder.checksum(name)
        if digest != files[name][1]:
            return f"{folder.uri}/{name}: checksum {digest}, the manifest says {files[name][1]}"
    return None


def read_cursor(folder: Folder) -> Cursor:
    return parse_cursor(folder.read(CURSOR))


def parse_cursor(content: bytes) -> Cursor:
    values = json.loads(content)
    return Cursor(**{**values, "kept": [(step, loss) for step, loss in values.get("kept", ())]})


def whole_cursor(folder: Folder) -> Cursor:
    """The cursor of a whole checkpoint: sizes are compared, and the cursor's own checksum. Raises CheckpointError."""
    try:
        files = read_manifest(folder)["files"]
        if CURSOR not in files:
            raise CheckpointError(f"{folder.uri}/{MANIFEST}: damaged ({CURSOR} is missing)")
        content = folder.read(CURSOR)
    except FileNotFoundError as error:  # a run that goes on has just removed it
        raise CheckpointError(f"{folder.uri}: is gone ({error})") from error
    digest = xxhash.xxh3_128_hexdigest(content)
    if digest != files[CURSOR][1]:
        raise CheckpointError(f"{folder.uri}/{CURSOR}: checksum {digest}, the manifest says {files[CURSOR][1]}")
    return parse_cursor(content)


def is_whole(checkpoints: Folder, step: int) -> bool:
    try:
        whole_cursor(checkpoints / folder_name(step))
    except CheckpointError:
        return False
    return True


def newest(checkpoints: Folder) -> Cursor | None:
    """The cursor of the newest whole checkpoint (the shards' sizes are compared, their checksums are not)."""
    return _newest(checkpoints, saved_steps(checkpoints))


def _newest(checkpoints: Folder, steps: list[int]) -> Cursor | None:
    for step in reversed(steps):
        try:
            return whole_cursor(checkpoints / folder_name(step))
        except CheckpointError:
            continue
    return None


Losses = dict[int, float | None]
"""Step -> validation loss of whole checkpoints, None where it was not measured; sorted by number."""


def whole_checkpoints(checkpoints: Folder) -> Losses:
    """Every whole checkpoint. Those that the newest one names are taken at its word as long as they are there: check one before it is used."""
    steps = saved_steps(checkpoints)
    cursor = _newest(checkpoints, steps)
    return looked_up(checkpoints, steps, known(cursor)) if cursor else {}


def known(cursor: Cursor) -> Losses:
    """What a published checkpoint says of itself and those beside it."""
    return {**dict(cursor.kept), cursor.step: cursor.validation_loss}


def looked_up(checkpoints: Folder, steps: list[int], known: Losses) -> Losses:
    """The whole ones of these steps; those that are not known are opened."""
    whole: Losses = {}
    for step in steps:
        try:
            whole[step] = known[step] if step in known else whole_cursor(checkpoints / folder_name(step)).validation_loss
        except CheckpointError:
            continue
    return whole


def scores(whole: Losses) -> dict[int, float]:
    """The checkpoints that have a validation loss; one that is no number is none."""
    return {step: loss for step, loss in whole.items() if loss is not None and math.isfinite(loss)}


def set_aside(folder: Folder, reason: str) -> None:
    """Marks a checkpoint as unusable; its files stay for inspection until retention removes them."""
    folder.write(BAD, json.dumps({"reason": reason}).encode())


def cursor_bytes(cursor: Cursor) -> bytes:
    return json.dumps(asdict(cursor), indent=1).encode()


def superfluous(whole: list[int], losses: dict[int, float], keep_last: int, keep_best: int, keep_every: int) -> list[int]:
    """The whole checkpoints that may go: not among the last k, the best by validation loss, or multiples of n. Never the newest."""
    best = sorted((s for s in whole if s in losses), key=lambda s: (losses[s], -s))[:keep_best]
    keep = {*sorted(whole)[-max(1, keep_last) :], *best, *(s for s in whole if keep_every and s % keep_every == 0)}
    return [s for s in sorted(whole) if s not in keep]


def prune(checkpoints: Folder, known: Losses, keep_last: int, keep_best: int, keep_every: int) -> Losses:
    """Deletes superfluous and unpublished checkpoints older than the newest whole one; returns the whole ones that are left.

    Call it after a commit only. One listing, and some calls for each of the newest, of those that are not known, and of those that go.
    A manifest is deleted first, so that a half-deleted folder does not exist.
    """
    steps = saved_steps(checkpoints)
    opened = [s for s in steps if s in known][-FALLBACKS:]
    whole = looked_up(checkpoints, steps, {s: loss for s, loss in known.items() if s not in opened})
    if not whole:
        return {}
    unpublished = [s for s in steps if s not in whole and s < max(whole)]
    gone = {*superfluous([*whole], scores(whole), keep_last, keep_best, keep_every), *unpublished}
    for step in sorted(gone):
        folder = checkpoints / folder_name(step)
        folder.delete(MANIFEST)
        folder.delete()
    return {step: loss for step, loss in whole.items() if step not in gone}
