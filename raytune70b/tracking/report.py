"""`report.html`: a run on one page, with pictures, in one file that needs neither network nor server.

Made from the journal alone, so it can be made again at any time: `python -m raytune70b.tracking.report RUN_FOLDER`. Pictures are
inline SVG of at most `MOST_POINTS` points a line, so a run of any length makes a page of about a megabyte, in some seconds.
"""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Iterable
from typing import Any

from raytune70b.config import UserError
from raytune70b.storage import Folder
from raytune70b.tracking import charts, goodput
from raytune70b.tracking.console import Progress, duration, lines_for, loss_text, number
from raytune70b.tracking.journal import JOURNAL, Record, lineage, read_journal

REPORT = "report.html"
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1c2430;background:#f4f6f8;margin:0}
main{max-width:1060px;margin:0 auto;padding:24px}
h1{font-size:26px;margin:0 0 2px}h2{font-size:18px;margin:0 0 8px}
section{background:#fff;border:1px solid #dfe4ea;border-radius:8px;padding:16px 20px;margin:16px 0;overflow-x:auto}
.figures{display:flex;flex-wrap:wrap;gap:12px;margin:16px 0}
.figure{background:#fff;border:1px solid #dfe4ea;border-radius:8px;padding:10px 16px;min-width:120px}
.figure b{display:block;font-size:21px}.figure span,.note{color:#5b6878;font-size:13px}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:4px 12px 4px 0;border-bottom:1px solid #edf0f3;vertical-align:top}
td.n,th.n{text-align:right}svg{width:100%;height:auto}pre{font-size:12.5px;overflow-x:auto}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:0 16px}
"""


def report(records: list[Record], name: str, config_yaml: str = "") -> str:
    """The page of a run, complete HTML. `records`: its journal."""
    steps, validations = lineage(records, "step"), lineage(records, "validation")
    intervals = goodput.timeline(records)
    sections = [_headline(records, name, steps, validations, intervals)]
    if steps:
        sections += [
            _section("Loss", charts.loss(steps, validations), validation_table(validations) + answers_table(lineage(records, "evaluation"))),
            '<div class="grid">' + _section("Learning rate and gradient norm", charts.rates(steps)) + _section("Tokens per second", charts.speed(steps)) + "</div>",
        ]
    if intervals:
        note = f"Every second has one label; together {duration(sum(i.seconds for i in intervals))} of wall-clock."
        sections.append(_section("Where the time went", charts.timeline(intervals, faults(records)), time_table(intervals), note))
    if steps:
        sections.append('<div class="grid">' + _section("A step by its parts", charts.parts(steps)) + _section("Memory", charts.memory(records, _plan(records))) + "</div>")
    costs = [r for r in records if r["kind"] == "cost"]
    if costs:
        sections.append(_section("Cost", charts.cost(costs, _budget(records)), cost_table(costs[-1], _budget(records))))
    sections.append(_section("Plan and run", plan_table(records, steps, intervals)))
    sections.append(_section("Checkpoints", checkpoint_table(lineage(records, "checkpoint"))))
    sections.append(_section("What happened", events_table(records)))
    if config_yaml:
        sections.append(f"<section><details><summary>Configuration</summary><pre>{html.escape(config_yaml)}</pre></details></section>")
    return f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(name)}</title><style>{STYLE}</style></head><body><main>{"".join(sections)}</main></body></html>'


def _headline(records: list[Record], name: str, steps: list[Record], validations: list[Record], intervals: list[goodput.Interval]) -> str:
    end = next((r for r in reversed(records) if r["kind"] in ("run_start", "run_end")), None)  # of the launch that goes on, or of the last one
    status = "running" if end is None or end["kind"] == "run_start" else f"{end['status']}{': ' + end['reason'] if end.get('reason') else ''}"
    figures = [("steps", str(steps[-1]["step"])), ("train loss", loss_text(steps[-1]["loss"]))] if steps else []
    figures += [("validation loss", loss_text(validations[-1]["loss"]))] if validations else []
    if steps and (seconds := sum(s["seconds"] for s in steps)):
        figures.append(("tokens/s", number(sum(s["tokens"] for s in steps) / seconds)))
        figures += [("MFU", f"{steps[-1]['mfu']:.1%}")] if "mfu" in steps[-1] else []
        figures.append(("tokens", number(sum(s["tokens"] for s in steps))))
    figures += [("goodput", f"{goodput.goodput(intervals):.1%}"), ("running", duration(goodput.running_seconds(intervals)))] if intervals else []
    cost = next((r for r in reversed(records) if "usd" in r), None)
    figures += [("cost", f"${cost['usd']:,.2f}")] if cost else []
    boxes = "".join(f'<div class="figure"><b>{html.escape(value)}</b><span>{label}</span></div>' for label, value in figures)
    return f'<h1>{html.escape(name)}</h1><div class="note">{html.escape(status)}</div><div class="figures">{boxes}</div>'


def _section(title: str, *parts: str) -> str:
    body = "".join(p if p.startswith("<") else f'<p class="note">{html.escape(p)}</p>' for p in parts if p)
    return f"<section><h2>{title}</h2>{body}</section>"


def table(head: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> str:
    """An HTML table; columns whose head starts with # are numbers, set to the right."""
    rows = list(rows)
    if not rows:
        return '<p class="note">none</p>'
    numeric = [h.startswith("#") for h in head]

    def cells(tag: str, values: tuple[Any, ...]) -> str:
        return "".join(f"<{tag}{' class=n' if n else ''}>{html.escape(str(v))}</{tag}>" for v, n in zip(values, numeric, strict=True))

    titles = tuple(h.lstrip("#") for h in head)
    lines = [cells("th", titles), *(cells("td", row) for row in rows)]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def time_table(intervals: list[goodput.Interval]) -> str:
    sums = goodput.totals(intervals)
    whole = sum(sums.values()) or 1.0
    return table(("label", "#seconds", "#share"), ((label, f"{s:,.1f}", f"{s / whole:.1%}") for label, s in sums.items() if s))


def answers_table(evaluations: list[Record]) -> str:
    """What answers scored while training went on; nothing where none were asked for."""
    if not evaluations:
        return ""
    names = [n for n in evaluations[0] if n not in ("kind", "time", "launch", "step", "answers", "seconds")]
    rows = ((e["step"], *(f"{e[n]:.3g}" for n in names), e["answers"], f"{e['seconds']:.1f}") for e in evaluations)
    return "<h3>Answers while training went on</h3>" + table(("#step", *(f"#{n.replace('_', ' ')}" for n in names), "#answers", "#seconds"), rows)


def validation_table(validations: list[Record]) -> str:
    shown = validations if len(validations) <= 12 else [*validations[:3], *validations[-9:]]
    return table(("#step", "#validation loss", "#trained tokens", "#seconds"), ((v["step"], loss_text(v["loss"]), f"{v['trained_tokens']:,}", f"{v['seconds']:.1f}") for v in shown))


def checkpoint_table(checkpoints: list[Record]) -> str:
    rows = ((c["step"], number(c["bytes"]) + "B", f"{c['stall_s']:.3f}", f"{c['seconds']:.1f}", c["path"]) for c in checkpoints[-20:])
    return table(("#step", "#size", "#training stood still (s)", "#until committed (s)", "where"), rows)


def cost_table(cost: Record, budget: dict[str, Any]) -> str:
    rows = [(name, f"{cost[unit]:,.2f}", f"{cost[end]:,.2f}" if end in cost else "-", budget.get(unit) or "-")
            for name, unit, end in (("hours", "hours", "projected_hours"), ("USD", "usd", "projected_usd")) if unit in cost]  # fmt: skip
    return table(("", "#spent", "#projected at the end", "#budget"), rows)


def plan_table(records: list[Record], steps: list[Record], intervals: list[goodput.Interval]) -> str:
    """What the plan said beside what the run did; a figure that one of them lacks is a dash."""
    plan = _plan(records)
    seconds = sum(s["seconds"] for s in steps)
    rates = [s["mfu"] for s in steps if "mfu" in s]
    most = max((r["memory_allocated"] for r in records if r["kind"] == "worker" and r.get("memory_allocated")), default=None)
    cost = next((r for r in reversed(records) if r["kind"] == "cost"), {})
    rows = [
        ("tokens/s", plan.get("tokens_per_s"), sum(s["tokens"] for s in steps) / seconds if seconds else None),
        ("seconds a step", plan.get("step_seconds"), seconds / len(steps) if steps else None),
        ("MFU", plan.get("mfu"), sum(rates) / len(rates) if rates else None),
        ("memory of a worker (GB)", _gb(plan.get("memory_bytes")), _gb(most)),
        ("steps", next((r.get("total_steps") for r in reversed(records) if r["kind"] == "run_start"), None), steps[-1]["step"] if steps else None),
        ("hours", plan.get("hours"), goodput.running_seconds(intervals) / 3600 if intervals else None),
        ("USD", plan.get("usd"), cost.get("usd")),
    ]
    return table(("", "#plan", "#run", "#run / plan"), ((n, _figure(p), _figure(r), f"{r / p:.2f}" if p and r else "-") for n, p, r in rows))


def events_table(records: list[Record], most: int = 200) -> str:
    """Starts, faults, resizes, warnings and ends, in the words of the console."""
    progress, rows, begin = Progress(0), [], records[0]["time"] if records else 0.0
    for record in records:
        lines = [] if record["kind"] in ("validation", "evaluation", "checkpoint", "group_ready") else lines_for(record, progress)
        if record["kind"] == "run_start":
            lines = [f"launch {record['launch']}"]
        elif record["kind"] == "run_end":
            lines = [f"launch {record['launch']} {record['status']}{': ' + record['reason'] if record.get('reason') else ''}"]
        rows += [("+" + duration(record["time"] - begin), line) for line in lines]
        progress.take(record)
    return table(("#time", "event"), rows if len(rows) <= most else [*rows[: most // 2], ("", f"... {len(rows) - most} more ..."), *rows[-most // 2 :]])


def faults(records: list[Record]) -> list[tuple[float, str]]:
    """(unix seconds, what) of each worker group that ended before its time, and of each launch that was killed."""
    found = [(r["time"], lines_for(r, Progress(0))[0].split(": ", 1)[-1][:60]) for r in records if r["kind"] in ("group_end", "failure") and lines_for(r, Progress(0))]
    running, last = False, 0.0
    for record in records:
        if record["kind"] == "run_start":
            found += [(last, "the driver was killed")] if running else []
            running = True
        elif record["kind"] == "run_end":
            running = False
        last = record["time"]
    return sorted(found)


def _plan(records: list[Record]) -> dict[str, Any]:
    return next((r["plan"] for r in reversed(records) if r["kind"] == "run_start" and r.get("plan")), {})


def _budget(records: list[Record]) -> dict[str, Any]:
    config: dict[str, Any] = next((r["config"] for r in reversed(records) if r["kind"] == "run_start" and isinstance(r.get("config"), dict)), {})
    return config.get("budget", {})


def _gb(size: float | None) -> float | None:
    return None if size is None else size / 1e9


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def write_report(run: Folder) -> str:
    """Writes the report of a run folder and returns its URI. Raises UserError where there is no journal."""
    if run.size(JOURNAL) is None:
        raise UserError(f"{run.uri}: holds no {JOURNAL}, so it is no run folder; give the folder of a run, run.path/run.name")
    config = run.read("config.yaml").decode() if run.size("config.yaml") is not None else ""
    run.write(REPORT, report(read_journal(run), run.name, config).encode())
    return f"{run.uri}/{REPORT}"


def main(arguments: list[str]) -> int:
    """Makes the report of one run folder; wrong input is one line and exit code 2."""
    try:
        if len(arguments) != 1:
            raise UserError(f"one run folder is wanted, {len(arguments)} arguments are given; python -m raytune70b.tracking.report RUN_FOLDER")
        print(json.dumps({"report": write_report(Folder(arguments[0]))}))
        return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
