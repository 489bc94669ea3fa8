"""The sweep in MLflow: a parent run, and a child run for every trial with its parameters and curves.

The trials keep journals only; the driver delivers them when a stage has ended, through the same mirror as a full run's. What
could not be delivered is delivered by the next launch.
"""

from __future__ import annotations

import time
from dataclasses import replace

from raytune70b.storage import Folder
from raytune70b.sweep.points import Point, Result
from raytune70b.sweep.setting import trial_config
from raytune70b.tracking.journal import read_journal
from raytune70b.tracking.mlflow import MlflowMirror, tracking_uri
from raytune70b.training.prepared import Prepared

STATUS = {"finished": "finished", "stopped": "stopped", "diverged": "failed", "failed": "failed"}


class Children:
    """Delivers trials under a parent run; without MLflow it does nothing."""

    def __init__(self, prepared: Prepared, folder: Folder):
        self._prepared, self._config = prepared, prepared.config
        self._done: set[Point] = set()
        self._parent = MlflowMirror(self._config, folder, 1, [], _say) if self._config.tracking.mlflow else None

    def deliver(self, results: list[Result]) -> None:
        """Delivers the trials that this launch has not yet delivered."""
        parent = self._parent_id()
        for result in results:
            if parent is not None and result.point not in self._done:
                self._done.add(result.point)
                self._deliver(result, parent)

    def _deliver(self, result: Result, parent: str) -> None:
        config = trial_config(self._prepared, result.point)
        tracking = replace(config.tracking, mlflow=tracking_uri(self._config), parent_run=parent)
        config = replace(config, tracking=tracking)
        run = Folder(config.run.path) / config.run.name
        records = read_journal(run)
        mirror = MlflowMirror(config, run, 1, records, _say)
        for record in [r for r in records if r["kind"] == "run_start"][-1:]:
            mirror.put({**record, "kind": "run_start"})
        mirror.put_tags({"sweep.status": result.status, "sweep.reason": result.reason[:500]})
        lacking = mirror.close(STATUS[result.status], self._config.tracking.close_timeout_s)
        if lacking:
            _say(lacking)

    def _parent_id(self) -> str | None:
        """The parent's MLflow run id, waited for as long as a run waits for its trackers."""
        end = time.monotonic() + self._config.tracking.close_timeout_s
        while self._parent is not None and self._parent.run_id is None and time.monotonic() < end:
            time.sleep(0.1)
        return self._parent.run_id if self._parent is not None else None

    def close(self, tags: dict[str, str], files: dict[str, bytes], status: str) -> None:
        """Ends the parent run with the answer and its files."""
        if self._parent is None:
            return
        self._parent.put_tags(tags)
        for name, content in files.items():
            self._parent.put_artifact(name, content)
        lacking = self._parent.close(status, self._config.tracking.close_timeout_s)
        if lacking:
            _say(lacking)


def _say(text: str) -> None:
    print(f"warning: {text}", flush=True)
