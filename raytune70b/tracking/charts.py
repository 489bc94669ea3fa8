"""The report's pictures: inline SVG by matplotlib, each from records to one string."""

from __future__ import annotations

import io
import itertools
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from raytune70b.tracking.goodput import LABELS, Interval
from raytune70b.tracking.journal import Record
from raytune70b.tracking.series import tokens_per_s

MOST_POINTS = 1500
COLORS = dict(zip(LABELS, ("#8e9aaf", "#2a9d5c", "#e9a23b", "#3b7dd8", "#c8553d", "#7d2e2e", "#9d6fb8", "#e3e6ea"), strict=True))
BLUE, ORANGE, GRAY = "#3b7dd8", "#e07a1f", "#8e9aaf"
_ids = itertools.count()


def loss(steps: list[Record], validations: list[Record]) -> str:
    """Training loss, its running mean, and validation loss by step."""
    figure, axes = _axes(13, 4.2, "step", "loss (nats a token)")
    x, y = _series(steps, "loss")
    axes.plot(*thin(x, y), color=BLUE, alpha=0.35, linewidth=1, label="train")
    window = max(1, len(y) // 50)
    if len(y) > 2 * window:
        axes.plot(*thin(x[window - 1 :], np.convolve(y, np.ones(window) / window, "valid")), color=BLUE, label=f"train, mean of {window}")
    if validations:
        axes.plot(*_series(validations, "loss"), color=ORANGE, marker="o", markersize=4, label="validation")
    skipped = [s["step"] for s in steps if s.get("skipped")]
    if skipped:
        axes.plot(skipped, [axes.get_ylim()[1]] * len(skipped), "rv", label="skipped", clip_on=False)
    axes.legend(frameon=False)
    return svg(figure)


def rates(steps: list[Record]) -> str:
    """Learning rate, and gradient norm on the right."""
    figure, axes = _axes(6, 3, "step", "learning rate")
    axes.plot(*thin(*_series(steps, "learning_rate")), color=BLUE)
    right = axes.twinx()
    right.plot(*thin(*_series(steps, "grad_norm")), color=ORANGE, alpha=0.6, linewidth=1)
    right.set_ylabel("gradient norm", color=ORANGE)
    right.spines["top"].set_visible(False)
    return svg(figure)


def speed(steps: list[Record]) -> str:
    """Tokens/s, and the number of workers on the right."""
    figure, axes = _axes(6, 3, "step", "tokens/s")
    x, y = np.array([s["step"] for s in steps], float), np.array([tokens_per_s(s) for s in steps])
    axes.plot(*thin(x, y), color=BLUE, linewidth=1)
    axes.set_ylim(bottom=0)
    right = axes.twinx()
    right.step(x, [s["world_size"] for s in steps], where="post", color=GRAY)
    right.set_ylim(0, max(s["world_size"] for s in steps) * 1.5)
    right.set_ylabel("workers", color=GRAY)
    right.spines["top"].set_visible(False)
    return svg(figure)


def timeline(intervals: list[Interval], faults: list[tuple[float, str]]) -> str:
    """One bar over the wall-clock, coloured by label; faults as numbered marks."""
    figure, axes = _axes(13, 2.2, "", "")
    begin, span = intervals[0].start, intervals[-1].end - intervals[0].start
    unit, name = (3600.0, "hours") if span > 7200 else (60.0, "minutes") if span > 180 else (1.0, "seconds")
    for label in LABELS:
        pieces = [((i.start - begin) / unit, i.seconds / unit) for i in intervals if i.label == label]
        if pieces:
            axes.broken_barh(pieces, (0, 1), facecolors=COLORS[label], label=label, linewidth=0)
    for number, (when, _) in enumerate(faults, 1):
        axes.annotate(str(number), ((when - begin) / unit, 1), (0, 9), textcoords="offset points", ha="center", fontsize=8, color="#b00020", arrowprops={"arrowstyle": "-|>", "color": "#b00020"})
    axes.set(xlim=(0, span / unit), ylim=(0, 1.35), yticks=[], xlabel=f"{name} since the first start")
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.legend(ncols=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.45), fontsize=8, columnspacing=1.0, handlelength=1.0)
    marks = "; ".join(f"{number} {what}" for number, (_, what) in enumerate(faults, 1))
    if marks:
        figure.text(0.01, 0.98, marks if len(marks) < 170 else marks[:167] + "...", fontsize=8, color="#b00020", va="top", parse_math=False)
    return svg(figure)


