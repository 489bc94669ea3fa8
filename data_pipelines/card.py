"""The data card: `DATA.md` beside the manifest, with pictures, for the person who asks what a model was trained on.

Personal data is shown by its shape only - letters as x, digits as 0 - because a card is passed around.
"""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass

from data_pipelines import lineage
from data_pipelines.duplicates import Duplicates
from data_pipelines.work import Result
from raytune70b.blocks.manifest import Manifest
from raytune70b.schema import Config
from raytune70b.storage import Folder

SAMPLES = 5


@dataclass(frozen=True)
class Figures:
    """What the pictures show; lengths are counted by powers of two."""

    characters: dict[int, int]
    tokens: dict[int, int]
    groups: dict[int, int]
    """Size of a group of near duplicates -> groups."""
    samples: list[tuple[str, str]]

    @classmethod
    def of(cls, extracted: list[Result], encoded: list[Result], duplicates: Duplicates) -> Figures:
        def by_power(results: list[Result]) -> dict[int, int]:
            return {int(k): n for k, n in lineage.total(results, "lengths").items()}

        samples = [tuple(s) for r in extracted for s in r["samples"]][:SAMPLES]
        return cls(by_power(extracted), by_power(encoded), dict(Counter(duplicates.groups)), samples)  # type: ignore[arg-type]


def write(target: Folder, config: Config, manifest: Manifest, figures: Figures, seconds: dict[str, float]) -> None:
    """Writes `DATA.md` and `DATA/*.png`; the data set does not depend on them."""
    found = manifest.lineage
    pictures = {
        "lengths": _bars("Documents by length in tokens", _powers(figures.tokens), "documents", "tokens, up to"),
        "languages": _bars("Documents by language", found["languages"], "documents", ""),
        "redactions": _bars("Redacted personal data", found["redactions"], "finds", ""),
        "duplicates": _bars("Groups of near duplicates", {str(k): n for k, n in sorted(figures.groups.items())}, "groups", "documents in the group"),
    }
    for name, png in pictures.items():
        target.write(f"DATA/{name}.png", png)
    target.write("DATA.md", _text(config, manifest, figures, seconds, list(pictures)).encode())


def _powers(counts: dict[int, int]) -> dict[str, int]:
    return {f"{2**bits:,}": counts.get(bits, 0) for bits in range(min(counts), max(counts) + 1)} if counts else {}


def _bars(title: str, counts: dict[str, int], unit: str, label: str) -> bytes:
    """A PNG with one bar for each count."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if counts:
        bars = axes.bar(list(counts), list(counts.values()), color="#2f5d8a")
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=7)
        axes.tick_params(axis="x", labelrotation=45 if len(counts) > 6 else 0, labelsize=8)
    else:
        axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes)
    axes.set(title=title, ylabel=unit, xlabel=label)
    axes.spines[["top", "right"]].set_visible(False)
    sink = io.BytesIO()
    figure.savefig(sink, format="png")
    return sink.getvalue()


def _text(config: Config, manifest: Manifest, figures: Figures, seconds: dict[str, float], pictures: list[str]) -> str:
    found = manifest.lineage
    lines = ["# Data card", "", f"Token blocks `{manifest.digest}`, made from {', '.join(f'`{i}`' for i in config.data.inputs)}.", ""]
    lines += [
        f"- blocks of {manifest.seq_len} tokens: {found['blocks']['train']:,} to train on, {found['blocks']['validation']:,} for validation",
        f"- tokenizer `{manifest.tokenizer}` with {manifest.vocab_size:,} ids, prompt layout `{manifest.chat_template}`",
        f"- {found['tokens']['trained']:,} of {found['tokens']['out']:,} tokens are trained; padding is {_share(found['tokens']['padding'], manifest)}", "",
    ]  # fmt: skip
    lines += ["## What was kept and dropped", "", "| stage | what | count |", "|---|---|---:|"]
    lines += [f"| {stage} | {what} | {count:,} |" for stage, what, count in lineage.table(found)]
    lines += ["", "Bad rows stand in `quarantine/`, duplicates with what is kept for them in `duplicates.parquet`.", "", "## Pictures", ""]
    lines += [f"![{name}](DATA/{name}.png)" for name in pictures]
    lines += ["", "## Redaction, before and after", "", "Before: by its shape only, letters as x and digits as 0.", ""]
    lines += [f"```\n{before}\n{after}\n```" for before, after in figures.samples] or ["No personal data was found."]
    lines += ["", "## Settings", "", "| key | value |", "|---|---|"]
    lines += [f"| data.{k} | `{v}` |" for k, v in vars(config.data).items()]
    lines += ["", "## Time", "", "| stage | seconds |", "|---|---:|", *(f"| {stage} | {s:.1f} |" for stage, s in seconds.items())]
    return "\n".join(lines) + "\n"


def _share(padding: int, manifest: Manifest) -> str:
    return f"{padding / max(1, sum(manifest.lineage['blocks'].values()) * manifest.seq_len):.2%} of the blocks"
