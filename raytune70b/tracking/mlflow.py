"""The run in MLflow: one MLflow run for a run folder, whatever restarts, beside training and never in its way.

A thread takes the journal's records and delivers them in batches. A server that is down, slow or locked is asked again later;
until then records wait in memory (about a kilobyte a step) and in the journal, and the next launch delivers what the last
one could not. Before the first batch, and after every batch that failed, the server is asked how far it got, so a step that was
delivered, or is trained again after a fault, is not logged twice. Parameters, lineage, tags and each file are delivered by
themselves: one that is refused (an artifact store without credentials) is tried again and holds up nothing else. A run that
somebody has deleted on the server is made anew and filled from the journal. What cannot be delivered by the end is said in one line.

`RUN/mlflow.json` holds a key that was drawn before the MLflow run was created, and the run ids by tracking URI. MLflow
itself is imported in the thread: that takes seconds.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from raytune70b.config import to_dict, to_yaml
from raytune70b.schema import Config
from raytune70b.storage import Folder
from raytune70b.tracking.entities import dataset, metrics, note, parameters, shortened
from raytune70b.tracking.journal import Record, lineage, read_journal
from raytune70b.tracking.series import Point, anchor, place, point, series_of

IDS = "mlflow.json"
BATCH = 900
"""Metrics in a request; MLflow takes 1,000."""
CADENCE_S = 3.0
LONGEST_WAIT_S = 30.0
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
PLAN_KEYS = ("plan", "total_steps", "steps_per_epoch", "tokens_per_step", "parameters", "trainable")
TRACKED_KINDS = ("step", "validation", "evaluation", "checkpoint", "worker", "cost")


def tracking_uri(config: Config) -> str | None:
    """The MLflow tracking URI of a configuration; None: no MLflow."""
    if config.tracking.mlflow != "sqlite":
        return config.tracking.mlflow or None
    return f"sqlite:///{Folder(config.run.path).local}/mlflow.db"


def experiment_id(client: Any, config: Config) -> str:
    """The id of `tracking.experiment`, which is made if there is none. The artifacts of a database file lie beside it, not in the current folder."""
    name, uri = config.tracking.experiment, tracking_uri(config) or ""
    found = client.get_experiment_by_name(name)
    if found is not None:
        return found.experiment_id
    file = Path(uri.removeprefix("sqlite:///")).absolute() if uri.startswith("sqlite:///") else None
    return client.create_experiment(name, artifact_location=f"{file.parent}/mlflow-artifacts" if file else None, tags={"mlflow.experimentKind": "custom_model_development"})


class Task(NamedTuple):
    """What is delivered beside metrics: its name for people, and the request."""

    name: str
    run: Callable[[], None]


class MlflowMirror:
    """Mirrors a run's journal to MLflow. `history`: the records of earlier launches; `notify` is told of trouble, once."""

    def __init__(self, config: Config, run: Folder, launch: int, history: list[Record], notify: Callable[[str], None]):
        self.uri = tracking_uri(config)
        self._config, self._run, self._launch, self._notify = config, run, launch, notify
        self._points: deque[Point] = deque()
        self._tasks: deque[Task] = deque()
        self._tasks_due, self._tasks_wait = 0.0, 1.0
        self._checkpoints = {r["step"]: r["path"] for r in lineage(history, "checkpoint")}
        self._delivered: dict[str, set[int]] | None = None
        self._client: Any = None
        self._run_id = self._known()["runs"].get(self.uri)
        self._filled_id: str | None = None
        """The MLflow run that gets what this launch puts."""
        self._start: Record | None = None
        self._trouble: str | None = None
        self._told: set[str] = set()
        self._closing = threading.Event()
        for record in history:
            self._queue(record)
        self._thread = threading.Thread(target=self._loop, name="mlflow", daemon=True)
        self._thread.start()

    @property
    def run_id(self) -> str | None:
        """The MLflow run's id; None in a run's first launch until the server has answered."""
        return self._run_id

    def put(self, record: Record) -> None:
        """Takes a record; returns at once."""
        if record["kind"] == "run_start":
            self._start = record
            self._tasks.extend(self._describing(record))
        elif record["kind"] == "checkpoint":
            self._checkpoints[record["step"]] = record["path"]
            self._tag_checkpoints(record["path"])
        self._queue(record)

    def put_artifact(self, name: str, content: bytes) -> None:
        """Stores a file with the MLflow run, later; returns at once."""
        self._tasks.append(Task(name, lambda: self._artifact(name, content)))

    def put_tags(self, tags: dict[str, str]) -> None:
        """Sets tags, later; returns at once."""
        self._tasks.append(Task("tags", lambda: self._tag(tags)))

    def close(self, status: str, deadline_s: float) -> str | None:
        """Delivers what is left and ends the MLflow run. Returns one line when that was not possible by the deadline."""
        self._tasks.append(Task("the run's status", lambda: self._client.set_terminated(self._run_id, STATUS[status])))
        self._closing.set()
        self._thread.join(deadline_s)
        if not self._thread.is_alive():
            return None
        left = len({(p.series, p.place) for p in list(self._points)})
        names = list(dict.fromkeys(task.name for task in list(self._tasks)))
        lacking = ([f"{left} entries"] if left or not names else []) + (names if not left else [])
        shown = ", ".join(lacking[:3]) + (f" and {len(lacking) - 3} more" if len(lacking) > 3 else "")
        why = self._trouble or f"not done within {deadline_s:.0f} s"
        return f"MLflow at {self.uri} lacks {shown} ({why}); they are in the run folder, and the same command again delivers them"

    def _tag_checkpoints(self, newest: str) -> None:
        self.put_tags({"checkpoint.newest": newest, "mlflow.note.content": note(self._run, self._checkpoints)})

    def _queue(self, record: Record) -> None:
        if record["kind"] in TRACKED_KINDS:
            made = point(record)
            if made is not None:
                self._points.append(made)

    def _loop(self) -> None:
        wait = 1.0
        while True:
            try:
                if self._client is None:
                    self._connect()
                self._deliver_points()
                self._trouble = self._trouble if self._tasks_due else None
                self._deliver_tasks()
                wait = 1.0
                if self._closing.is_set() and not self._tasks and not self._points:
                    return
                if self._closing.wait(CADENCE_S) and self._tasks:
                    time.sleep(0.5)  # refused: the last tries, until the deadline
            except Exception as error:  # whatever the server or its client does, training goes on
                self._delivered = self._client = None  # the run may be gone, too
                self._trouble = _line(error)
                self._tell("metrics", f"MLflow at {self.uri} cannot be reached ({self._trouble}); training goes on, the metrics follow later")
                if self._closing.wait(wait):
                    time.sleep(0.5)
                wait = min(2 * wait, LONGEST_WAIT_S)

    def _tell(self, key: str, text: str) -> None:
        if key not in self._told:
            self._told.add(key)
            self._notify(text)

    def _connect(self) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # this loop is the retry
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
        from mlflow import MlflowClient

        for name in ("mlflow", "alembic"):  # importing it set them to INFO
            logging.getLogger(name).setLevel(logging.WARNING)
        client = MlflowClient(tracking_uri=self.uri)
        self._run_id = self._find_run(client)
        if not self._closing.is_set():
            client.update_run(self._run_id, status="RUNNING")
        if self._filled_id not in (None, self._run_id):
            self._refill()
        self._filled_id, self._client = self._run_id, client

    def _refill(self) -> None:
        """Queues again what a run got that somebody has deleted since; what is in the queue twice is delivered once."""
        made = [p for record in read_journal(self._run) if record["kind"] in TRACKED_KINDS and (p := point(record)) is not None]
        self._points.extendleft(reversed(made))
        if self._start is not None:
            self._tasks.extendleft(reversed(self._describing(self._start)))
        if self._checkpoints:
            self._tag_checkpoints(self._checkpoints[max(self._checkpoints)])

    def _find_run(self, client: Any) -> str:
        """This run folder's MLflow run on this server, made if there is none."""
        known = self._known()
        run_id = known["runs"].pop(self.uri, None)
        if run_id is not None and is_there(client, run_id):
            return run_id
        self._run.write(IDS, json.dumps(known).encode())  # the key first: a kill in between leaves no second run
        experiment = experiment_id(client, self._config)
        found = client.search_runs([experiment], f"tags.`raytune70b.key` = '{known['key']}'")
        if found:
            run_id = found[0].info.run_id
        else:
            tags = {"raytune70b.key": known["key"], "raytune70b.run_folder": self._run.uri, "mlflow.user": os.environ.get("USER", "unknown"), "mlflow.source.name": sys.argv[0]}
            if self._config.tracking.parent_run:
                tags["mlflow.parentRunId"] = self._config.tracking.parent_run
            run_id = client.create_run(experiment, run_name=self._run.name, tags=tags).info.run_id
        known["runs"][self.uri] = run_id
        self._run.write(IDS, json.dumps(known).encode())
        return run_id

    def _known(self) -> dict[str, Any]:
        return json.loads(self._run.read(IDS)) if self._run.size(IDS) is not None else {"key": uuid.uuid4().hex, "runs": {}}

    def _deliver_tasks(self) -> None:
        """Each task by itself, with the metrics that came meanwhile before it; what is refused is tried again later. Raises what metrics do."""
        if time.monotonic() < self._tasks_due and not self._closing.is_set():
            return
        refused: deque[Task] = deque()
        try:
            for _ in range(len(self._tasks)):
                self._deliver_points()
                task = self._tasks.popleft()
                try:
                    task.run()
                except Exception as error:
                    refused.append(task)
                    self._trouble = _line(error)
                    self._tell("tasks", f"MLflow at {self.uri} did not take {task.name} ({self._trouble}); training goes on, it is tried again")
        finally:
            self._tasks.extendleft(reversed(refused))
        self._tasks_due = time.monotonic() + self._tasks_wait if refused else 0.0
        self._tasks_wait = min(2 * self._tasks_wait, LONGEST_WAIT_S) if refused else 1.0

    def _deliver_points(self) -> None:
        if self._delivered is None:
            self._delivered = self._ask_delivered()
        while self._points:
            batch, taken = self._batch()
            if batch:
                self._client.log_batch(self._run_id, metrics=[m for p in batch for m in metrics(p)])
            for p in batch:
                self._delivered.setdefault(p.series, set()).add(p.place)
            for _ in range(taken):  # only now: a request that fails leaves them for the next try
                self._points.popleft()

    def _ask_delivered(self) -> dict[str, set[int]]:
        """The places that the server holds of each series; a point is one request, so one of its metrics speaks for all."""
        every = {series_of(name) for name in self._client.get_run(self._run_id).data.metrics}
        return {s: {place(s, m.step, m.timestamp) for m in self._client.get_metric_history(self._run_id, anchor(s))} for s in every}

    def _batch(self) -> tuple[list[Point], int]:
        """The next points that the server lacks, as many as one request may carry, and how many of the queue they and the others are."""
        delivered, chosen = self._delivered or {}, set()
        batch: list[Point] = []
        size = taken = 0
        for p in list(itertools.islice(self._points, BATCH)):
            if p.place not in delivered.get(p.series, ()) and (p.series, p.place) not in chosen:
                if size + len(p.values) > BATCH:
                    break
                batch.append(p)
                size += len(p.values)
                chosen.add((p.series, p.place))
            taken += 1
        return batch, taken

    def _describing(self, record: Record) -> list[Task]:
        """The tasks that deliver parameters, data set and configuration of this launch. `record`: its run_start."""
        flat = parameters(to_dict(self._config)) | parameters({k: v for k, v in record.items() if k in PLAN_KEYS}, "plan.")
        short, texts = shortened(flat)
        tasks, yaml = [Task("parameters", lambda: self._log_changes(short))], to_yaml(self._config)
        if record.get("data"):
            tasks.append(Task("the data set", lambda: self._client.log_inputs(self._run_id, datasets=[dataset(record["data"])])))
        files = {**texts, "config.yaml": yaml, f"launches/config-{self._launch}.yaml": yaml}
        return tasks + [Task(name, partial(self._log_text, name, text)) for name, text in files.items()]

    def _log_text(self, name: str, text: str) -> None:
        self._client.log_text(self._run_id, text, name)

    def _log_changes(self, short: dict[str, str]) -> None:
        """The parameters that the run lacks; those of another value as a tag, for MLflow refuses another value of a parameter."""
        known = self._client.get_run(self._run_id).data.params
        self._log_parameters({k: v for k, v in short.items() if k not in known})
        changed = [f"{k}: {known[k]} -> {v}"[:500] for k, v in short.items() if known.get(k, v) != v]
        if changed:
            self._tag({f"changed_in_launch_{self._launch}": "\n".join(changed)[:5000]})

    def _log_parameters(self, flat: dict[str, str]) -> None:
        from mlflow.entities import Param

        every = [Param(key, value) for key, value in flat.items()]
        for start in range(0, len(every), 100):
            self._client.log_batch(self._run_id, params=every[start : start + 100])

    def _artifact(self, name: str, content: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_bytes(content)
            self._client.log_artifact(self._run_id, str(path))

    def _tag(self, tags: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        self._client.log_batch(self._run_id, tags=[RunTag(key, value) for key, value in tags.items()])


def is_there(client: Any, run_id: str) -> bool:
    """Whether the server has the run and nobody has deleted it. Raises what the client raises where that cannot be said."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id).info.lifecycle_stage == "active"
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
