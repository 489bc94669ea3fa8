"""An evaluation in MLflow: its measures as metrics at the checkpoint's step, its files as artifacts, in the run that trained the model.

A model without such a run gets one of its own, which `EVALUATION/mlflow.json` names, so that another evaluation of it goes there too.
"""

from __future__ import annotations

import json
import time
from typing import Any

from raytune70b.config import UserError
from raytune70b.evaluation.job import Evaluated, measures
from raytune70b.export.card import FACTS
from raytune70b.schema import Config
from raytune70b.storage import Folder
from raytune70b.tracking.mlflow import IDS, experiment_id, is_there, tracking_uri

FILES = ("page.html", "results.json", "answers.jsonl")
METRICS_PER_REQUEST = 900


def track(config: Config, evaluated: Evaluated) -> None:
    """Logs to the model's MLflow run, or to a run of its own for a model without one. Raises UserError; the files are written already."""
    uri = tracking_uri(config)
    if uri is None:
        return
    try:
        _log(config, evaluated, uri)
    except Exception as error:  # whatever the server or its client raises
        raise UserError(f"tracking.mlflow: the results are in {evaluated.compared.home.uri}, but MLflow at {uri} did not take them: {str(error).splitlines()[0]}") from error


def _log(config: Config, evaluated: Evaluated, uri: str) -> None:
    from mlflow import MlflowClient

    client, origin = MlflowClient(tracking_uri=uri), _origin(evaluated)
    trained: str | None = origin.get("mlflow", {}).get(uri)
    if trained is not None and is_there(client, trained):
        _log_to(client, trained, evaluated, int(origin.get("step", 0)))
        return
    run_id = _own_run(client, config, evaluated, uri)
    try:
        _log_to(client, run_id, evaluated, int(origin.get("step", 0)))
    except Exception:
        client.set_terminated(run_id, "FAILED")
        raise
    client.set_terminated(run_id, "FINISHED")


def _log_to(client: Any, run_id: str, evaluated: Evaluated, step: int) -> None:
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    metrics = [Metric(_allowed(name), value, now, step) for name, value in measures(evaluated.rows, evaluated.public).items()]
    for start in range(0, len(metrics), METRICS_PER_REQUEST):
        client.log_batch(run_id, metrics=metrics[start : start + METRICS_PER_REQUEST])
    for name in FILES:
        client.log_text(run_id, evaluated.compared.home.read(name).decode(), f"evaluation/{name}")


def _origin(evaluated: Evaluated) -> dict[str, Any]:
    """What the tuned model's folder says about the run that trained it."""
    folder = Folder(evaluated.compared.folders["tuned"])
    return json.loads(folder.read(FACTS))["run"] if folder.size(FACTS) is not None else {}


def _own_run(client: Any, config: Config, evaluated: Evaluated, uri: str) -> str:
    """The MLflow run of earlier evaluations of this model, or a new one."""
    home = evaluated.compared.home
    known: dict[str, str] = json.loads(home.read(IDS)) if home.size(IDS) is not None else {}
    if uri in known and is_there(client, known[uri]):
        return known[uri]
    run_id: str = client.create_run(experiment_id(client, config), run_name=f"evaluation of {evaluated.compared.title}").info.run_id
    home.write(IDS, json.dumps({**known, uri: run_id}).encode())
    return run_id


def _allowed(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_-./ :" else "_" for c in name)[:250]
