"""Keeps passwords out of settings, for settings are stored with the run, logged, sent to MLflow and shown in the report.

A secret in a URI is refused instead of masked: what is never taken in cannot leak from any of those places. The libraries that
open the URIs take secrets from the environment or from files of their own, which nothing here reads or writes down.
"""

from __future__ import annotations

import re
from typing import Any

_NAMES = (
    r"(?:[\w.-]*(?:password|passwd|passphrase|secret|token|signature|private[_-]?key|api[_-]?key|access[_-]?key(?:[_-]?id)?|account[_-]?key|secret[_-]?key)"
    r"|(?:[\w.-]*[._-])?(?:pwd|pass|pw|o?auth|authorization|credentials?|sig|sas|jwt|bearer)|key|subscription[_-]key)"
)
"""Names of parameters that hold a secret, whole: `tokens=` and `author=` are none, `key=` is one and `partition_key=` is not."""

SECRET = re.compile(
    r"(?:(?<=://)|(?<=\w:/))[^/\s@?#]*:(?!\d+/)[^\s@]+(?=@)"  # user:password before the host of a URI, also of one that was made a path and lost a slash
    r"|(?:(?<=http://)|(?<=https://)|(?<=http:/)|(?<=https:/))[^/\s@?#]+(?=@)"  # a token in the user's place
    rf"|(?<=[?&#;]){_NAMES}=[^&\s#;]+"
    r"|(?:(?<=^)|(?<=\s))(?:password|passwd|pwd|secret|accountkey|sharedaccess(?:key|signature))=[^\s;]+"  # connection strings
    r"|\b(?:hf_[a-z0-9]{16,}|gh[opsur]_[a-z0-9]{16,}|github_pat_\w{20,}|glpat-[\w-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|sk-[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}|dapi[0-9a-f]{32}|AIza[\w-]{30,}|ya29\.[\w-]{20,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"  # tokens of well-known services
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----",
    re.IGNORECASE,
)
"""What may not stand in a setting."""

WAYS = (
    ("s3", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials"),
    ("gs", "GOOGLE_APPLICATION_CREDENTIALS"),
    ("abfs", "AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY"),
    ("postgresql", "PGUSER and PGPASSWORD, or ~/.pgpass"),
    ("mysql", "an option file, ~/.my.cnf"),
    ("hf_", "HF_TOKEN"),
    ("http", "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"),
)


def masked(text: str) -> str:
    """The text with every secret in a URI replaced by ***."""
    return SECRET.sub("***", text)


def way_out(text: str) -> str:
    """Where the secret of this URI belongs."""
    scheme = text.split("://", 1)[0].lower()
    return next((way for prefix, way in WAYS if scheme.startswith(prefix)), "the environment of its library")


def secret_in(value: Any) -> str | None:
    """The first text in a setting, however nested, that carries a secret."""
    if isinstance(value, str):
        return value if SECRET.search(value) else None
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next((found for v in inner if (found := secret_in(v))), None)