def parts(steps: list[Record]) -> str:
    """Seconds of a step, stacked by part; what no part claims is `other`."""
    figure, axes = _axes(6, 3, "step", "seconds")
    names = sorted({name for s in steps for name in s.get("seconds_by") or {}})
    x = np.array([s["step"] for s in steps], float)
    rows = [np.array([(s.get("seconds_by") or {}).get(name, 0.0) for s in steps]) for name in names]
    rest = np.array([s["seconds"] for s in steps]) - (np.sum(rows, axis=0) if rows else 0.0)
    layers = [thin(x, row) for row in [*rows, np.maximum(rest, 0)]]
    axes.stackplot(layers[0][0], [layer[1] for layer in layers], labels=[*names, "other"], linewidth=0)
    axes.legend(frameon=False, fontsize=8)
    return svg(figure)


def memory(records: list[Record], plan: dict[str, Any]) -> str:
    """Memory of each worker over time, and the plan's figure."""
    workers = [r for r in records if r["kind"] == "worker" and r.get("memory_allocated") is not None]
    if not workers:
        return '<p class="note">no samples</p>'
    figure, axes = _axes(6, 3, "minutes since the first sample", "GB")
    begin = workers[0]["time"]
    for rank in sorted({r["rank"] for r in workers})[:16]:
        own = [r for r in workers if r["rank"] == rank]
        x = np.array([(r["time"] - begin) / 60 for r in own])
        axes.plot(*thin(x, np.array([r["memory_allocated"] / 1e9 for r in own])), marker="." if len(own) < 30 else None, label=f"worker {rank}")
    if plan.get("memory_bytes"):
        axes.axhline(plan["memory_bytes"] / 1e9, color="black", linestyle="--", label="plan")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    return svg(figure)


def cost(costs: list[Record], budget: dict[str, Any]) -> str:
    """Money (or hours, without a price) spent and projected, and the limit."""
    field, limit, unit = ("usd", budget.get("usd"), "USD") if "usd" in costs[-1] else ("hours", budget.get("hours"), "hours")
    figure, axes = _axes(13, 3, "step", unit)
    for name, text, color in ((field, "spent", BLUE), (f"projected_{field}", "projected at the end", GRAY)):
        axes.plot(*thin(*_series(costs, name)), color=color, label=text, marker="." if len(costs) < 30 else None)
    if limit:
        axes.axhline(limit, color="#b00020", linestyle="--", label="budget")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    return svg(figure)


def thin(x: np.ndarray, y: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most `most` points: the means of equal runs of points."""
    if len(x) <= most:
        return x, y
    cuts = np.linspace(0, len(x), most + 1).astype(int)[:-1]
    counts = np.diff([*cuts, len(x)])
    return np.add.reduceat(x, cuts) / counts, np.add.reduceat(y, cuts) / counts


def svg(figure: Figure) -> str:
    """The figure as inline SVG whose ids no other picture of the page has."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": str(next(_ids)), "svg.fonttype": "none", "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"]}):
        figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _series(records: list[Record], field: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and finite values of a field."""
    pairs = [(r["step"], r[field]) for r in records if isinstance(r.get(field), (int, float)) and np.isfinite(r[field])]
    return np.array([p[0] for p in pairs], float), np.array([p[1] for p in pairs], float)


def _axes(width: float, height: float, x: str, y: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height))
    axes = figure.add_subplot()
    axes.set(xlabel=x, ylabel=y)
    axes.grid(color="#edf0f3")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes
