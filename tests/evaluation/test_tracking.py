import json
import types

import pytest
from mlflow import MlflowClient

from raytune70b.config import UserError, compose
from raytune70b.evaluation.job import Evaluated
from raytune70b.evaluation.public import Score
from raytune70b.evaluation.tracking import FILES, track
from raytune70b.export.card import FACTS
from raytune70b.storage import Folder
from raytune70b.tracking.mlflow import experiment_id


def evaluated(home, value):
    compared = types.SimpleNamespace(title="law", folders={"tuned": str(home.local.parent)}, home=home)
    return Evaluated(compared, None, {"tuned": None}, [], [Score("mmlu_law", "acc", "tuned", value, None, 10)], 1.0)


def test_a_model_without_a_run_gets_one_that_ends_and_takes_later_evaluations_too(tmp_path, monkeypatch):
    home = (Folder(tmp_path) / "model" / "evaluation").make()
    for name in FILES:
        home.write(name, b"{}")
    config = compose([f"tracking.mlflow=sqlite:///{tmp_path}/mlflow.db"])
    client = MlflowClient(config.tracking.mlflow)
    for value in (0.25, 0.5):
        track(config, evaluated(home, value))
    (run,) = client.search_runs([experiment_id(client, config)])
    assert run.info.status == "FINISHED" and set(run.data.metrics.values()) == {0.5}
    facts = {"run": {"mlflow": {config.tracking.mlflow: run.info.run_id}, "step": 7}}
    (Folder(tmp_path) / "model").write(FACTS, json.dumps(facts).encode())
    client.delete_run(run.info.run_id)
    monkeypatch.setattr(MlflowClient, "log_text", lambda *_: 1 / 0)
    with pytest.raises(UserError, match="did not take them"):
        track(config, evaluated(home, 0.75))
    (anew,) = client.search_runs([experiment_id(client, config)])
    assert anew.info.status == "FAILED" and anew.info.run_id != run.info.run_id, "the run that trained the model was deleted"
