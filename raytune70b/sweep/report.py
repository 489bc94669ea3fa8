"""What a sweep leaves behind: best.yaml, answer.json, trials.csv and two pictures, in the sweep's folder."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import shlex
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from raytune70b.storage import Folder
from raytune70b.sweep.answer import Answer, rows
from raytune70b.sweep.points import Result
from raytune70b.sweep.setting import full_blocks, with_point
from raytune70b.sweep.stages import Results, Space, losses
from raytune70b.training.prepared import Prepared

BEST, PICTURES = "best.yaml", ("rates.png", "curves.png")
COLOURS = {"finished": "tab:blue", "stopped": "tab:orange", "diverged": "tab:red", "failed": "tab:red"}


def best_yaml(prepared: Prepared, found: Answer) -> str:
    """The overlay that `jobs/finetune.py conf/finetune.yaml best.yaml` takes."""
    config, point = prepared.config, found.point
    steps = -(-full_blocks(prepared) // point.global_batch_size)
    best = with_point(prepared, point, steps)
    names = ["learning_rate", "global_batch_size", "micro_batch_size", "warmup_steps"]
    values: dict[str, Any] = {"train": {name: getattr(best.train, name) for name in names}}
    if config.train.steps is not None:
        values["train"]["steps"] = steps
    if config.model.method != "full":
        values["model"] = {"lora": {"rank": best.model.lora.rank, "alpha": best.model.lora.alpha}}
    lines = [found.verdict, *found.notes]
    return "".join(f"# {line}\n" for line in lines) + OmegaConf.to_yaml(OmegaConf.create(values))


def next_command(arguments: list[str], best: str, best_path: str, name: str) -> str:
    """The full run at the sweep's answer: its own files and settings without the sweep's, then `best` (its text), under a new name.

    Settings that `best` holds are left out: on a command line they would win over the file.
    """
    answered = OmegaConf.create(best)
    kept = [a for a in arguments if "=" not in a or (OmegaConf.select(answered, a.partition("=")[0]) is None and not a.startswith(("sweep.", "run.name=")))]
    files = [a for a in kept if "=" not in a and a not in ("sweep.yaml", "conf/sweep.yaml")]
    settings = [a for a in kept if "=" in a]
    return shlex.join(["python", "jobs/finetune.py", *files, best_path, *settings, f"run.name={name}"])


def write(prepared: Prepared, folder: Folder, space: Space, results: Results, found: Answer) -> None:
    """Writes every file of the answer; best.yaml only where there is one."""
    folder.write("answer.json", json.dumps(dataclasses.asdict(found), indent=1).encode())
    folder.write("trials.csv", table_csv(list(results.values())).encode())
    if found.fit is not None:
        folder.write(BEST, best_yaml(prepared, found).encode())
        folder.write(PICTURES[0], rates_picture(space, results, found))
        folder.write(PICTURES[1], curves_picture(list(results.values())))


def table_csv(results: list[Result]) -> str:
    table = rows(results)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]) if table else ["learning_rate"])
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def table_text(results: list[Result]) -> str:
    """The table for the terminal, best first."""
    head = f"{'rate':>9} {'batch':>6} {'warm-up':>8} {'rank':>5} {'seed':>5}  {'status':9} {'loss':>8} {'ran':>5} {'tokens':>10} {'seconds':>8}"
    lines = [
        f"{r['learning_rate']:>9.3g} {r['global_batch_size']:>6} {r['warmup_share']:>8.3g} {r['lora_rank']:>5} {r['seed']:>5}  {r['status']:9} "
        f"{'-' if r['loss'] is None else format(r['loss'], '.4f'):>8} {r['share']:>5.0%} {r['tokens']:>10,} {r['seconds']:>8.1f}"
        for r in rows(results)
    ]
    return "\n".join([head, *lines])


def _png(figure: Any) -> bytes:
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=120, bbox_inches="tight")
    return target.getvalue()


def rates_picture(space: Space, results: Results, found: Answer) -> bytes:
    """Loss against learning rate: the trials, the fit, the noise between seeds, and the rate for the full run."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    points = losses(space, results)
    singles = [(p.learning_rate, r.loss) for p, r in results.items() if r.usable and dataclasses.replace(p, seed=space.start.seed) == space.at(p.learning_rate)]
    axes.plot(*zip(*singles, strict=True), "o", markersize=4, color="0.6", label="trials")
    axes.errorbar(list(points), list(points.values()), yerr=found.deviation or 0.0, fmt="o", color="tab:blue", capsize=3, label="mean, noise between seeds")
    lost = sorted({p.learning_rate for p, r in results.items() if not r.usable and p == space.at(p.learning_rate)})
    if lost:  # their losses lie far above: marked at the upper edge
        axes.plot(lost, [0.99] * len(lost), "x", color="tab:red", transform=axes.get_xaxis_transform(), label="stopped, diverged or failed")
    assert found.fit is not None
    if found.fit.curvature:
        near = np.geomspace(max(min(points), found.fit.rate / 8), min(max(points), found.fit.rate * 8), 100)
        axes.plot(near, [found.fit.at(r) for r in near], color="tab:green", label="fit")
        axes.axvspan(found.fit.low, found.fit.high, color="tab:green", alpha=0.12, label="cannot be told apart")
    axes.axvline(found.point.learning_rate, color="black", linestyle=":", label=f"full run: {found.point.learning_rate:.3g}")
    low, high = min(points.values()), max(points.values())
    axes.set(xscale="log", xlabel="learning rate", ylabel="validation loss", ylim=(low - 0.15 * (high - low + 1e-3), high + 0.3 * (high - low + 1e-3)))
    axes.legend(fontsize=8)
    return _png(figure)


def curves_picture(results: list[Result]) -> bytes:
    """Validation loss over the schedule, one line a trial."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    for result in sorted(results, key=lambda r: r.point.learning_rate):
        if result.curve:
            shares, values = zip(*result.curve, strict=True)
            axes.plot(shares, values, marker="o", markersize=3, color=COLOURS[result.status], alpha=0.7)
            axes.annotate(f"{result.point.learning_rate:.2g}", (shares[-1], values[-1]), fontsize=6, xytext=(3, 0), textcoords="offset points")
    for status, colour in list(COLOURS.items())[:3]:
        axes.plot([], [], color=colour, label=status)
    axes.set(xlabel="share of the schedule", ylabel="validation loss")
    axes.legend(fontsize=8)
    return _png(figure)
