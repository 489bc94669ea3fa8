"""Keeps passwords out of settings, for settings are stored with the run, logged, sent to MLflow and shown in the report.

A secret in a URI is refused instead of masked: what is never taken in cannot leak from any of those places. The libraries that
open the URIs take secrets from the environment or from files of their own, which nothing here reads or writes down.
"""

from __future__ import annotations

import re
from typing import Any

SECRET = re.compile(
    r"(?:(?<=://)|(?<=\w:/))[^/\s@?#]*:(?!\d+/)[^\s@]+(?=@)|(?<=[?&])(?:[a-z_.-]*(?:password|passwd|secret|secret_key|token|access_key|api_?key|signature|sig))=[^&\s]+",
    re.IGNORECASE,
)
"""user:password before the host of a URI (also of one that was made a path and lost a slash), and query parameters that name a secret."""

WAYS = (
    ("s3", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials"),
    ("gs", "GOOGLE_APPLICATION_CREDENTIALS"),
    ("abfs", "AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY"),
    ("postgresql", "PGUSER and PGPASSWORD, or ~/.pgpass"),
    ("mysql", "an option file, ~/.my.cnf"),
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
