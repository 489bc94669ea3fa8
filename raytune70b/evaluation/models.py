"""The model folders that an evaluation compares: what was trained, as it would be served, and what it started from."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from raytune70b.config import UserError
from raytune70b.export.card import FACTS
from raytune70b.export.folder import write_tokenizer
from raytune70b.export.job import export_run
from raytune70b.export.live import base_model
from raytune70b.export.source import Trained, choose_checkpoint, open_run
from raytune70b.model.fingerprint import base_fingerprint
from raytune70b.schema import Config
from raytune70b.storage import Folder

EVALUATION = "evaluation"


@dataclass(frozen=True)
class Compared:
    """Model name (tuned, base) -> its folder, and where results go."""

    folders: dict[str, Path]
    home: Folder
    title: str

    def fingerprints(self) -> dict[str, str]:
        return {name: base_fingerprint(Folder(folder)) for name, folder in self.folders.items()}


def compared(config: Config) -> Compared:
    """The folders to evaluate; a run's checkpoint is exported first, checks included. Raises UserError."""
    given = config.evaluation.model
    if given is not None:
        tuned, home, title = _folder(given, "evaluation.model"), Folder(given) / EVALUATION, Folder(given).name
        base = None
    else:
        run = Folder(config.run.path) / config.run.name
        tuned, home = tuned_folder(config, run), run / EVALUATION
        title, base = f"{run.name}, {tuned.name}", None if config.evaluation.base else base_folder
    folders = {"tuned": tuned}
    if config.evaluation.compare and config.evaluation.base:
        folders = {"base": _folder(config.evaluation.base, "evaluation.base"), **folders}
    elif config.evaluation.compare and base is not None:
        folders = {"base": base(config, home), **folders}
    return Compared(folders, home, title)


def _folder(path: str, key: str) -> Path:
    """A local model folder. Raises UserError."""
    folder = Folder(path).local
    if folder is None or not (folder / "config.json").is_file():
        raise UserError(f"{key}: {path} is not a local Hugging Face model folder (no config.json in it)")
    return folder


def tuned_folder(config: Config, run: Folder) -> Path:
    """The chosen checkpoint as a model folder: the run's export where it is of that checkpoint, else one made here."""
    checkpoint = choose_checkpoint(run, config.export.checkpoint)
    for candidate in (Folder(config.export.path) if config.export.path else run / "export", run / EVALUATION / checkpoint.name):
        if candidate.local is not None and candidate.size(FACTS) is not None:
            facts = json.loads(candidate.read(FACTS))["run"]
            if facts["checkpoint"] == checkpoint.name and facts["folder"] == run.uri:
                return candidate.local
    target = run / EVALUATION / checkpoint.name
    if target.local is None:
        raise UserError(f"{run.uri}: is not on a local disk; export it first: jobs/export.py {run.uri} export.path=FOLDER, then jobs/evaluate.py FOLDER")
    settings = dataclasses.replace(config.export, path=target.uri, overwrite=True)
    export_run(dataclasses.replace(config, export=settings))
    return target.local


def base_folder(config: Config, home: Folder) -> Path:
    """The model that the run started from: `model.path`, or its random weights, written once."""
    if config.model.path is not None:
        return _folder(config.model.path, "model.path")
    target = (home / "base").local
    assert target is not None
    if not (target / "config.json").is_file():
        _write_random_base(open_run(config, config.export.checkpoint), target)
    return target


def _write_random_base(trained: Trained, target: Path) -> None:
    from transformers.utils import logging

    plain = dataclasses.replace(trained.config, model=dataclasses.replace(trained.config.model, method="full", precision="fp32"))
    staging = target.with_name(f".{target.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    write_tokenizer(staging, trained.data, trained.manifest)
    logging.disable_progress_bar()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # accelerate imports DeepSpeed where it is installed, which else says that it found no GPU
    base_model(plain, trained.manifest.vocab_size).save_pretrained(staging)
    staging.rename(target)
