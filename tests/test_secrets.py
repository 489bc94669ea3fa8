"""Secrets stay out of settings, and so out of everything that stores or shows settings."""

import pytest

from raytune70b.config import ConfigError, compose, main_with_clear_errors
from raytune70b.secrets import masked, secret_in

SECRETS = [
    ("tracking.mlflow", "postgresql://anna:hunter2@db.example/mlflow", "PGPASSWORD"),
    ("tracking.mlflow", "https://anna:hunter2@mlflow.example", "MLFLOW_TRACKING_PASSWORD"),
    ("tracking.mlflow", "https://mlflow.example/?access_token=hunter2", "MLFLOW_TRACKING_TOKEN"),
    ("run.path", "s3://AKIA123:hunter2@bucket/runs", "AWS_SECRET_ACCESS_KEY"),
    ("run.path", "s3://AKIA123:wJal/hunter2/K7@bucket/runs", "AWS_SECRET_ACCESS_KEY"),
    ("run.path", "s3://bucket/runs?secret_key=hunter2", "AWS_SECRET_ACCESS_KEY"),
    ("run.path", "s3://bucket/runs?region=x&secret_key_or_token=a&secret=hunter2", "AWS_SECRET_ACCESS_KEY"),
    ("export.path", "abfs://box:hunter2@account.example/x", "AZURE_STORAGE_KEY"),
    ("data.inputs", "[a.jsonl,'s3://k:hunter2@bucket/b.jsonl']", "AWS_SECRET_ACCESS_KEY"),
]
PLAIN = [
    "s3://bucket/runs?endpoint_override=127.0.0.1:9000&scheme=http",
    "http://127.0.0.1:5000",
    "postgresql://anna@db.example:5432/mlflow",
    "sqlite:////shared/runs/mlflow.db",
    "runs/a:b@c",
    "http://host:5000/x@y",
    "s3://bucket/tokens=4096/x@y:z",
]


@pytest.mark.parametrize(("key", "value", "way"), SECRETS)
def test_a_setting_with_a_secret_is_refused_without_repeating_it(key, value, way):
    with pytest.raises(ConfigError) as refused:
        compose([f"{key}={value}"])
    text = str(refused.value)
    assert text.startswith(f"{key}: ") and way in text and "hunter2" not in text and "\n" not in text


@pytest.mark.parametrize("value", PLAIN)
def test_other_addresses_are_taken(value):
    assert secret_in([{"x": value}]) is None and masked(value) == value
    assert compose([f"run.path={value}", "tracking.mlflow=null"]).run.path == value


@pytest.mark.parametrize(
    "argument", ["tracking.mlfow=https://anna:hunter2@host", "run.path=s3://anna:hunter2@bucket", "s3://anna:hunter2@bucket/file.yaml"]
)
def test_no_error_line_repeats_it(argument, capsys):
    assert main_with_clear_errors("", (), lambda config: 0, [argument]) == 2
    err = capsys.readouterr().err
    assert "hunter2" not in err and "***" in err
