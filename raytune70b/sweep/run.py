"""A sweep from beginning to end: stages of trials until nothing is missing, then the answer.

Each trial's result is a file in the sweep's folder as soon as it is there. The same command again reads them, runs what is missing
and comes to the same answer.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray

from raytune70b import cluster
from raytune70b.config import UserError
from raytune70b.schema import Config
from raytune70b.signals import RESUME_ME
from raytune70b.storage import Folder
from raytune70b.sweep import report
from raytune70b.sweep.answer import ALL_DIVERGED, ALL_FAILED, FOUND, Answer, answer
from raytune70b.sweep.budget import affordable, cost, plan_line, progress_line
from raytune70b.sweep.children import Children
from raytune70b.sweep.points import Point, Result, elapsed, read_results, write_result
from raytune70b.sweep.setting import (
    check_price,
    check_trial_workers,
    full_tokens,
    settings,
    space,
    sweep_folder,
    sweep_price,
    trial_config,
    trial_tokens,
)
from raytune70b.sweep.stages import Results, Stage, next_stage
from raytune70b.sweep.trials import room, run_stage
from raytune70b.tracking.console import duration
from raytune70b.tracking.cost import spent
from raytune70b.tracking.journal import read_journal
from raytune70b.training.lease import Lease
from raytune70b.training.prepared import Prepared, prepare_run

EXIT = {FOUND: 0, ALL_FAILED: 1, ALL_DIVERGED: 3}
LIMIT, GO_ON = 3, RESUME_ME
"""Before there was an answer: a limit of the sweep's own is used up, so the same command could only say so again; stopped, so it continues."""
SETTINGS = "settings.json"


def prepare_sweep(config: Config) -> Prepared:
    """Checks the full run's inputs. Its own folder is not looked at: the sweep writes into `sweep.name`."""
    prepared = prepare_run(replace(config, run=replace(config.run, name=config.sweep.name)))
    check_trial_workers(prepared)
    check_price(prepared)
    return prepared


def run(prepared: Prepared, arguments: Sequence[str] = ()) -> int:
    """Runs what is missing, writes the answer and returns the exit code. The Ray session is the caller's if one runs already.

    arguments: the command line, for the next one.
    """
    with Lease(sweep_folder(prepared.config).make()):
        sweep = Sweep(prepared, arguments)
        owner = not ray.is_initialized()
        cluster.start(prepared.config)
        try:
            cluster.uses_gpu(prepared.config)  # it may wait, and here a signal still ends the job at once
            signal.signal(signal.SIGTERM, lambda *_: sweep.stop("SIGTERM"))
            return sweep.run()
        finally:
            if owner:
                ray.shutdown()


