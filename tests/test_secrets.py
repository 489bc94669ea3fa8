"""Secrets stay out of settings, and so out of everything that stores or shows settings."""

import json

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
TOKENS = [  # each with a secret that is called hunter2 where its form allows it
    "https://hunter2@host", "http://hunter2@host:5000", "https:/hunter2@host", "https://anna:hunter2@host/x", "https://:hunter2@host", "https://anna%3Ahunter2@host",
    "postgresql://anna:hunter2@db:5432/mlflow", "mysql+pymysql://root:hunter2@db/x", "redis://:hunter2@cache:6379/0", "s3://AKIA123:hunter2@bucket", "ftp://anna:hunter2@host",
    "git+https://hunter2@host/repo.git", "mongodb+srv://anna:hunter2@host/db", "amqp://guest:hunter2@queue", "sftp://anna:hunter2@host:22/x", "s3:/key:hunter2@bucket/x",
    *(f"https://host/x?{name}=hunter2" for name in (
        "key", "pwd", "pass", "password", "passwd", "auth", "token", "access_token", "auth_token", "api-key", "api_key", "apikey", "apiKey", "X-Api-Key", "private_key",
        "private-key", "secret", "client_secret", "secret_key", "credential", "credentials", "X-Amz-Credential", "X-Amz-Signature", "sig", "signature", "access_key",
        "access_key_id", "account_key", "refresh_token", "id_token", "oauth", "authorization", "jwt", "sas", "db_pass", "passphrase", "subscription-key", "sslpassword")),
    "https://host/x?region=eu&token=hunter2", "https://host/x?a=1;sig=hunter2", "https://host/x#token=hunter2", "https://host/#access_token=hunter2&state=1",
    "abfs://box@account.example/x?sig=hunter2", "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=hunter2==;EndpointSuffix=core", "AccountKey=hunter2==",
    "SharedAccessSignature=hunter2", "host=db user=anna password=hunter2", "password=hunter2",
    "hf_" + "aBcDeFgHiJ" * 3, "s3://bucket/hf_" + "aBcDeFgHiJ" * 3, "ghp_" + "a1B2c3D4e5" * 4, "github_pat_" + "11ABCDEFG0_abcdefghij", "glpat-" + "a1B2c3D4e5" * 2,
    "AKIAIOSFODNN7EXAMPLE", "s3://ASIAIOSFODNN7EXAMPLE@bucket", "sk-proj-" + "a1B2c3D4e5" * 3, "xoxb-" + "123456789012-abcdef", "dapi" + "0123456789abcdef" * 2,
    "AIza" + "SyA1b2C3d4E5" * 3, "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl", "-----BEGIN RSA PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----",
]  # fmt: skip
PLAIN = [
    "s3://bucket/runs?endpoint_override=127.0.0.1:9000&scheme=http", "http://127.0.0.1:5000", "postgresql://anna@db.example:5432/mlflow", "mysql://anna@db/x",
    "sqlite:////shared/runs/mlflow.db", "runs/a:b@c", "http://host:5000/x@y", "s3://bucket/tokens=4096/x@y:z", "abfs://container@account.dfs.core.windows.net/x",
    "ssh://git@host/repo.git", "sftp://anna@host:22/x", "git@host:team/repo.git", "anna@firm.example", "gs://bucket/key/a.jsonl", "s3://bucket/password/a.jsonl",
    *(f"https://host/x?{name}=4096" for name in (
        "tokens", "max_tokens", "tokenizer", "author", "authority", "keys", "keyword", "keyboard", "monkey", "partition_key", "sort_key", "passage", "bypass", "passes",
        "compass", "secretary", "signal", "signatures", "sigma", "assign", "design", "credentialed", "passwordless", "token_type", "key_size", "pass_through", "authors",
        "keyspace", "oauth_version", "api_keys_url", "sasl", "jwt_issuer", "password_policy", "secret_santa", "region", "scheme")),
    "data/key=1/a.parquet", "data/token=4/b.parquet", "data/auth=none/x", "runs/pass=2", "key=value", "https://host/#section=2", "https://host/x#key-figures",
    "hf_models/llama", "hf_transformers", "models/hf_export", "ghp_notes", "AKIA", "AKIA-notes", "sk-learn", "scikit-learn", "dapi", "eyJ", "xoxb", "task-12", "risk-analysis-of-contracts-2024",
    "-----BEGIN CERTIFICATE-----", "-----BEGIN PUBLIC KEY-----", "the password is not here", "user=anna host=db", "AccountName=firm",
]  # fmt: skip


def test_there_are_enough_of_both():
    assert len(set(TOKENS)) >= 60 and len(set(PLAIN)) >= 60


@pytest.mark.parametrize("value", TOKENS)
def test_the_well_known_forms_of_a_secret_are_refused(value):
    assert secret_in({"a": [value]}) == value
    assert "hunter2" not in masked(value) and "***" in masked(value)
    with pytest.raises(ConfigError, match="carries a secret") as refused:
        compose([f"data.inputs=[{json.dumps(value)}]"])
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(("key", "value", "way"), SECRETS)
def test_a_setting_with_a_secret_is_refused_without_repeating_it(key, value, way):
    with pytest.raises(ConfigError) as refused:
        compose([f"{key}={value}"])
    text = str(refused.value)
    assert text.startswith(f"{key}: ") and way in text and "hunter2" not in text and "\n" not in text


@pytest.mark.parametrize("value", PLAIN)
def test_other_addresses_are_taken(value):
    assert secret_in([{"x": value}]) is None and masked(value) == value
    assert compose([f"data.inputs=[{json.dumps(value)}]"]).data.inputs == [value]


@pytest.mark.parametrize(
    "argument", ["tracking.mlfow=https://anna:hunter2@host", "run.path=s3://anna:hunter2@bucket", "s3://anna:hunter2@bucket/file.yaml"]
)
def test_no_error_line_repeats_it(argument, capsys):
    assert main_with_clear_errors("", (), lambda config: 0, [argument]) == 2
    err = capsys.readouterr().err
    assert "hunter2" not in err and "***" in err
