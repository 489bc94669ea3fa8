"""The plan for people: tables on the console. `main` is what `jobs/plan.py` runs: its options, then a configuration's plan."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raytune70b.config import UserError, compose, main_with_clear_errors
from raytune70b.planning.advice import minimum_workers
from raytune70b.planning.changes import useful_changes
from raytune70b.planning.claims import check_claims
from raytune70b.planning.hardware import GIB
from raytune70b.planning.plan import Plan, build_plan, by_gpu_count, planned_hours, record
from raytune70b.schema import Config

SECTIONS = ("model", "data", "train", "checkpoint", "cluster", "budget", "hardware", "claims")
MARKS = {"fits": "green", "tight": "yellow", "does not fit": "red", "yes": "green", "unlikely": "yellow", "no": "red"}


def main(usage: str, arguments: list[str] | None = None) -> int:
    """Plans, or validates the plan's model on a table; every user error is one line and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["validate"]:
        return _guarded(lambda: _validate(arguments[1:]))
    if arguments[:1] == ["simulate"]:
        from raytune70b.planning.goodput_report import main as simulated

        return simulated(usage, arguments[1:])
    try:
        options, rest = _parser().parse_known_args(arguments)
    except argparse.ArgumentError as error:
        message = str(error)
        return _guarded(lambda: _fail(message))
    unknown = [a for a in rest if a.startswith("-") and a not in ("-h", "--help")]
    if unknown:
        known = "--json, --sweep KEY=A,B,C, --hardware FILE ..., --picture FILE.png and --help"
        return _guarded(lambda: _fail(f"{unknown[0]}: unknown option; there are {known}"))
    return main_with_clear_errors(usage, SECTIONS, lambda config: _run(config, options, rest), rest)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sweep", metavar="KEY=A,B,C")
    parser.add_argument("--hardware", nargs="+", default=[], metavar="FILE")
    parser.add_argument("--picture", metavar="FILE.png")
    return parser


def _guarded(run: Any) -> int:
    try:
        return int(run() or 0)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _fail(message: str) -> None:
    raise UserError(message)


def _run(config: Config, options: argparse.Namespace, rest: list[str]) -> int:
    options.hardware, rest = [a for a in options.hardware if "=" not in a], [*rest, *(a for a in options.hardware if "=" in a)]
    plans = {"": build_plan(config)}
    if options.sweep:
        plans = _sweep(options.sweep, rest)
    elif options.hardware:
        plans = {Path(name).stem: build_plan(compose([*rest, name])) for name in options.hardware}
    if options.json:
        records = [{**record(plan), "variant": name, **_judged(plan)} for name, plan in plans.items()]
        print(json.dumps(records[0] if len(records) == 1 else records, indent=1))
    elif len(plans) > 1:
        print_comparison(plans)
    else:
        print_plan(next(iter(plans.values())))
    if options.picture:
        from raytune70b.planning.picture import draw

        draw(next(iter(plans.values())), by_gpu_count(config), Path(options.picture))
        print(f"picture: {options.picture}", file=sys.stderr)
    return 0


def _sweep(text: str, rest: list[str]) -> dict[str, Plan]:
    key, equals, values = text.partition("=")
    if not equals or not values:
        raise UserError(f"--sweep {text}: it takes KEY=A,B,C")
    return {f"{key}={value}": build_plan(compose([*rest, f"{key}={value}"])) for value in values.split(",")}


def _judged(plan: Plan) -> dict[str, Any]:
    return {
        "fewest_workers": fewest_workers(plan),
        "changes": [{"settings": c.settings, "effect": c.effect, "verdict": c.plan.verdict} for c in useful_changes(plan)],
        "claims": [asdict(claim) for claim in check_claims(plan)],
    }


def print_plan(plan: Plan) -> None:
    """All tables of one plan."""
    console = _console()
    w = plan.workload
    model = f"{w.model.parameters / 1e9:,.3g} B parameters, {w.method}, {w.trained_parameters / 1e9:,.3g} B trained"
    place = f"{plan.machine.nodes} x {plan.machine.gpus_per_node} {plan.machine.gpu.name}"
    batch = f"micro-batch {w.micro_batch_size} x {w.seq_len} tokens, {w.micro_batches} a step"
    console.print(f"[bold]{plan.config.run.name}[/]: {model}; {place}; {batch}")
    console.print(f"verdict: [{MARKS[plan.verdict]}]{plan.verdict}[/]" + (f"; but {few}" if (few := too_few(plan)) else "") + "\n")
    _print(console, f"Memory of one GPU, worst at the {plan.memory.moment}", ("part", "size"), _memory_rows(plan), right=(1,))
    _print(console, "Speed", ("", "low", "likely", "high"), _speed_rows(plan), right=(1, 2, 3))
    _print(console, "Time and checkpoints", ("", ""), _time_rows(plan))
    _print(
        console,
        "Cost",
        ("offer", "USD/GPU-hour", "GPU-hours", "compute", "storage", "egress", "total USD", "of it lost"),
        _cost_rows(plan),
        right=tuple(range(1, 8)),
    )
    _print(console, "What would help, best first", ("change", "effect"), [(c.command, c.effect) for c in useful_changes(plan)])
    claims = [(c.figure, c.claimed, c.planned, f"[{MARKS[c.possible]}]{c.possible}[/]", c.why) for c in check_claims(plan)]
    _print(console, "Claims beside the plan", ("figure", "claimed", "plan", "can be", "why"), claims)


