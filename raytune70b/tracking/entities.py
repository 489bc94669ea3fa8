"""What MLflow is given of a run: its settings as parameters, records as metrics, token blocks as a data set, a description."""

from __future__ import annotations

import json
import re
from typing import Any

from raytune70b.storage import Folder
from raytune70b.tracking.series import Point

LONGEST_VALUE = 6000
"""Characters of a parameter; MLflow 3 cuts longer ones without a word."""


def parameters(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as MLflow parameters: dotted names of allowed characters, values as text of any length."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            flat |= parameters(value, key + ".")
        else:
            flat[re.sub(r"[^\w./: -]", "_", key, flags=re.ASCII)[:250]] = value if isinstance(value, str) and value else json.dumps(value, default=str)
    return flat


def shortened(flat: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Parameters that MLflow keeps whole, and the full texts of those that had to be cut, by artifact name."""
    cut = {key: f"parameters/{key.replace('/', '_')}.txt" for key, value in flat.items() if len(value) > LONGEST_VALUE}
    short = {k: v if k not in cut else v[: LONGEST_VALUE - len(cut[k]) - 20] + f" ... (full: {cut[k]})" for k, v in flat.items()}
    return short, {artifact: flat[key] for key, artifact in cut.items()}


def note(run: Folder, checkpoints: dict[int, str]) -> str:
    """The MLflow run's description, in Markdown: where the run lies, and links to its newest checkpoints by step."""
    lines = [f"- [step {step}]({_link(path)}) `{path}`" for step, path in sorted(checkpoints.items())[-20:]]
    return "\n".join([f"Run folder [{run.name}]({_link(run.uri)}) `{run.uri}`", "", "Checkpoints:", *lines])[:5000]


def _link(path: str) -> str:
    return path if "://" in path else f"file://{path}"


def metrics(p: Point) -> list[Any]:
    """A point as MLflow metrics."""
    from mlflow.entities import Metric

    return [Metric(name, value, p.milliseconds, p.step) for name, value in p.values.items()]


def dataset(data: dict[str, Any]) -> Any:
    """The token blocks as an MLflow dataset input: `digest` names their content, `source` where they lie, the rest is the profile."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    profile = {k: v for k, v in data.items() if k not in ("digest", "source", "name")}
    source = str(data["source"])
    entity = Dataset(
        name=str(data.get("name") or source.rstrip("/").rsplit("/", 1)[-1])[:500], digest=str(data["digest"])[:36],
        source_type="local" if "://" not in source else source.split("://", 1)[0], source=json.dumps({"uri": source}), profile=json.dumps(profile, default=str),
    )  # fmt: skip
    return DatasetInput(entity, [InputTag("mlflow.data.context", "training")])
