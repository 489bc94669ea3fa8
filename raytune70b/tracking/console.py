"""What a person sees while a run goes on: a live panel on a terminal, plain lines in a log, faults and resizes in plain words.

`lines_for` is a pure function of a record and what came before; `Console` prints. `run.quiet` leaves warnings and the closing
table only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console as RichConsole
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from raytune70b.tracking.journal import Record
from raytune70b.tracking.series import tokens_per_s

SMOOTHING = 0.1
"""Weight of the newest step in the shown rate and in the time left."""


@dataclass
class Progress:
    """What the progress line needs beside the step itself."""

    total_steps: int
    world_size: int = 0
    step: int = 0
    step_seconds: float = 0.0
    """Smoothed seconds from one step to the next, saves and validations included."""
    rate: float = 0.0
    """Smoothed tokens/s."""
    trained: bool = False
    measured: bool = False
    """Whether `step_seconds` is known from more than the first step of a group, which starts NCCL, grows the allocator and compiles."""
    steps_of_group: int = 0
    last: Record = field(default_factory=dict)
    cost: Record = field(default_factory=dict)
    validation: float | None = None
    attempt: tuple[int, int] = (0, 0)

    def take(self, record: Record) -> None:
        if record["kind"] == "group_start":
            self.world_size = record["world_size"]
        elif record["kind"] == "group_ready":
            self.step = record["resumed_step"]
        elif record["kind"] == "step":
            self._step(record)
        elif record["kind"] == "validation":
            self.validation = record["loss"]
        elif record["kind"] == "cost":
            self.cost = record
        elif record["kind"] == "run_start":
            self.total_steps = record.get("total_steps", self.total_steps)

    def _step(self, record: Record) -> None:
        attempt = (record.get("launch", 0), record.get("attempt", 0))
        self.steps_of_group = self.steps_of_group + 1 if self.trained and attempt == self.attempt else 1
        if self.steps_of_group > 1 or not self.measured:  # a group's first step says little: the speed before it stands until the second
            follows = self.steps_of_group > 2 and record["step"] == self.step + 1
            seconds = max(record["seconds"], record["time"] - self.last["time"]) if follows else record["seconds"]
            weight = SMOOTHING if self.steps_of_group > 2 else 1.0
            self.step_seconds += weight * (seconds - self.step_seconds)
            self.rate += weight * (tokens_per_s(record) - self.rate)
            self.measured = self.measured or self.steps_of_group > 1
        self.step, self.attempt, self.last, self.trained = record["step"], attempt, record, True

    @property
    def seconds_left(self) -> float:
        return max(0, self.total_steps - self.step) * self.step_seconds

    @property
    def forecast(self) -> float | None:
        """`seconds_left` once it is worth reckoning with; None before a second step."""
        return self.seconds_left if self.measured else None


def duration(seconds: float) -> str:
    """Seconds for people: 8s, 3m20s, 5h04m, 2d03h."""
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    if s < 172800:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    return f"{s // 86400}d{s % 86400 // 3600:02d}h"


def number(value: float) -> str:
    """A count for people: 950, 12.3k, 4.56M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.0f}"


def loss_text(value: Any) -> str:
    return "not finite" if value is None or value != value else f"{value:.4f}"


def progress_line(progress: Progress) -> str:
    """step 120/1000  loss 3.2104  lr 2.9e-03  13.4k tokens/s  2 workers  ETA 3m20s  [cost ...]"""
    last = progress.last
    parts = [
        f"step {progress.step}/{progress.total_steps}", f"loss {loss_text(last['loss'])}", f"lr {last['learning_rate']:.2e}",
        f"{number(progress.rate)} tokens/s", f"{last['world_size']} workers", f"ETA {duration(progress.seconds_left)}",
    ]  # fmt: skip
    if last.get("skipped"):
        parts.insert(2, "SKIPPED")
    return "  ".join(parts + cost_parts(progress.cost))


def cost_parts(cost: Record) -> list[str]:
    """What was spent and will have been spent, in money where there is a price and else in hours; [] without a price or limit, and before the
    first cost record."""
    if "usd" not in cost and "budget_share" not in cost:
        return []
    unit, show = ("usd", lambda usd: f"${usd:,.2f}") if "usd" in cost else ("hours", lambda hours: duration(3600 * hours))
    spent, end = cost.get(unit), cost.get(f"projected_{unit}")
    return [] if spent is None else [f"{show(spent)} so far" + (f", {show(end)} at the end" if end is not None else "")]


