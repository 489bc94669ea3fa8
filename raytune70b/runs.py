"""A run folder on a command line: `jobs/X.py RUN [key=value ...]` works with the settings that the run was started with."""

from __future__ import annotations

import tempfile
from pathlib import Path

from raytune70b.config import UserError, compose
from raytune70b.storage import Folder

SETTINGS = "config.yaml"


def run_arguments(arguments: list[str]) -> list[str]:
    """Replaces a leading run folder (path or URI; without one, that of run.path and run.name) by its settings.

    The folder's place wins over what the settings say, so a run that was moved is found. Raises UserError.
    """
    folders = [a for a in arguments if "=" not in a and not a.endswith((".yaml", ".yml"))]
    if len(folders) > 1:
        raise UserError(f"{folders[1]}: one run folder at a time, after {folders[0]}")
    rest = [a for a in arguments if a not in folders]
    if not folders and any("=" not in a for a in arguments):
        return arguments
    run = Folder(folders[0]) if folders else _default_run(rest)
    if not run.exists():
        raise UserError(f"{run.uri}: no such run folder; train one with jobs/finetune.py, or give the folder of a run")
    if run.size(SETTINGS) is None:
        raise UserError(f"{run.uri}: is not a run folder ({SETTINGS} is missing); it takes run.path/run.name of a run of jobs/finetune.py")
    parent = run.uri.rsplit("/", 1)[0] or "/"
    return [_local_settings(run), *rest, f"run.path={parent}", f"run.name={run.name}"]


def run_arguments_where_written(arguments: list[str]) -> list[str]:
    """As `run_arguments`, but a run of run.path and run.name that has no settings is taken by the command line's own: the damaged are verified too."""
    named = any("=" not in a for a in arguments)
    return run_arguments(arguments) if named or _default_run(arguments).size(SETTINGS) is not None else arguments


def _default_run(overrides: list[str]) -> Folder:
    config = compose(overrides)
    return Folder(config.run.path) / config.run.name


def _local_settings(run: Folder) -> str:
    if run.local is not None:
        return str(run.local / SETTINGS)
    with tempfile.NamedTemporaryFile(suffix=".yaml", delete=False) as copy:
        copy.write(run.read(SETTINGS))
    return str(Path(copy.name))


def run_or_model_arguments(arguments: list[str]) -> list[str]:
    """As `run_arguments`; a leading Hugging Face model folder becomes `evaluation.model`. Raises UserError."""
    folder = next((a for a in arguments if "=" not in a), None)
    if folder is not None and Folder(folder).size("config.json") is not None and Folder(folder).size(SETTINGS) is None:
        return [a for a in arguments if a != folder] + [f"evaluation.model={folder}"]
    return run_arguments(arguments)
