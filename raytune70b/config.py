"""Builds a configuration: `extends` files, then the file, then `key=value` overrides, checked against the schema.

Everything that a user can get wrong here ends as one `ConfigError` that names the key, the value and the way out;
`jobs` print it as one line and exit with code 2 (`main_with_clear_errors`).
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import io
import json
import math
import sys
import textwrap
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from raytune70b.arguments import check_folder_of_a_model, in_shape, read_file, read_override, split_arguments
from raytune70b.contradictions import problems
from raytune70b.errors import ConfigError, UserError, first_line
from raytune70b.schema import Config
from raytune70b.secrets import masked, secret_in, way_out

CONF = Path(__file__).resolve().parent.parent / "conf"


def compose(arguments: list[str]) -> Config:
    """The configuration of a command line: files (later ones lie over earlier ones) and `key=value` overrides, in any order.

    Raises ConfigError.
    """
    files, overrides = split_arguments(arguments, _known_setting)
    merged = OmegaConf.structured(Config)
    for name in files:
        for layer, source in _layers(Path(name)):
            merged = _merge(merged, layer, source)
    for override in overrides:
        merged = _merge(merged, read_override(override), f"override {override}")
    try:
        config: Any = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(first_line(error)) from error
    check(config)
    return config


def _layers(path: Path, trail: tuple[Path, ...] = ()) -> Iterator[tuple[DictConfig, str]]:
    """A file's layers, those it extends first. Names in `extends` are relative to the file, or to conf/."""
    near_by = (path, CONF / path, CONF / path.with_suffix(".yaml"), path.with_suffix(".yaml"))
    found = next((p for p in (*near_by, *CONF.rglob(path.with_suffix(".yaml").name)) if p.is_file()), None)
    if found is None:
        near = difflib.get_close_matches(path.stem, [p.stem for p in CONF.rglob("*.yaml")], 1)
        raise ConfigError(f"{path}: no such configuration file" + (f"; did you mean {near[0]}?" if near else f"; those that ship are in {CONF.name}/"))
    found = found.resolve()
    if found in trail:
        raise ConfigError(f"{found}: extends itself by way of {' -> '.join(p.name for p in trail)}")
    layer = read_file(found)
    parents = OmegaConf.to_container(OmegaConf.create([layer.pop("extends", [])]))[0]  # type: ignore[index]
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError(f"{found}: extends is {parents!r}; it takes the name of a file, or a list of names")
    for parent in parents:
        relative = found.parent / parent
        yield from _layers(relative if relative.is_file() else Path(parent), (*trail, found))
    yield layer, str(found)


def _merge(base: Any, layer: Any, source: str) -> Any:
    unknown = [key for key in _leaves(OmegaConf.to_container(layer)) if not _known(key)]
    if unknown:
        raise ConfigError(f"{unknown[0]}: unknown key in {source}; did you mean {nearest_key(unknown[0])}?")
    if OmegaConf.select(layer, "model.config.model_type") is not None:
        base = OmegaConf.merge(base)  # another architecture: its config replaces the old one, key by key would mix the two
        base.model.config = {}
    try:
        return OmegaConf.merge(base, in_shape(layer, {key: default for key, (_, _, default) in _schema_fields().items()}))
    except (OmegaConfBaseException, TypeError, ValueError) as error:  # the latter for an index into a list: a[0]=1
        key = getattr(error, "full_key", None) or "configuration"
        raise ConfigError(f"{key}: {first_line(error)} (in {source})") from error


def nearest_key(wrong: str) -> str:
    """The valid key that was probably meant: its name, its initials (lr for learning_rate) or its spelling is near."""
    section, _, name = wrong.rpartition(".")

    def likeness(key: str) -> float:
        key_section, _, key_name = key.rpartition(".")
        initials = "".join(word[:1] for word in key_name.split("_"))
        spelling = difflib.SequenceMatcher(None, name, key_name).ratio()
        return max(spelling, 0.9 * (initials == name)) + 0.5 * (key_section == section)

    return max(known_keys(), key=likeness)


