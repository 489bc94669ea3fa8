"""The driver's watch over a run: records go to the journal at once, and from a thread to all who show them.

`record` may be called from any thread, takes some ten microseconds and never raises: training does not wait for a console, a
tracking server or a full disk. Each sink is fed on its own; one that raises is named once and goes on being fed.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

from raytune70b.config import to_yaml
from raytune70b.schema import Config
from raytune70b.storage import Folder
from raytune70b.tracking import goodput
from raytune70b.tracking.boards import boards
from raytune70b.tracking.console import Console, duration, loss_text, number
from raytune70b.tracking.derive import Accountant, Derived, RunGauges
from raytune70b.tracking.journal import JOURNAL, JournalWriter, Record, lineage
from raytune70b.tracking.mlflow import MlflowMirror, tracking_uri

DRAIN_S = 5.0
LOOK_EVERY_S = 60.0
"""Between looks at the money while no step ends."""


class Sink(Protocol):
    """Whatever takes records; called from one thread, in order."""

    def put(self, record: Record) -> None: ...


class Watch:
    """Watches one launch of a run.

    config, run: the configuration and the run's folder. launch: number of this driver start, from 1
    (`journal.next_launch(read_journal(run))`). total_steps: the step at which the schedule ends.
    """

    def __init__(self, config: Config, run: Folder, launch: int, total_steps: int, more_sinks: tuple[Sink, ...] = ()):
        self._config, self._run, self._launch = config, run, launch
        self._journal = JournalWriter(run)
        self._lock = threading.Lock()
        self._closed = False
        self._failed_sinks: set[str] = set()
        self._queue: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        history = list(self._journal.records)
        self._console = Console(total_steps, config.run.quiet, config.tracking.console_every_s)
        for record in history:
            self._console.progress.take(record)
        self._mlflow = MlflowMirror(config, run, launch, history, self.warn) if config.tracking.mlflow else None
        self._derived = Derived()
        self._accountant = Accountant(config.budget, self._console.progress, history, lambda: self.records, self.record)
        self._boards = boards(config, run, history, self.warn)
        self._gauges = RunGauges(config.run.name, total_steps, config.budget, self._console.progress)
        self._sinks: list[Sink] = [self._console, *([self._mlflow] if self._mlflow else []), self._accountant, self._gauges, *self._boards, *more_sinks]
        self._thread = threading.Thread(target=self._feed, name="watch", daemon=True)
        self._thread.start()
        self._ending = threading.Event()
        self._looking = threading.Thread(target=self._look, name="accounts", daemon=True)
        self._looking.start()

    @property
    def mlflow_run_id(self) -> str | None:
        """The MLflow run id, for checkpoints to keep; None without MLflow or before its first answer."""
        return self._mlflow.run_id if self._mlflow else None

    @property
    def records(self) -> list[Record]:
        """All records so far, those of earlier launches first; a copy."""
        with self._lock:
            return list(self._journal.records)

    def record(self, record: Record) -> None:
        """Takes a record; `time` and `launch` are filled in where they are missing. Never raises, never waits for a sink."""
        try:
            record = {"kind": record["kind"], "time": time.time(), "launch": self._launch} | record
            with self._lock:
                if self._closed:
                    return
                record, warning = self._derived.take(record)
                self._journal.records.append(record)
                self._queue.put(record)  # first: the budget and the console count on it, whatever the disk does
                self._journal.append(record)
            if warning is not None:
                self.warn(warning)
        except Exception:
            self._failed("journal")

    def add_sink(self, sink: Sink) -> None:
        """Feeds a further sink with the records from now on."""
        self._sinks = [*self._sinks, sink]

    def warn(self, text: str) -> None:
        """Records a warning, which the console prints."""
        self.record({"kind": "warning", "text": text})

    def close(self, status: str, reason: str = "", exit_code: int = 0) -> None:
        """Ends the launch: writes the run_end record, lets every sink finish within `tracking.close_timeout_s`, prints the table.

        status: finished, stopped (to be continued by the same command) or failed.
        """
        end = time.monotonic() + self._config.tracking.close_timeout_s
        self._ending.set()
        self._looking.join(DRAIN_S)
        self._drain()
        self._guarded("Accountant", lambda: self._accountant.account(time.time()))
        self.record({"kind": "run_end", "status": status, "reason": reason, "exit_code": exit_code})
        self._thread = threading.Thread(target=self._feed, name="watch-close", daemon=True)
        self._thread.start()
        self._drain()
        pages = {name: page for name, make in self._pages().items() if (page := self._guarded(name, make)) is not None}
        stored = self._guarded("report", lambda: self._store(pages, end))
        lacking = self._guarded("MLflow", lambda: self._close_trackers(status, pages, end))
        with self._lock:
            self._closed = True
            self._guarded("journal", self._journal.close)
        self._guarded("console", self._console.close)
        self._gauges.close()
        for line in [lacking, stored, self._journal.error and f"{JOURNAL} lacks its last records ({self._journal.error})"]:
            if line:
                self._console.say(f"warning: {line}")
        self._guarded("console", lambda: self._console.table(closing_table(self._journal.records, self._config, self._run, status, reason)))

    def _pages(self) -> dict[str, Callable[[], bytes]]:
        """What makes the goodput timeline and the report, each by itself: a picture that fails leaves the numbers."""
        return {"goodput.json": self._goodput, "report.html": self._report} if self._config.tracking.report else {}

    def _goodput(self) -> bytes:
        intervals = goodput.timeline(self.records)
        times = {"seconds": goodput.totals(intervals), "goodput": goodput.goodput(intervals), "intervals": [asdict(i) for i in intervals]}
        return json.dumps(times, indent=1).encode()

    def _report(self) -> bytes:
        from raytune70b.tracking.report import report  # matplotlib takes a second to import

        return report(self.records, self._run.name, to_yaml(self._config)).encode()

    def _store(self, pages: dict[str, bytes], end: float) -> str | None:
        """Writes the pages to the run folder, again until `end` (monotonic) while its storage refuses; returns what is lacking, as a line."""
        wait = 0.5
        for name, content in pages.items():
            while True:
                try:
                    self._run.write(name, content)
                    break
                except OSError as error:
                    if time.monotonic() + wait > end:
                        return f"{self._run.uri}/{name} could not be written ({error}); python -m raytune70b.tracking.report {self._run.uri} makes the report again"
                    time.sleep(wait)
                    wait *= 2
        return None

    def _close_trackers(self, status: str, pages: dict[str, bytes], end: float) -> str | None:
        """Ends MLflow and the boards by `end` (monotonic); returns what MLflow lacks, as a line."""
        for name, content in pages.items():
            if self._mlflow is not None:
                self._mlflow.put_artifact(name, content)
        lacking = self._mlflow.close(status, max(1.0, end - time.monotonic())) if self._mlflow is not None else None
        for board in self._boards:
            board.close(status, max(1.0, end - time.monotonic()))
        return lacking

    def _drain(self) -> None:
        """Lets the sinks take what is queued; a stuck one (a blocked terminal) is not waited for longer than DRAIN_S."""
        self._queue.put(None)
        self._thread.join(DRAIN_S)

    def _feed(self) -> None:
        while (record := self._queue.get()) is not None:
            for sink in self._sinks:
                self._guarded(type(sink).__name__, lambda sink=sink, record=record: sink.put(record))  # type: ignore[misc]

    def _look(self) -> None:
        while not self._ending.wait(LOOK_EVERY_S):
            self._guarded("Accountant", self._accountant.look)

    def _guarded(self, name: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception:
            self._failed(name)

    def _failed(self, name: str) -> None:
        """Names a failing sink once; the journal is whole without it."""
        if name not in self._failed_sinks:
            self._failed_sinks.add(name)
            print(f"warning: {name} failed, training goes on without it: {traceback.format_exc(limit=3)}", flush=True)


def closing_table(records: list[Record], config: Config, run: Folder, status: str, reason: str = "") -> list[tuple[str, str]]:
    """Rows (name, value) of the table at the end of a launch, from the whole journal."""
    steps, validations = lineage(records, "step"), lineage(records, "validation")
    rows = [("run", f"{config.run.name}: {status}{f' ({reason})' if reason else ''}")]
    if steps:
        counted = [s for s in steps if not s.get("skipped")]
        tokens, seconds = sum(s["tokens"] for s in steps), sum(s["seconds"] for s in steps)
        rows += [
            ("steps", f"{steps[-1]['step']}" + (f", {len(steps) - len(counted)} skipped" if len(counted) < len(steps) else "")),
            ("train loss", f"{loss_text(steps[0]['loss'])} -> {loss_text(steps[-1]['loss'])}"),
        ]
        if validations:
            rows.append(("validation loss", validation_text(validations)))
        rows += [
            ("tokens", f"{tokens:,} of which {sum(s['trained_tokens'] for s in steps):,} trained"),
            ("tokens/s", number(tokens / seconds) if seconds else "-"),
        ]
    intervals = goodput.timeline(records)
    spent = {label: seconds for label, seconds in goodput.totals(intervals).items() if seconds > 0}
    rows += [
        ("time", ", ".join(f"{label} {duration(seconds) if seconds >= 60 else f'{seconds:.1f}s'}" for label, seconds in spent.items())),
        ("goodput", f"{goodput.goodput(intervals):.1%} of {duration(goodput.running_seconds(intervals))}"),
        ("run folder", run.uri),
        ("checkpoints", f"{run.uri}/checkpoints"),
    ]
    if config.tracking.report:
        rows.append(("report", f"{run.uri}/report.html"))
    if config.tracking.mlflow:
        rows.append(("MLflow", f"{tracking_uri(config)}, experiment {config.tracking.experiment}"))
    return rows


def validation_text(validations: list[Record]) -> str:
    """First and last validation loss and the change."""
    first, last = validations[0]["loss"], validations[-1]["loss"]
    if len(validations) < 2 or not first or last is None:
        return loss_text(last)
    return f"{loss_text(first)} -> {loss_text(last)} ({last / first - 1:+.1%})"
