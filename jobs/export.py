"""Exports a run's checkpoint as a checked Hugging Face model folder: safetensors, config, tokenizer, model card.

    python jobs/export.py [RUN] [key=value ...]
    python jobs/export.py runs/default export.path=models/legal export.dtype=bf16 export.checkpoint=best

RUN is a run folder (path or URI); without one, that of run.path and run.name. LoRA and QLoRA runs give the merged model and,
in `adapter/`, the adapters alone. A failed check is an error and publishes nothing.

exit codes: 0 exported and checked; 1 failed; 2 wrong input or configuration, or a check that failed; 75 stopped by SIGTERM.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout or an uploaded copy, installed or not

from raytune70b import cpus
from raytune70b.config import main_with_clear_errors
from raytune70b.places import check_places
from raytune70b.runs import run_arguments
from raytune70b.schema import Config
from raytune70b.storage import Folder


def main(config: Config) -> int:
    target = Folder(config.export.path or f"{config.run.path}/{config.run.name}/export")
    check_places(config, "export.path", Folder(target.uri.rsplit("/", 1)[0] or "/"), ray=False)  # the folder is made beside its place
    from raytune70b.export.job import export_run, summary
    from raytune70b.export.registry import register

    cpus.take_all()
    exported = export_run(config)
    print(summary(exported), flush=True)
    version = register(config, exported)
    if version is not None:
        print(f"  registered as {version}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main_with_clear_errors(__doc__ or "", ("export", "run", "data", "model", "tracking"), main, expand=run_arguments))
