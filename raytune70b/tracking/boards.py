"""Weights & Biases and TensorBoard, by config: the same metrics by the same names as in MLflow.

Both are fed from a thread of their own, so neither's start nor its writes stand in anyone's way. TensorBoard's event files are
written anew from the journal at each launch. Weights & Biases keeps one run (its id in `RUN/wandb.json`) and is given
only steps that the journal did not hold before this launch. Either way each step is there once.
"""

from __future__ import annotations

import importlib.util
import json
import queue
import shutil
import threading
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from raytune70b.config import ConfigError, to_dict
from raytune70b.schema import Config
from raytune70b.storage import Folder
from raytune70b.tracking.journal import Record
from raytune70b.tracking.series import Point, point

WANDB_ID = "wandb.json"


class Board(Protocol):
    def write(self, p: Point) -> None: ...

    def close(self, status: str) -> None: ...


class TensorBoard:
    """Event files in RUN/tensorboard; `tensorboard --logdir` shows them."""

    def __init__(self, run: Folder):
        from tensorboardX import FileWriter

        folder = (run / "tensorboard").local
        assert folder is not None, "the schema refuses tracking.tensorboard with a remote run.path"
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = FileWriter(str(folder), flush_secs=10)

    def write(self, p: Point) -> None:
        """One event for all values of a step: one for each value takes six times as long."""
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in p.values.items()]
        self._writer.add_summary(Summary(value=values), p.step, walltime=p.time)

    def close(self, status: str) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run. Its own step only counts calls; each series has its step as a metric, `SERIES/step`, to plot against."""

    def __init__(self, config: Config, run: Folder):
        import wandb

        if run.size(WANDB_ID) is None:
            run.write(WANDB_ID, json.dumps({"id": uuid.uuid4().hex[:16]}).encode())
        folder = run.local.as_posix() if run.local is not None else None
        self._run: Any = wandb.init(
            project=config.tracking.experiment, name=run.name, id=json.loads(run.read(WANDB_ID))["id"], resume="allow", dir=folder,
            mode="offline" if config.tracking.wandb == "offline" else "online", config=to_dict(config), settings=wandb.Settings(console="off", silent=True, init_timeout=600),
        )  # fmt: skip
        self._defined: set[str] = set()

    def write(self, p: Point) -> None:
        step = f"{p.series}/step"
        for name in p.values.keys() - self._defined:
            self._run.define_metric(name, step_metric=step)
            self._defined.add(name)
        self._run.log({**p.values, step: p.step})

    def close(self, status: str) -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)


class BoardThread:
    """Feeds a board: makes it in a thread, with `history` first, and drops points whose place its series has had."""

    def __init__(self, make: Callable[[], Board], write_again: list[Record], skip: list[Record], notify: Callable[[str], None]):
        self._make, self._notify = make, notify
        self._written: set[tuple[str, int]] = set()
        for record in skip:
            self._fresh(point(record))
        self._queue: queue.SimpleQueue[Record | str] = queue.SimpleQueue()
        for record in write_again:
            self._queue.put(record)
        self._thread = threading.Thread(target=self._loop, name="board", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        self._queue.put(record)

    def close(self, status: str, deadline_s: float) -> None:
        self._queue.put(status)
        self._thread.join(deadline_s)

    def _fresh(self, p: Point | None) -> bool:
        if p is None or (p.series, p.place) in self._written:
            return False
        self._written.add((p.series, p.place))
        return True

    def _loop(self) -> None:
        try:
            board = self._make()
            while not isinstance(record := self._queue.get(), str):
                p = point(record)
                if p is not None and self._fresh(p):
                    board.write(p)
            board.close(record)
        except Exception as error:  # tracking never stops training
            self._notify(f"a tracker failed and gets no more metrics of this launch: {error}")


def boards(config: Config, run: Folder, history: list[Record], notify: Callable[[str], None]) -> list[BoardThread]:
    """The boards that the configuration asks for. Raises ConfigError where a package is missing."""
    found = []
    if config.tracking.tensorboard:
        found.append(BoardThread(lambda: TensorBoard(run), history, [], notify))
    if config.tracking.wandb != "off":
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError(f"tracking.wandb: is {config.tracking.wandb}, but the package wandb is not installed; pip install 'raytune70b[wandb]', or set it to off")
        found.append(BoardThread(lambda: WeightsAndBiases(config, run), [], history, notify))
    return found
