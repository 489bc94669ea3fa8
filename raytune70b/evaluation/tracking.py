"""An evaluation in MLflow: its measures as metrics at the checkpoint's step, its files as artifacts, in the run that trained the model."""

from __future__ import annotations

import json
import time
from typing import Any

from raytune70b.config import UserError
from raytune70b.evaluation.job import Evaluated, measures
from raytune70b.export.card import FACTS
from raytune70b.schema import Config
from raytune70b.storage import Folder
from raytune70b.tracking.mlflow import experiment_id, tracking_uri

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
    from mlflow.entities import Metric

    client, origin = MlflowClient(tracking_uri=uri), _origin(evaluated)
    run_id = origin.get("mlflow", {}).get(uri) or _new_run(client, config, evaluated)
    now, step = int(time.time() * 1000), int(origin.get("step", 0))
    metrics = [Metric(_allowed(name), value, now, step) for name, value in measures(evaluated.rows, evaluated.public).items()]
    for start in range(0, len(metrics), METRICS_PER_REQUEST):
        client.log_batch(run_id, metrics=metrics[start : start + METRICS_PER_REQUEST])
    for name in FILES:
        client.log_text(run_id, evaluated.compared.home.read(name).decode(), f"evaluation/{name}")


def _origin(evaluated: Evaluated) -> dict[str, Any]:
    """What the tuned model's folder says about the run that trained it."""
    folder = Folder(evaluated.compared.folders["tuned"])
    return json.loads(folder.read(FACTS))["run"] if folder.size(FACTS) is not None else {}


def _new_run(client: Any, config: Config, evaluated: Evaluated) -> str:
    return client.create_run(experiment_id(client, config), run_name=f"evaluation of {evaluated.compared.title}").info.run_id


def _allowed(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_-./ :" else "_" for c in name)[:250]
