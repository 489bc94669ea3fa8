"""Registers an export in MLflow: a version of a registered model, from the run that trained it, with its lineage as tags.

The folder is uploaded as it is, file by file, and MLflow's description of it beside it, so that
`mlflow.transformers.load_model("models:/NAME/VERSION")` works wherever MLflow's artifacts are. (`mlflow.transformers.log_model`
loads a whole model into memory, and its way around that, from a local folder, fails with transformers 5.)
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from raytune70b.config import UserError
from raytune70b.export.job import Exported
from raytune70b.schema import Config
from raytune70b.tracking.mlflow import tracking_uri

ARTIFACT = "model"


def register(config: Config, exported: Exported) -> str | None:
    """`models:/NAME/VERSION`; None where `export.register` or `tracking.mlflow` is empty. Raises UserError; the export is published already."""
    uri, name = tracking_uri(config), config.export.register
    run_id = exported.facts["run"]["mlflow"].get(uri)
    if uri is None or run_id is None or not name:
        return None
    if exported.folder.local is None:
        raise UserError(f"export.register: MLflow takes local folders, the export is at {exported.folder.uri}; it is published, use export.register=null")
    name = config.run.name if name == "auto" else name
    try:
        version = _register(uri, run_id, name, exported.folder.local, _tags(exported))
    except Exception as error:  # whatever the server or its client raises
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"export.register: the export is at {exported.folder.uri}, but MLflow at {uri} did not take it: {first}") from error
    return f"models:/{name}/{version}"


def _register(uri: str, run_id: str, name: str, folder: Path, tags: dict[str, str]) -> str:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    with tempfile.TemporaryDirectory() as temporary:
        describe(folder, Path(temporary), run_id)
        client.log_artifacts(run_id, temporary, ARTIFACT)
    client.log_artifacts(run_id, str(folder), f"{ARTIFACT}/model")
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    source = f"{client.get_run(run_id).info.artifact_uri}/{ARTIFACT}"
    return str(client.create_model_version(name, source, run_id, tags=tags).version)


def describe(folder: Path, target: Path, run_id: str | None) -> None:
    """Writes what MLflow keeps beside a model's files: `MLmodel`, the tokenizer, requirements."""
    import transformers
    from mlflow.models import Model
    from mlflow.transformers.flavor_config import FlavorKey
    from transformers import AutoTokenizer

    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    tokenizer.save_pretrained(target / "components" / "tokenizer")
    described = Model(artifact_path=ARTIFACT, run_id=run_id)
    flavor = {
        FlavorKey.TASK: "text-generation", FlavorKey.INSTANCE_TYPE: "TextGenerationPipeline", FlavorKey.TORCH_DTYPE: f"torch.{config['dtype']}",
        FlavorKey.MODEL_TYPE: config["architectures"][0], FlavorKey.MODEL_NAME: folder.name, FlavorKey.MODEL_BINARY: "model",
        FlavorKey.COMPONENT_TYPE.format(FlavorKey.TOKENIZER): type(tokenizer).__name__, FlavorKey.COMPONENTS: [FlavorKey.TOKENIZER],
    }  # fmt: skip
    described.add_flavor("transformers", transformers_version=transformers.__version__, code=None, **flavor)
    described.save(str(target / "MLmodel"))
    (target / "requirements.txt").write_text(f"mlflow\ntransformers=={transformers.__version__}\ntorch\naccelerate\n")


def _tags(exported: Exported) -> dict[str, str]:
    values = exported.facts
    return {
        "data_digest": values["data"]["digest"], "run_folder": values["run"]["folder"], "step": str(values["run"]["step"]),
        "method": values["method"]["method"], "dtype": values["export"]["dtype"], "logit_error": str(values["checks"]["logit_error"]),
    }  # fmt: skip