def lines_for(record: Record, progress: Progress) -> list[str]:
    """What a record other than a step is worth telling. `progress`: the state before it."""
    kind = record["kind"]
    if kind == "group_start":
        return [_group_start(record, progress)]
    if kind == "group_ready":
        return [_group_ready(record, progress)]
    if kind == "failure":
        return [f"worker {record['rank']} on {record['host']} failed after step {record['step']}: {str(record['error']).strip().splitlines()[0][:300]}"]
    if kind == "group_end" and record.get("reason") not in (None, "", "finished", "stopped"):
        return [f"the workers stopped after step {progress.step}: {str(record['reason']).strip().splitlines()[-1][:300]}"]
    if kind == "wait":
        return [f"waiting for machines: {record.get('reason', '')}".rstrip(": ")]
    if kind == "validation":
        return [f"validation at step {record['step']}: loss {loss_text(record['loss'])} ({record['seconds']:.1f} s)"]
    if kind == "evaluation":
        named = (f"{name.replace('_', ' ')} {record[name]:.3g}" for name in ("exact_match", "token_f1", "rougeL", "bleu", "chrf"))
        return [f"answers of step {record['step']}: {', '.join(named)} ({record['answers']} answers in {record['seconds']:.1f} s)"]
    if kind == "checkpoint":
        return [f"checkpoint of step {record['step']}: {number(record['bytes'])}B in {record['seconds']:.1f} s, training stood still for {record['stall_s']:.2f} s"]
    if kind == "checkpoint_failed":
        return [f"checkpoint of step {record['step']} failed, training goes on: {record['reason']}"]
    if kind == "warning":
        return [f"warning: {record['text']}"]
    return []


def _group_start(record: Record, progress: Progress) -> str:
    size, hosts = record["world_size"], set(record.get("hosts") or [])
    where = f" on {len(hosts)} machines" if len(hosts) > 1 else ""
    if progress.world_size and progress.world_size != size:
        return f"resized from {progress.world_size} to {size} workers{where}"
    return f"{'back with' if progress.world_size else 'started'} {size} workers{where}"


def _group_ready(record: Record, progress: Progress) -> str:
    resumed = record["resumed_step"]
    start = f"training goes on after step {resumed}" if resumed else "training starts at step 1"
    if progress.trained and progress.step > resumed:
        start += f"; steps {resumed + 1} to {progress.step} are trained again"
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in (record.get("seconds") or {}).items())
    return start + (f" ({parts})" if parts else "")


class Console:
    """Prints a run. `put` for each record, `close` before the closing table."""

    def __init__(self, total_steps: int, quiet: bool, every_s: float, console: RichConsole | None = None):
        self._console = console or RichConsole(highlight=False, soft_wrap=True)
        self._quiet, self._every_s = quiet, every_s
        self.progress = Progress(total_steps)
        self._printed_at = 0.0
        self._printed_step = -1
        self._live: Live | None = None

    def put(self, record: Record) -> None:
        lines = [] if self._quiet and record["kind"] not in ("warning", "checkpoint_failed") else lines_for(record, self.progress)
        self.progress.take(record)
        for line in lines:
            self.say(line)
        if record["kind"] == "step" and not self._quiet:
            self._show_step()
        elif record["kind"] == "cost" and self._live is not None:  # money goes on while no step ends
            self._live.update(panel(self.progress))

    def say(self, line: str) -> None:
        self._console.print(Text(line))

    def _show_step(self) -> None:
        progress, now = self.progress, time.monotonic()
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, refresh_per_second=4, transient=True)
                self._live.start()
            self._live.update(panel(progress))
        elif now - self._printed_at >= self._every_s or progress.step == progress.total_steps:
            self._printed_at, self._printed_step = now, progress.step
            self.say(progress_line(progress))

    def close(self) -> None:
        """Ends the live panel; in a log the last step is printed if its turn had not come."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self.progress.trained and not self._quiet and self._printed_step != self.progress.step:
            self.say(progress_line(self.progress))

    def table(self, rows: list[tuple[str, str]]) -> None:
        """The closing table."""
        width = max(len(name) for name, _ in rows)
        self.say("\n".join(f"{name.ljust(width)}  {value}" for name, value in rows))


def panel(progress: Progress) -> Panel:
    """The live panel: one bar and the figures of the progress line, one a row."""
    last, share = progress.last, progress.step / max(1, progress.total_steps)
    filled = round(40 * min(1.0, share))
    rows = Table.grid(padding=(0, 2))
    rows.add_row("step", f"{'█' * filled}{'░' * (40 - filled)} {progress.step}/{progress.total_steps}")
    rows.add_row("loss", loss_text(last["loss"]) + (f"   validation {loss_text(progress.validation)}" if progress.validation is not None else ""))
    rows.add_row("learning rate", f"{last['learning_rate']:.2e}   gradient norm {loss_text(last.get('grad_norm'))}")
    rows.add_row("speed", f"{number(progress.rate)} tokens/s with {last['world_size']} workers   {last['seconds']:.2f} s a step")
    rows.add_row("time left", duration(progress.seconds_left))
    for part in cost_parts(progress.cost):
        rows.add_row("cost", part)
    return Panel(rows, title="raytune70b", width=84)
