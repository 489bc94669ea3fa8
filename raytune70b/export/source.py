"""A run folder as an export and an evaluation see it: its settings, a whole checkpoint, its data set and its history."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from raytune70b.blocks.manifest import Manifest, read_manifest
from raytune70b.config import UserError
from raytune70b.model.fingerprint import base_fingerprint
from raytune70b.schema import Config
from raytune70b.storage import Folder
from raytune70b.tracking.journal import Record, lineage, read_journal
from raytune70b.training.checkpoint import (
    CheckpointError,
    Cursor,
    folder_name,
    is_whole,
    read_cursor,
    scores,
    whole_checkpoints,
    wrong_checksum,
)
from raytune70b.training.checkpoint import read_manifest as read_checkpoint


@dataclass(frozen=True)
class Trained:
    """A checkpoint of a run, with all that it takes to rebuild the model."""

    config: Config
    run: Folder
    checkpoint: Folder
    cursor: Cursor
    data: Folder
    manifest: Manifest
    journal: list[Record]

    @property
    def losses(self) -> dict[str, float]:
        """The losses of the run's history up to this checkpoint."""
        steps = [r for r in lineage(self.journal, "step") if r["step"] <= self.cursor.step]
        validations = [r for r in lineage(self.journal, "validation") if r["step"] <= self.cursor.step]
        found = {f"training loss, step {r['step']}": r["loss"] for r in (steps[:1] + steps[-1:]) if r["loss"] is not None}
        return found | {f"validation loss, step {r['step']}": r["loss"] for r in (validations[:1] + validations[-1:])}

    @property
    def mlflow_runs(self) -> dict[str, str]:
        """MLflow tracking URI -> run id."""
        return json.loads(self.run.read("mlflow.json"))["runs"] if self.run.size("mlflow.json") is not None else {}


def open_run(config: Config, which: int | str) -> Trained:
    """The run of `run.path`/`run.name` at its newest or best checkpoint, or that of a step; checksums are compared. Raises UserError."""
    run = Folder(config.run.path) / config.run.name
    checkpoint = choose_checkpoint(run, which)
    files = read_checkpoint(checkpoint)["files"]
    wrong = wrong_checksum(checkpoint, sorted(files), files)
    if wrong is not None:
        raise CheckpointError(f"{wrong}; export another one by export.checkpoint=STEP: {list(whole_checkpoints(run / 'checkpoints'))}")
    cursor = read_cursor(checkpoint)
    data = Folder(config.data.path)
    manifest = read_manifest(data)
    if cursor.data != manifest.digest:
        raise UserError(f"data.path: {data.uri} is not the data set that {run.uri} was trained on (digest {manifest.digest}, the checkpoint says {cursor.data}); give data.path=FOLDER")
    check_base(config, cursor)
    return Trained(on_a_cpu(config), run, checkpoint, cursor, data, manifest, read_journal(run))


def on_a_cpu(config: Config) -> Config:
    """The run's settings where its model is rebuilt: flash attention, which a run may insist on, works on GPUs only."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, attention="auto"))


def choose_checkpoint(run: Folder, which: int | str) -> Folder:
    """The folder of a whole checkpoint. Raises UserError."""
    checkpoints = run / "checkpoints"
    whole = whole_checkpoints(checkpoints)
    steps = list(whole)
    if not steps:
        raise UserError(f"{run.uri}: has no checkpoint; train it with jobs/finetune.py run.name={run.name}, or give another run folder")
    if which == "newest":
        return checkpoints / folder_name(steps[-1])
    if which == "best":
        losses = scores(whole)
        best = next((s for s in sorted(losses, key=lambda s: (losses[s], -s)) if is_whole(checkpoints, s)), None)
        if best is None:
            raise UserError(f"export.checkpoint: is best, but no checkpoint of {run.uri} has a validation loss; use newest, or one of {steps}")
        return checkpoints / folder_name(best)
    if which not in steps or not is_whole(checkpoints, int(which)):
        raise UserError(f"export.checkpoint: {run.uri} has no whole checkpoint of step {which}; it has {steps}")
    return checkpoints / folder_name(int(which))


def check_base(config: Config, cursor: Cursor) -> None:
    """Raises UserError where `model.path` holds other weights than the run was started with."""
    trained = cursor.fingerprint.get("base")
    if config.model.path is None or trained is None:
        return
    base = Folder(config.model.path)
    if base.size("config.json") is None:
        raise UserError(f"model.path: {base.uri} holds no config.json; give model.path=FOLDER of the base that the run was started with")
    found = base_fingerprint(base)
    if found != trained:
        raise UserError(f"model.path: {config.model.path} is not the base that the run was started with (fingerprint {found}, the checkpoint says {trained}); give model.path=FOLDER")


def describe_lineage(lineage: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A manifest's lineage as flat rows."""
    rows: dict[str, Any] = {}
    for name, value in lineage.items():
        label = f"{prefix}{name}"
        if isinstance(value, dict):
            rows |= describe_lineage(value, f"{label}: ")
        else:
            rows[label] = value
    return rows
