"""Registers an export in MLflow: a version of a registered model, from the run that trained it, with its lineage as tags.

MLflow stores a copy of the folder, so `mlflow.transformers.load_model("models:/NAME/VERSION")` works wherever its artifacts are.
"""

from __future__ import annotations

from raytune70b.config import UserError
from raytune70b.export.job import Exported
from raytune70b.schema import Config
from raytune70b.tracking.mlflow import tracking_uri


def register(config: Config, exported: Exported) -> str | None:
    """`models:/NAME/VERSION`; None where `export.register` or `tracking.mlflow` is empty. Raises UserError."""
    uri, name = tracking_uri(config), config.export.register
    if uri is None or not name:
        return None
    if exported.folder.local is None:
        raise UserError(f"export.register: MLflow takes local folders, the export is at {exported.folder.uri}; it is published, use export.register=null")
    import mlflow

    name = config.run.name if name == "auto" else name
    try:
        mlflow.set_tracking_uri(uri)
        mlflow.set_registry_uri(uri)
        with mlflow.start_run(run_id=exported.facts["run"]["mlflow"].get(uri)):
            logged = mlflow.transformers.log_model(str(exported.folder.local), name="model", task="text-generation", registered_model_name=name)
        version = logged.registered_model_version
        for key, value in _tags(exported).items():
            mlflow.MlflowClient().set_model_version_tag(name, version, key, value)
    except Exception as error:  # whatever the server or its client raises
        raise UserError(f"export.register: the export is at {exported.folder.uri}, but MLflow at {uri} did not take it: {str(error).splitlines()[0]}") from error
    return f"models:/{name}/{version}"


def _tags(exported: Exported) -> dict[str, str]:
    values = exported.facts
    return {
        "data_digest": values["data"]["digest"], "run_folder": values["run"]["folder"], "step": str(values["run"]["step"]),
        "method": values["method"]["method"], "dtype": values["export"]["dtype"], "logit_error": str(values["checks"]["logit_error"]),
    }  # fmt: skip
