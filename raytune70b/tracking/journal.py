"""The journal of a run: one JSON record a line, every event of every launch, in the order of arrival.

It is the only source of what the run's sinks show (MLflow, metrics, report, goodput), so each of them can be made again from
it. A record has `kind`, `time` (unix seconds), `launch` (start of the driver, 1, 2, ...) and, from the workers, `attempt`
(start of a worker group within the launch). Kinds: run_start, run_end, group_start, group_ready (with the step at which the
group goes on), group_end, failure, wait, step, validation, evaluation, checkpoint, checkpoint_failed, worker, cost, warning.

On a local or shared folder a record is one appended line, a few microseconds; an object store cannot append, so a thread
uploads the whole file when it has changed, at most every `UPLOAD_EVERY_S` and at the end. A full disk or a refusing store
loses nothing while the driver lives: lines wait in memory and go out with the next one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Iterable
from typing import Any

from raytune70b.storage import Folder

Record = dict[str, Any]
JOURNAL = "journal.jsonl"
UPLOAD_EVERY_S = 20.0


def read_journal(run: Folder) -> list[Record]:
    """All records of a run, [] where there is no journal.

    A last line without its end (the driver was killed in mid-write) is left out. A damaged line elsewhere is replaced by a
    warning record that names it.
    """
    if run.size(JOURNAL) is None:
        return []
    return parse_journal(run.read(JOURNAL))


def parse_journal(content: bytes) -> list[Record]:
    """Records of a journal's bytes; see `read_journal`."""
    lines = content.split(b"\n")[:-1]  # what follows the last line's end is torn
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or "kind" not in record:
                raise ValueError("no record")
        except ValueError:
            when = records[-1]["time"] if records else 0.0
            record = {"kind": "warning", "time": when, "launch": 0, "text": f"{JOURNAL} line {number} is damaged and left out"}
        records.append(record)
    return records


def next_launch(records: Iterable[Record]) -> int:
    """The number of the driver start that follows these records: 1 for a new run."""
    return 1 + max((r.get("launch", 0) for r in records), default=0)


def in_order(records: Iterable[Record]) -> list[Record]:
    """The records with those of one worker group in the order in which they were sent: on the way they may overtake each other.

    Others keep their places, for clocks of machines may differ; a worker group's records that count come from one worker.
    """
    ordered = list(records)
    places: dict[tuple[int, int], list[int]] = {}
    for place, record in enumerate(ordered):
        if "attempt" in record and record["kind"] != "worker":
            places.setdefault((record["launch"], record["attempt"]), []).append(place)
    for own in places.values():
        for place, record in zip(own, sorted((ordered[p] for p in own), key=lambda r: r["time"]), strict=True):
            ordered[place] = record
    return ordered


def lineage(records: Iterable[Record], kind: str) -> list[Record]:
    """The records of one kind that count, in step order, one a step: the run's history as if nothing had failed.

    A worker group that resumes at step r takes back whatever was recorded after r; of several records of a step the last counts.
    Kinds: step, validation, evaluation, checkpoint.
    """
    kept: dict[int, Record] = {}
    for record in in_order(records):
        if record["kind"] == "group_ready":
            resumed = record["resumed_step"]
            kept = {step: r for step, r in kept.items() if step <= resumed}
        elif record["kind"] == kind:
            kept[record["step"]] = record
    return [kept[step] for step in sorted(kept)]


def to_line(record: Record) -> bytes:
    """A record as a line of standard JSON: not-a-number and infinities become null, whatever has no JSON form its text."""
    return json.dumps(_finite(record), separators=(",", ":"), ensure_ascii=False, default=str).encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


class JournalWriter:
    """Appends records to a run's journal. Not thread-safe but for its own upload thread: `Watch` calls it under a lock."""

    def __init__(self, run: Folder):
        self._run = run
        run.make()
        content = run.read(JOURNAL) if run.size(JOURNAL) is not None else b""
        whole = content.rfind(b"\n") + 1  # a torn last line is cut off
        self.records = parse_journal(content[:whole])
        self._waiting: list[bytes] = []
        self._size = whole
        self._file = -1
        self._content = bytearray()
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._uploading = threading.Lock()
        self.error: str | None = None
        if run.local is not None:
            self._file = os.open(run.path(JOURNAL), os.O_WRONLY | os.O_CREAT)
            os.ftruncate(self._file, whole)
            os.lseek(self._file, whole, os.SEEK_SET)
        else:
            self._content += content[:whole]
            threading.Thread(target=self._upload_loop, name="journal-upload", daemon=True).start()

    def append(self, record: Record) -> None:
        """Writes a record, and those that could not be written before. Never raises for storage; `error` tells."""
        self._waiting.append(to_line(record))
        if self._file < 0:
            self._content += self._waiting.pop()
            self._changed.set()
            return
        data = b"".join(self._waiting)
        try:
            os.lseek(self._file, self._size, os.SEEK_SET)
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            self.error = str(error)
            with contextlib.suppress(OSError):  # a network file system may refuse this too
                os.ftruncate(self._file, self._size)  # no half line stays behind
            return
        self._size += len(data)
        self._waiting.clear()
        self.error = None

    def _upload_loop(self) -> None:
        while not self._closing.wait(UPLOAD_EVERY_S):
            self._upload()

    def _upload(self) -> None:
        with self._uploading:
            if not self._changed.is_set():
                return
            self._changed.clear()
            try:
                self._run.write(JOURNAL, bytes(self._content))
                self.error = None
            except OSError as error:
                self.error = str(error)
                self._changed.set()

    def _upload_last(self, end: float) -> None:
        self._upload()
        while self._changed.is_set() and time.monotonic() < end:
            time.sleep(0.5)
            self._upload()

    def close(self, deadline_s: float = 10.0) -> None:
        """Flushes to stable storage, for at most `deadline_s`. `error` stays set when the last records could not be written."""
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            return
        self._closing.set()
        last = threading.Thread(target=self._upload_last, args=(time.monotonic() + deadline_s,), name="journal-close", daemon=True)
        last.start()
        last.join(deadline_s)
        if self._changed.is_set() and self.error is None:
            self.error = f"the upload did not end within {deadline_s:.0f} s"