def _console() -> Any:
    from rich.console import Console

    return Console(soft_wrap=False, highlight=False, width=None if sys.stdout.isatty() else 140)


def print_table(title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]], right: tuple[int, ...] = ()) -> None:
    """One table on a console of its own; columns in `right` are numbers."""
    _print(_console(), title, columns, rows, right)


def _print(console: Any, title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]], right: tuple[int, ...] = ()) -> None:
    if not rows:
        return
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=any(columns))
    for n, column in enumerate(columns):
        table.add_column(column, justify="right" if n in right else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _memory_rows(plan: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [(part, size_text(size)) for part, size in plan.memory.parts.items()]
    names = {"GPU memory": "total of usable", "host memory": "host memory of a machine"}
    rows += [(names.get(name, name), f"{size_text(need)} of {size_text(have)}") for name, need, have in plan.stores()]
    return [*rows, ("fewest GPUs that hold the run", str(fewest_workers(plan) or "none"))]


def fewest_workers(plan: Plan) -> int | None:
    """GPUs below which the run's memory does not fit; None where no number is enough."""
    return minimum_workers(plan.config, plan.memory.capacity)


def too_few(plan: Plan) -> str:
    """What `jobs/finetune.py` would say of the fewest workers that it is to go on with; "" where they are enough."""
    least, enough = plan.config.cluster.workers[0], fewest_workers(plan)
    if enough is None or enough <= least or plan.machine.gpu.name == "cpu":
        return ""
    return f"cluster.workers: the least is {least}, but the run takes {enough}; jobs/finetune.py refuses it"


def size_text(size: float) -> str:
    """Bytes in the unit that reads best."""
    unit, name = next((u for u in ((2**40, "TiB"), (GIB, "GiB"), (2**20, "MiB")) if size >= 0.95 * u[0]), (2**10, "KiB"))
    return f"{size / unit:,.1f} {name}"


def _speed_rows(plan: Plan) -> list[tuple[str, ...]]:
    t = plan.throughput
    peak = plan.machine.gpu.peak_flops
    rows: list[tuple[str, ...]] = [("tokens/s/GPU", f"{t.low:,.0f}", f"{t.likely:,.0f}", f"{t.high:,.0f}")]
    rows.append(("MFU", *(f"{x * t.flops_per_token / peak:.0%}" for x in (t.low, t.likely, t.high))))
    rows.append((f"step, s (bound by {t.bound})", "", f"{t.step_seconds:.1f}", ""))
    return rows + [(f"  {name}", "", f"{seconds:.2f}", "") for name, seconds in t.seconds.items() if seconds]


def _time_rows(plan: Plan) -> list[tuple[str, ...]]:
    s, c, losses = plan.schedule, plan.checkpoint, plan.losses
    tokens = f"{s.corpus_tokens / 1e9:,.3f} B tokens ({s.corpus_from})" if s.corpus_tokens else s.corpus_from
    rows: list[tuple[str, ...]] = [("corpus", tokens), ("tokens a step", f"{s.tokens_per_step:,}")]
    if s.steps is not None and s.hours is not None:
        rows.append(("the whole run", f"{s.steps:,} steps, {s.hours:,.1f} h" + (f", ends {s.end}" if s.end else "")))
    if s.budget_hours is not None and s.budget_steps is not None and s.budget_tokens is not None:
        epochs = f", {s.budget_epochs:.3g} epochs" if s.budget_epochs is not None else ""
        rows.append(
            ("inside the budget", f"{s.budget_hours:,.1f} h: {s.budget_steps:,} steps, {s.budget_tokens / 1e9:,.2f} B tokens{epochs}")
        )
    if s.within_budget is not None:
        rows.append(("budget", "[green]enough for the whole run[/]" if s.within_budget else "[red]ends before the run does[/]"))
    rows.append(("checkpoint", f"{c.bytes / 1e9:,.1f} GB, stops training {c.stall_s:.1f} s, written in {c.write_s:,.0f} s"))
    rows.append(("checkpoint interval", f"{c.every_steps:,} steps ({c.every_s / 60:,.0f} min)"))
    v = plan.validation
    often = f"every {v.every:,} steps" if v.every else "at the end" + (" and the start" if v.at_start else "")
    rows.append(("validation", f"{v.blocks:,} blocks, {_duration(v.seconds)} {often}"))
    rows.append(
        (
            "goodput",
            f"{losses.goodput:.1%}: {losses.failures:.2f} failures expected; stalls {losses.stall:.2%}, lost work {losses.lost_work:.2%}, "
            f"recovery {losses.recovery:.2%}, validation {losses.validation:.2%}",
        )
    )
    return rows


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else f"{seconds:,.0f} s"


def _cost_rows(plan: Plan) -> list[tuple[str, ...]]:
    return [
        (f"{c.offer.name} ({c.offer.date})", f"{c.offer.usd_per_gpu_hour:.2f}", f"{c.gpu_hours:,.0f}", f"{c.compute:,.0f}",
         f"{c.storage:,.0f}", f"{c.egress:,.0f}", f"{c.total:,.0f}", f"{c.lost:,.0f}")
        for c in plan.costs
    ]  # fmt: skip


def print_comparison(plans: dict[str, Plan]) -> None:
    """Several plans side by side."""
    rows: list[tuple[str, ...]] = []
    for name, plan in plans.items():
        t, s, hours = plan.throughput, plan.schedule, planned_hours(plan.schedule)
        rows.append((
            name, f"[{MARKS[plan.verdict]}]{plan.verdict}[/]", f"{plan.memory.total / GIB:.1f}/{plan.memory.capacity / GIB:.1f}",
            f"{t.low:,.0f}-{t.high:,.0f}", f"{t.likely:,.0f}", f"{t.mfu:.0%}", t.bound, "-" if s.hours is None else f"{s.hours:,.0f}",
            "-" if s.budget_tokens is None else f"{s.budget_tokens / 1e9:,.2f}",
            f"{plan.costs[0].total:,.0f}" if plan.costs and hours else "-",
        ))  # fmt: skip
    columns = ("variant", "verdict", "GiB", "band", "tokens/s/GPU", "MFU", "bound by", "hours", "B tokens in budget", "USD")
    _print(_console(), "Side by side", columns, rows, right=(2, 3, 4, 5, 7, 8, 9))


def _validate(arguments: list[str]) -> None:
    from raytune70b.planning.validation import score, validate, write_predictions

    if not arguments or len(arguments) > 2 or arguments[0].startswith("-"):
        raise UserError("validate: it takes TABLE.csv, and OUT.csv for the predictions (default: TABLE.predicted.csv in this folder)")
    table = Path(arguments[0])
    out = Path(arguments[1]) if len(arguments) > 1 else Path(f"{table.stem}.predicted.csv")
    validation = validate(table)
    groups = {source: [p for p in validation.predictions if p.run.source == source] for source in validation.constants}
    groups |= {f"method {m}": [p for p in validation.predictions if p.run.method == m] for m in ("full", "lora", "qlora")}
    groups["all"] = validation.predictions
    rows: list[tuple[str, ...]] = [(name, *_score_cells(score(group))) for name, group in groups.items() if group]
    console = _console()
    columns = ("predicted by the other sources", "rows", "memory: median error", "fits or not: right", "speed: median error", "in the band")
    _print(console, "", columns, rows, right=(1, 2, 3, 4, 5))
    worst = sorted((p for p in validation.predictions if p.speed_error is not None), key=lambda p: -abs(p.speed_error or 0))[:8]
    _print(
        console, "Worst speeds", ("line", "source", "run", "stated", "plan", "error"), [_worst_cells(p) for p in worst], right=(0, 3, 4, 5)
    )
    reasons: dict[str, list[int]] = {}
    for row in validation.left:
        reasons.setdefault(row.reason, []).append(row.line)
    _print(
        console,
        f"{len(validation.left)} rows left out",
        ("why", "lines"),
        [(why, ", ".join(map(str, lines))) for why, lines in reasons.items()],
    )
    write_predictions(validation, out)
    console.print(f"predictions: {out}")


def _score_cells(s: dict[str, Any]) -> tuple[str, ...]:
    def cell(name: str) -> str:
        return "-" if s[name] is None else f"{s[name]:.1%}"

    return (
        str(s["rows"]),
        f"{cell('memory_median_error')} of {s['memory_rows']}",
        cell("fits_right"),
        f"{cell('speed_median_error')} of {s['speed_rows']}",
        cell("in_band"),
    )


def _worst_cells(p: Any) -> tuple[str, ...]:
    w = p.run.workload
    batch = f"{w.micro_batch_size} x {w.seq_len}"
    run = f"{w.model.parameters / 1e9:.0f} B {w.method} {w.sharding}, {w.world_size} {p.run.machine.gpu.name}, {batch}"
    speeds = (f"{p.run.tokens_per_s_per_gpu:,.0f}", f"{p.likely:,.0f}", f"{p.speed_error:+.0%}")
    return (str(p.run.line), p.run.source, run, *speeds)
