"""The model card (README.md) and the same facts for programs (export.json): where a model comes from and what was checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from raytune70b.export.source import Trained, describe_lineage
from raytune70b.schema import Config

FACTS, CARD = "export.json", "README.md"
SERVING_GB, WEIGHTS_SHARE = 80, 0.75
"""The GPU that the serving line is for, and the share of its memory that weights may take: the rest is for the cache of what is served."""


@dataclass(frozen=True)
class Base:
    """The base model as the card names it."""

    name: str
    licence: str | None


def base_of(config: Config) -> Base | None:
    """The base model with the licence that its own card states; None for a run from random weights."""
    if config.model.path is None:
        return None
    folder = Path(config.model.path)
    named = _front_matter(folder / CARD).get("license")
    files = sorted(p.name for p in folder.glob("LICEN[CS]E*"))
    return Base(folder.name, str(named) if named else (f"see {files[0]} of the base" if files else None))


def _front_matter(card: Path) -> dict[str, Any]:
    found = re.match(r"---\n(.*?)\n---", card.read_text("utf-8", "replace"), re.DOTALL) if card.is_file() else None
    values = yaml.safe_load(found.group(1)) if found else None
    return values if isinstance(values, dict) else {}


def facts(trained: Trained, form: dict[str, Any], checks: dict[str, Any], files: dict[str, tuple[int, str]]) -> dict[str, Any]:
    """Everything that the card says."""
    config, base = trained.config, base_of(trained.config)
    start = next((r for r in reversed(trained.journal) if r["kind"] == "run_start"), {})
    plan = {k: start[k] for k in ("total_steps", "steps_per_epoch", "blocks", "tokens_per_step") if k in start}
    return {
        "run": {"name": config.run.name, "folder": trained.run.uri, "checkpoint": trained.checkpoint.name, "step": trained.cursor.step,
                "trained_tokens": trained.cursor.trained_tokens, "tokens": trained.cursor.tokens, "seed": config.run.seed, "mlflow": trained.mlflow_runs},
        "plan": plan,
        "method": {"method": config.model.method, "precision": config.model.precision, "learning_rate": config.train.learning_rate,
                   "global_batch_size": config.train.global_batch_size, "seq_len": trained.manifest.seq_len,
                   **({"rank": config.model.lora.rank, "alpha": config.model.lora.alpha} if config.model.method != "full" else {})},
        "base": {"name": base.name if base else None, "path": config.model.path, "licence": base.licence if base else None,
                 "fingerprint": trained.cursor.fingerprint.get("base")},
        "losses": trained.losses,
        "data": {"folder": trained.data.uri, "digest": trained.manifest.digest, "tokenizer": trained.manifest.tokenizer,
                 "chat_template": trained.manifest.chat_template, "lineage": trained.manifest.lineage},
        "export": form, "checks": checks, "files": {name: {"bytes": size, "xxh3": digest} for name, (size, digest) in files.items()},
    }  # fmt: skip


def card(values: dict[str, Any], title: str) -> str:
    """The model card in Markdown, with the front matter that model hubs read."""
    base, export = values["base"], values["export"]
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["raytune70b", values["method"]["method"]]}
    if base["name"]:
        head["base_model"] = base["name"]
    if base["licence"]:
        head["license"] = base["licence"] if re.fullmatch(r"[\w.-]+", base["licence"]) else "other"
    licence = base["licence"] or ("the base states none; find it out before you pass this model on" if base["name"] else "no base: the weights started at random")
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---", f"# {title}",
        f"Licence of the base model: {licence}.",
        "## Use", _use(title, export),
        "## Training", _table({**values["run"], **values["plan"], **values["method"]}), "## Losses", _table(values["losses"]),
        "## Data", _table({k: v for k, v in values["data"].items() if k != "lineage"} | describe_lineage(values["data"]["lineage"])),
        "## This export", _table(export), "## Checked before it was published", _table(values["checks"]),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _use(title: str, export: dict[str, Any]) -> str:
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{title}", dtype="auto", device_map="auto")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{title}")\n```\n\n'
        f"On {export['serving_gpus']} GPU{'s' if export['serving_gpus'] > 1 else ''} of {SERVING_GB} GB, served by vLLM: "
        f"`vllm serve ./{title} --dtype {export['vllm_dtype']} --tensor-parallel-size {export['serving_gpus']}`"
    )


def serving_gpus(text: Any, size: int) -> int:
    """The fewest GPUs of `SERVING_GB` that hold `size` bytes of weights and leave room for the cache, of the numbers that tensor parallelism takes.

    vLLM divides the query heads and the MLP among them, and divides the key and value heads or repeats them. text: the Hugging Face config.
    """
    heads = getattr(text, "num_attention_heads", None) or 1
    grouped, width = getattr(text, "num_key_value_heads", None) or heads, getattr(text, "intermediate_size", None) or heads
    if not all(isinstance(n, int) for n in (heads, grouped, width)):  # layers of several sizes
        return 1
    allowed = [n for n in range(1, heads + 1) if heads % n == 0 and width % n == 0 and (grouped % n == 0 or n % grouped == 0)]
    return next((n for n in allowed if size <= n * WEIGHTS_SHARE * SERVING_GB * 1e9), allowed[-1])


def _table(values: dict[str, Any]) -> str:
    rows = [f"| {name} | {_cell(value)} |" for name, value in values.items() if value not in (None, "", {}, [])]
    return "\n".join(["| | |", "|---|---|", *rows])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        text = f"{value:.6g}"
    elif isinstance(value, int) and not isinstance(value, bool):
        text = f"{value:,}"
    else:
        text = repr(value) if isinstance(value, str) and "\n" in value else str(value)
    return text.replace("|", "\\|")