class Sweep:
    """One launch of a sweep."""

    def __init__(self, prepared: Prepared, arguments: Sequence[str]):
        self.prepared, self.config, self._arguments = prepared, prepared.config, list(arguments)
        self.folder = sweep_folder(self.config).make()
        check_settings(self.folder, settings(prepared))
        self.space = space(prepared)
        self.results: Results = {point: r for point, r in read_results(self.folder).items() if r.status != "failed"}  # what failed is tried again
        self._unfinished = unfinished_seconds(self.folder, self.results)
        self._begin, self._before = time.monotonic(), elapsed(self.results.values()) + self._unfinished
        self._stopped: str | None = None
        self._room = 1

    def stop(self, reason: str) -> None:
        """Ends the launch soon; safe in a signal handler."""
        self._stopped = self._stopped or reason

    def run(self) -> int:
        tokens, full = trial_tokens(self.prepared), full_tokens(self.prepared)
        self._room = room(self.prepared)
        said = plan_line(self.space.expected, self.space.most, tokens, full, sweep_price(self.prepared))
        self._say(said + (f"; {len(self.results)} are there already" if self.results else ""))
        children = Children(self.prepared, self.folder)
        children.deliver(list(self.results.values()))
        while self._stopped is None and (stage := next_stage(self.space, self.results)) is not None:
            count, limit = affordable(self.config, self.results.values(), len(stage.points), self._room, tokens, full, self._unfinished)
            if count < 1:
                self.stop(f"{limit} pays for no further trial")
                break
            self._run(replace(stage, points=stage.points[:count]))
            children.deliver(list(self.results.values()))
        return self._close(children)

    def _run(self, stage: Stage) -> None:
        self._say(f"{stage.name}: {len(stage.points)} trials, {min(self._room, len(stage.points))} at a time")
        run_stage(self.prepared, self.folder, stage, self.results, self._take, self._over)
        for point in self.results.keys() & set(stage.points):
            self._forget_weights(point)
        if self._stopped is None and any(p not in self.results for p in stage.points):
            self.stop("interrupted" if not self._time_is_up() else f"sweep.hours: {self.config.sweep.hours:g} h are used")

    def _take(self, result: Result, running: int) -> None:
        self.results[result.point] = result
        write_result(self.folder, result)
        self._forget_weights(result.point)
        self._say(progress_line(list(self.results.values()), running, self.space.expected, self._room, result))

    def _forget_weights(self, point: Point) -> None:
        """A trial's weights are of no use once its loss is known. One that is being stopped may still write: then they go after its stage."""
        with contextlib.suppress(OSError):
            (Folder(trial_config(self.prepared, point).run.path) / point.name / "checkpoints").delete()

    def _time_is_up(self) -> bool:
        hours = self.config.sweep.hours
        return hours is not None and self._before + time.monotonic() - self._begin > hours * 3600

    def _over(self) -> bool:
        return self._stopped is not None or self._time_is_up()

    def _close(self, children: Children) -> int:
        found = answer(self.space, self.results)
        code = EXIT.get(found.status, GO_ON)
        if self._stopped is not None:
            limit = self._stopped.startswith("sweep.")
            way_out = f"raise {self._stopped.partition(':')[0]} and run the same command" if limit else "the same command continues"
            found = replace(found, notes=(f"not complete: {self._stopped}; {way_out}", *found.notes))
            code = EXIT.get(found.status, LIMIT) if limit else GO_ON
        report.write(self.prepared, self.folder, self.space, self.results, found)
        files = {n: self.folder.read(n) for n in ("answer.json", "trials.csv", report.BEST, *report.PICTURES) if self.folder.size(n) is not None}
        children.close({"sweep.verdict": found.verdict, "sweep.learning_rate": f"{found.point.learning_rate:.3g}"}, files, "stopped" if code == GO_ON else "finished")
        self._closing_lines(found)
        return code

    def _closing_lines(self, found: Answer) -> None:
        results = list(self.results.values())
        if results:
            print(report.table_text(results), flush=True)
        tokens, full = sum(r.tokens for r in results), full_tokens(self.prepared)
        price = f", ${cost(self.config, results):,.2f}" if self.config.budget.price_per_gpu_hour is not None else ""
        self._say(f"{len(results)} trials, {tokens:,} tokens ({tokens / full:.0%} of the full run's), {duration(elapsed(results))}{price}")
        for line in (found.verdict, *found.notes):
            print(line, flush=True)
        if found.deviation is not None:
            print(f"noise between seeds {found.deviation:.4f}; differences count from {found.margin:.4f}", flush=True)
        if found.fit is not None:
            best = self.folder.read(report.BEST).decode()
            print("now:", report.next_command(self._arguments, best, f"{self.folder.uri}/{report.BEST}", f"{self.folder.name}-best"), flush=True)

    def _say(self, text: str) -> None:
        if not self.config.run.quiet:
            print(text, flush=True)


def unfinished_seconds(folder: Folder, results: Results) -> float:
    """Seconds of trials that were begun in earlier launches and have no result yet."""
    known, runs = {point.name for point in results}, folder / "runs"
    return sum(spent(read_journal(runs / name)).seconds for name in runs.names() if name.startswith("lr") and name not in known)


def check_settings(folder: Folder, now: dict[str, Any]) -> None:
    """Keeps the settings that the losses depend on with the sweep. Raises UserError where an earlier launch had others."""
    if folder.size(SETTINGS) is None:
        folder.write(SETTINGS, json.dumps(now, indent=1).encode())
        return
    before = json.loads(folder.read(SETTINGS))
    changed = [f"{key}: {json.dumps(before.get(key))} -> {json.dumps(value)}" for key, value in now.items() if before.get(key) != json.loads(json.dumps(value))]
    if changed:
        raise UserError(f"{folder.uri} was begun with other settings: {'; '.join(changed[:5])}. Set them back, or choose another sweep.name")