def _leaves(value: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(value, dict) and (value or not prefix):  # a file of comments, or of `extends` alone, has no leaves
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix


def _known(key: str) -> bool:
    """Whether a dotted key is in the schema; below a free-form dictionary every key is."""
    fields = _schema_fields()
    parts = key.split(".")
    return any(".".join(parts[:n]) in fields for n in range(1, len(parts) + 1)) or any(f.startswith(key + ".") for f in fields)


@functools.cache
def _schema_fields(section: Any = Config, prefix: str = "") -> dict[str, tuple[dataclasses.Field, str, Any]]:
    """Dotted key -> (field, documentation, default) of every setting, in the schema's order."""
    found: dict[str, tuple[dataclasses.Field, str, Any]] = {}
    docs = field_docs(section)
    for f in dataclasses.fields(section):
        key = f"{prefix}{f.name}"
        default = f.default if f.default is not dataclasses.MISSING else f.default_factory()  # type: ignore[operator,misc]
        if dataclasses.is_dataclass(default):
            found.update(_schema_fields(default.__class__, key + "."))
        else:
            found[key] = (f, docs.get(f.name, ""), default)
    return found


def _known_setting(key: str) -> bool:
    return key in _schema_fields()


def known_keys() -> list[str]:
    """Every dotted key of the schema."""
    return list(_schema_fields())


@functools.cache  # parsing the schema's source is most of what composing a configuration costs
def field_docs(section: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: ast.literal_eval(text.value)
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def check(config: Config) -> None:
    """Raises ConfigError for the first value outside its limits or in contradiction to another."""
    for key, (f, _, _) in _schema_fields().items():
        value = get(config, key)
        if secret := secret_in(value):
            raise ConfigError(f"{key}: {masked(secret)} carries a secret, and settings are stored and logged; leave it out and set {way_out(secret)}")
        if odd := [number for number in (value if isinstance(value, list) else [value]) if isinstance(number, float) and not math.isfinite(number)]:
            raise ConfigError(f"{key}: is {odd[0]}; it takes a finite number")
        check_folder_of_a_model(key, value)
        limits = f.metadata
        if value is None or not limits:
            continue
        if limits["choices"] and value not in limits["choices"]:
            near = difflib.get_close_matches(str(value), limits["choices"], 1)
            raise ConfigError(f"{key}: is {value!r}; it takes one of {', '.join(limits['choices'])}" + (f" - did you mean {near[0]}?" if near else ""))
        if limits["low"] is not None and value < limits["low"]:
            raise ConfigError(f"{key}: is {value}; the least is {limits['low']}")
        if limits["high"] is not None and value > limits["high"]:
            raise ConfigError(f"{key}: is {value}; the most is {limits['high']}")
        if limits["above"] is not None and value <= limits["above"]:
            raise ConfigError(f"{key}: is {value}; it must be above {limits['above']}")
    for key, problem in problems(config):
        raise ConfigError(f"{key}: {problem}")


def get(config: Any, key: str) -> Any:
    """The value at a dotted key."""
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """Plain dictionaries and lists, for JSON and YAML."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """The resolved configuration as a file that `compose` reads back to an equal one."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def differences(old: dict[str, Any], new: dict[str, Any], keys: tuple[str, ...]) -> list[str]:
    """Lines `key: old -> new` for the settings among `keys` (exact, or a prefix with its dot) that differ."""
    leaves = [k for k in known_keys() if k.startswith(keys)]
    pairs = [(k, get(old, k) if _has(old, k) else None, get(new, k)) for k in leaves]
    return [f"{k}: {json.dumps(a)} -> {json.dumps(b)}" for k, a, b in pairs if a != b]


def _has(values: dict[str, Any], key: str) -> bool:
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def commented_defaults() -> str:
    """conf/finetune.yaml: every key with its default and its documentation."""
    lines = ["# The embedded default run, every key of the schema. Written by `python -m raytune70b.config`; a test holds it equal.", ""]
    section = ""
    for key, (f, doc, default) in _schema_fields().items():
        *path, name = key.split(".")
        if ".".join(path) != section:
            shared = [a for a, b in zip(path, section.split("."), strict=False) if a == b]
            lines += ([""] if not shared and section else []) + [f"{'  ' * n}{p}:" for n, p in enumerate(path) if n >= len(shared)]
            section = ".".join(path)
        indent = "  " * len(path)
        lines += [f"{indent}# {part}" for part in textwrap.wrap(doc + _limits_text(f), 110)]
        lines.append(f"{indent}{name}: {_yaml_value(default)}")
    return "\n".join(lines) + "\n"


def _limits_text(f: dataclasses.Field) -> str:
    limits = f.metadata
    if not limits:
        return ""
    if limits["choices"]:
        return f" ({' | '.join(limits['choices'])})"
    parts = [f"> {limits['above']}" if limits["above"] is not None else "", f">= {limits['low']}" if limits["low"] is not None else "",
             f"<= {limits['high']}" if limits["high"] is not None else ""]
    text = ", ".join(p for p in parts if p)
    return f" ({text})" if text else ""


def _yaml_value(value: Any) -> str:
    if isinstance(value, float):
        return repr(value) if "e" not in repr(value) else f"{value:.10f}".rstrip("0")
    return json.dumps(value)


_RUN = (
    "run.name", "run.path", "data.path", "model.path", "model.method", "train.learning_rate", "train.epochs", "train.global_batch_size", "train.micro_batch_size",
    "train.optimizer", "model.activation_checkpointing", "checkpoint.every", "cluster.workers", "budget.usd", "budget.price_per_gpu_hour",
)  # fmt: skip
COMMON = {
    "run": _RUN,
    "data": ("data.inputs", "data.path", "data.tokenizer", "data.seq_len", "data.columns", "data.languages", "data.redact", "data.near_duplicates",
             "data.validation_fraction", "data.max_quarantined", "data.evaluation", "data.keep_work", "data.file_blocks", "data.shuffle_window", "cluster.workers"),
    "sweep": ("sweep.name", "sweep.data_fraction", "sweep.low", "sweep.high", "sweep.usd", "sweep.hours", *_RUN[1:9], "budget.price_per_gpu_hour"),
    "export": ("export.path", "export.checkpoint", "export.dtype", "export.overwrite", "export.register", "export.verify_logits", "run.path", "run.name", "model.path"),
    "evaluation": ("evaluation.base", "evaluation.max_texts", "evaluation.max_conversations", "evaluation.max_new_tokens", "evaluation.batch_size",
                   "evaluation.gpus_per_model", "export.path", "export.checkpoint", "run.path", "run.name", "data.path", "cluster.workers", "tracking.mlflow"),
}  # fmt: skip
"""The first section that a job names -> what its users change, in the order in which it is read."""


def help_text(usage: str, sections: tuple[str, ...]) -> str:
    """A job's --help: its usage, the keys that most people set, and every key it reads with default and meaning."""
    fields = _schema_fields()
    lines = [usage.strip(), "", "The keys that most people set (files lie over each other from left to right, key=value over all of them):", ""]
    for key in COMMON[sections[0]]:
        if key.split(".")[0] in sections:
            lines.append(f"  {textwrap.shorten(f'{key}={_yaml_value(fields[key][2])}', 40, placeholder=' ...'):42}{textwrap.shorten(fields[key][1], 94, placeholder=' ...')}")
    lines += ["", "All keys:"]
    for key, (f, doc, default) in fields.items():
        if key.split(".")[0] in sections:
            lines.append("\n" + "\n".join(textwrap.wrap(f"{key}={_yaml_value(default)}", 130, initial_indent="  ", subsequent_indent="      ")))
            lines += textwrap.wrap(doc + _limits_text(f), 100, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def print_anything() -> None:
    """Lets the standard streams replace characters that their encoding lacks: one of them in a path or an error would stop every later line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def main_with_clear_errors(
    usage: str, sections: tuple[str, ...], run: Callable[[Config], int | None], arguments: list[str] | None = None,
    expand: Callable[[list[str]], list[str]] = list,
) -> int:  # fmt: skip
    """A job's entry: composes the configuration, runs, and turns every UserError into one line and exit code 2.

    expand: turns a job's own arguments, such as a run folder, into files and overrides.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    print_anything()
    if {"-h", "--help"} & set(arguments):
        print(help_text(usage, sections))
        return 0
    try:
        from raytune70b.cluster import before_import
        from raytune70b.signals import end_on_sigterm

        split_arguments(arguments, _known_setting)  # before a word that a space cut off is taken for a run folder
        config = compose(expand(arguments))
        before_import()
        end_on_sigterm()
        return run(config) or 0
    except UserError as error:
        print(f"error: {masked(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    (CONF / "finetune.yaml").write_text(commented_defaults())
