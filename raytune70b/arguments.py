"""Reads the words of a command line and the values of one layer of settings; what people mistype gets the line that would work.

A shell cuts at spaces and expands braces before a job sees anything, and YAML reads `{text:body}` as a key without a value: the
library's own error then speaks of something that the user did not write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from raytune70b.errors import ConfigError, first_line

PAIRS = ("cluster.workers", "claims.gpu_use_pct", "claims.memory_use_pct")
"""Lists of [least, most]: one number stands for both."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
CLOSING = {"[": "]", "{": "}"}

FOLDERS_OF_MODELS = {"model.path": "", "evaluation.model": "", "evaluation.base": "", "data.tokenizer": ' --include "*.json" --include "tokenizer*"'}
"""Settings that name a Hugging Face folder, and what to fetch of it."""


def split_arguments(arguments: list[str], is_key: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """The files and the `key=value` overrides of a command line. Raises ConfigError where a space has cut a setting."""
    for n, word in enumerate(arguments):
        key, equals, value = word.partition("=")
        after = [*arguments[n + 1 : n + 3], "", ""]
        bare = "" if "=" in after[0] or Path(after[0]).exists() or after[0].endswith((".yaml", ".yml")) else after[0]
        if is_key(key) and after[0].startswith("=") and not equals:
            raise ConfigError(f"{key} {after[0]}: no spaces around the =; write {key}={after[0][1:] or after[1] or 'VALUE'}")
        if is_key(key) and (not equals or (not value and bare)):
            raise ConfigError(f"{word} {bare}".rstrip() + f": a setting is one word; write {key}={bare or 'VALUE'}")
        if value[:1] in CLOSING and value.count(value[0]) > value.count(CLOSING[value[0]]) and not _is_yaml(value):
            rest = " ".join(arguments[n:])
            whole = rest[: (rest + CLOSING[value[0]]).index(CLOSING[value[0]]) + 1]
            raise ConfigError(f"{word}: a bracket is not closed; the shell cuts at spaces, so put the setting in quotes: '{whole}'")
    return [a for a in arguments if "=" not in a], [a for a in arguments if "=" in a]


def _is_yaml(text: str) -> bool:
    try:
        yaml.safe_load(text)
    except yaml.YAMLError:
        return False
    return True


def read_override(override: str) -> DictConfig:
    """One `key=value` as a layer of settings. Raises ConfigError."""
    try:
        return OmegaConf.from_dotlist([override])
    except Exception as error:
        raise ConfigError(f"{override}: not a key=value override ({first_line(error)})") from error


def read_file(path: Path) -> DictConfig:
    """The settings of a YAML file. Raises ConfigError."""
    try:
        layer = OmegaConf.load(path)
    except yaml.MarkedYAMLError as error:
        number = error.problem_mark.line if error.problem_mark else 0
        tab = "\t" in indent(path.read_text(errors="replace").splitlines(), number)
        raise ConfigError(f"{path}, line {number + 1}: " + ("a tab; YAML indents with spaces" if tab else f"not valid YAML: {error.problem}")) from error
    except Exception as error:
        raise ConfigError(f"{path}: not valid YAML: {first_line(error)}") from error
    if not isinstance(layer, DictConfig):
        raise ConfigError(f"{path}: holds a {type(layer).__name__}; a configuration is a mapping of sections")
    return layer


def indent(lines: list[str], number: int) -> str:
    """The white space before the words of a line."""
    line = lines[number] if number < len(lines) else ""
    return line[: len(line) - len(line.lstrip())]


def in_shape(layer: DictConfig, defaults: dict[str, Any]) -> DictConfig:
    """The layer with a single value as a list where the schema has a list.

    defaults: dotted key -> default value, whose type says what the setting takes. Raises ConfigError where the meaning is not clear.
    """
    values: Any = OmegaConf.to_container(layer)
    for key, default in defaults.items():
        *path, name = key.split(".")
        section: Any = values
        for part in path:
            section = section.get(part) if isinstance(section, dict) else None
        if not isinstance(section, dict) or section.get(name) is None or str(section[name]).startswith("${"):
            continue
        if isinstance(default, list):
            section[name] = _list(key, section[name])
        elif isinstance(default, dict):
            _check_mapping(key, section[name])
    shaped: Any = OmegaConf.create(values)
    return shaped


def _list(key: str, value: Any) -> Any:
    if isinstance(value, (list, dict)):
        return value
    if isinstance(value, str) and "," in value:
        raise ConfigError(f"{key}: is {value!r}; a list stands in brackets: '{key}=[{value}]'")
    return [value, value] if key in PAIRS else [value]


def _check_mapping(key: str, value: Any) -> None:
    """YAML reads `{text:body}` as the key `text:body` without a value."""
    pairs = [value] if isinstance(value, str) else [k for k, v in value.items() if v is None] if isinstance(value, dict) else []
    if wrong := [pair for pair in pairs if isinstance(pair, str) and ":" in pair]:
        right = ", ".join(": ".join(part.strip() for part in pair.split(":", 1)) for pair in wrong)
        raise ConfigError(f"{key}: {wrong[0]!r} has no space behind its colon; write '{key}={{{right}}}', in quotes")
    if not isinstance(value, dict):
        raise ConfigError(f"{key}: is {json.dumps(value)}; it takes a mapping such as '{key}={{text: body}}', in quotes")


def check_folder_of_a_model(key: str, value: str | None) -> None:
    """Raises ConfigError where a name on the Hugging Face hub was given for a folder: nothing is downloaded by a job."""
    if key not in FOLDERS_OF_MODELS or not value or not HUB_NAME.fullmatch(value) or Path(value).exists() or Path(value).parent.exists():
        return
    folder = f"models/{value.split('/')[1]}"
    raise ConfigError(f"{key}: there is no folder {value}; if that is its name on the Hugging Face hub, fetch it first: "
                      f"hf download {value}{FOLDERS_OF_MODELS[key]} --local-dir {folder}, then {key}={folder}")  # fmt: skip
