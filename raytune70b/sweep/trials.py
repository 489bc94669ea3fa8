"""Runs trials with Ray Tune: each is the training function of the full run in a worker group of its own.

A trial is a Tune actor that builds the same `ElasticTrainer` as a full run and waits beside it. It asks for no CPU or GPU of its
own, only for a sliver of this node, so that it cannot take the resources which its workers wait for; how many trials run at a time
follows from what the cluster has. A trial that Tune stops tells its workers to stop at their next step and waits until the worker
group is gone: that is why it is a class with `cleanup` and not a function, which Tune would leave blocked in `fit`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
import time
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from raytune70b import cluster
from raytune70b.config import UserError
from raytune70b.room import fits, left
from raytune70b.signals import RESUME_ME
from raytune70b.storage import Folder
from raytune70b.sweep.points import Point, Result, hopeless
from raytune70b.sweep.setting import trial_config, trial_prepared
from raytune70b.sweep.stages import Stage
from raytune70b.tracking.cost import spent
from raytune70b.tracking.journal import Record, lineage, next_launch, read_journal
from raytune70b.tracking.watch import Watch
from raytune70b.training.prepared import Prepared
from raytune70b.training.trainer import Ending, fit, open_post, start_record

CLEANUP_S = 120
"""How long a stopped trial may take to give its workers back before Tune ends its actor."""


class TrialRun(tune.Trainable):
    """One trial at a time, as Tune drives it: every `step` is a validation, the last one carries the result."""

    def setup(self, config: dict[str, Any], prepared: Prepared, points: tuple[Point, ...]) -> None:  # type: ignore[override]
        self._base, self._points = prepared, points
        self._thread: threading.Thread | None = None
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Starts the next trial in the same process: imports are paid once. Tune keeps the actor of a stopped trial as it is, so that goes first."""
        self.cleanup()
        point = self._points[new_config["trial"]]
        self._prepared = trial_prepared(self._base, point)
        self._records: queue.SimpleQueue[Record] = queue.SimpleQueue()
        launch = next_launch(read_journal(self._prepared.run))
        watch = Watch(self._prepared.config, self._prepared.run, launch, self._prepared.feed.total_steps)
        watch.add_sink(self)
        watch.record(start_record(self._prepared))
        self._post = open_post(watch, self._prepared.config.run.hang_timeout_s)
        self._thread = threading.Thread(target=self._train, args=(watch, launch), name="trial", daemon=True)
        self._thread.start()
        return True

    def put(self, record: Record) -> None:
        """The watch's sink."""
        self._records.put(record)

    def _train(self, watch: Watch, launch: int) -> None:
        end = Ending("failed", "the trial was interrupted", 1)
        try:
            end = fit(self._prepared, watch, self._post, launch)
        except KeyboardInterrupt:  # Ray Train gave its controller up: the next launch tries again
            end = Ending("stopped", "the trial was interrupted", RESUME_ME)
        except BaseException as error:  # a trial that fails is a result
            end = Ending("failed", f"{type(error).__name__}: {error}", 1)
        finally:
            self._post.close()
            watch.close(end.status, end.reason, end.exit_code)
            self._records.put({"kind": "ending", "status": end.status, "reason": end.reason})

    def step(self) -> dict[str, Any]:
        """Waits for the next validation or for the end."""
        total = self._prepared.feed.total_steps
        while True:
            record = self._records.get()
            if record["kind"] == "validation" and 0 < record["step"] < total:
                return {"share": record["step"] / total, "loss": _number(record["loss"]), "tokens": self._tokens()}
            if record["kind"] == "ending":
                result = self._result(record)
                return {"share": 1.0, "loss": _number(result["loss"]), "tokens": result["tokens"], "result": json.dumps(result), "done": True}

    def _tokens(self) -> int:
        return sum(step["tokens"] for step in lineage(read_journal(self._prepared.run), "step"))

    def _result(self, ending: Record) -> dict[str, Any]:
        records, total = read_journal(self._prepared.run), self._prepared.feed.total_steps
        return {**outcome(records, total, self._prepared.manifest.vocab_size, ending), "begin": time.time() - spent(records).seconds, "end": time.time()}

    def cleanup(self) -> None:
        """Tells the workers of a trial that still runs to stop, and waits until they have given their resources back."""
        if self._thread is not None and self._thread.is_alive():
            self._post.request_stop("stopped by the sweep")
            self._thread.join(CLEANUP_S)


def _number(loss: float | None) -> float:
    return math.nan if loss is None else loss


def outcome(records: list[Record], total_steps: int, vocab_size: int, ending: Record) -> dict[str, Any]:
    """What a trial's journal and end say: status, curve, loss, tokens, reason."""
    steps, validations = lineage(records, "step"), lineage(records, "validation")
    curve = [(v["step"] / total_steps, v["loss"]) for v in validations if v["loss"] is not None and math.isfinite(v["loss"])]
    loss = curve[-1][1] if curve and curve[-1][0] == 1.0 else None
    status, reason = ending["status"], ending["reason"]
    nothing = (1 - 1e-4) * math.log(vocab_size)  # every token alike: what weights that have grown out of all bounds end at
    if status == "failed" and steps and steps[-1].get("skipped"):
        status, reason = "diverged", f"losses or gradients are not finite from step {steps[-1]['step']} on"
    elif status == "finished" and loss is None:
        status, reason = "diverged", "the validation loss is not finite"
    elif status == "finished" and loss is not None and curve[0][0] == 0.0 and loss >= curve[0][1]:
        status, reason = "diverged", f"the loss ended at {loss:.4g}, not below the {curve[0][1]:.4g} that it started from"
    elif status == "finished" and loss is not None and loss >= nothing:
        status, reason = "diverged", f"the loss ended at {loss:.4g}, that of a model which gives all {vocab_size:,} tokens the same chance"
    return {"status": status, "curve": curve, "loss": loss, "tokens": sum(s["tokens"] for s in steps), "reason": reason}


class Referee(FIFOScheduler):
    """Tune's scheduler: stops a trial without hope, and hands every result over as soon as it is there."""

    def __init__(self, stage: Stage, known: dict[Point, Result], patience: float, take: Any):
        super().__init__()
        self._stage, self._known, self._patience, self._take = stage, dict(known), patience, take
        self._curves: dict[Point, list[tuple[float, float]]] = {}

    def _point(self, trial: Any) -> Point:
        return self._stage.points[trial.config["trial"]]

    def on_trial_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> str:
        point = self._point(trial)
        curve = self._curves.setdefault(point, [])
        if "result" in result:
            return TrialScheduler.CONTINUE  # its end: on_trial_complete comes next
        if math.isfinite(result["loss"]):
            curve.append((result["share"], result["loss"]))
        leader = self._leader(point)
        if leader is None or hopeless(curve, leader, self._patience) is None:
            return TrialScheduler.CONTINUE
        begin = time.time() - result["time_total_s"]
        reason = f"at {result['share']:.0%} of its schedule its loss {result['loss']:.4f} was too far above the leader's"
        self._done(controller, Result(point, "stopped", tuple(curve), None, result["tokens"], begin, time.time(), reason))
        return TrialScheduler.STOP

    def _leader(self, point: Point) -> Result | None:
        """Who judges a trial: its leader, finished or as far as it has come beside it."""
        first = self._stage.leaders.get(point)
        if first is None or first in self._known or first not in self._curves:
            return None if first is None else self._known.get(first)
        return Result(first, "running", tuple(self._curves[first]), None, 0, 0.0, 0.0)

    def on_trial_complete(self, controller: Any, trial: Any, result: dict[str, Any]) -> None:
        if "result" in result:
            values = json.loads(result["result"])
            curve = tuple((share, loss) for share, loss in values.pop("curve"))
            if values["status"] != "stopped":  # stopped from outside: it is tried again by the next launch
                self._done(controller, Result(point=self._point(trial), curve=curve, **values))
        super().on_trial_complete(controller, trial, result)

    def on_trial_error(self, controller: Any, trial: Any) -> None:
        now, taken = time.time(), (trial.last_result or {}).get("time_total_s", 0.0)
        reason = str(trial.get_error() or "its actor ended").strip().splitlines()[-1]
        self._done(controller, Result(self._point(trial), "failed", tuple(self._curves.get(self._point(trial), ())), None, 0, now - taken, now, reason))
        super().on_trial_error(controller, trial)

    def _done(self, controller: Any, result: Result) -> None:
        if result.point not in self._known:
            self._known[result.point] = result
            running = sum(t.status == "RUNNING" for t in controller.get_trials()) - 1
            self._take(result, max(0, running))


class Limit(tune.Stopper):
    """Ends the running trials when the sweep's time is up or a signal asks for it."""

    def __init__(self, over: Any):
        self._over = over

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return bool(self._over())


def room(prepared: Prepared) -> int:
    """Trials that the running cluster has resources for at a time. Raises UserError where it has not enough for one."""
    config = trial_config(prepared, Point(1.0, prepared.config.train.global_batch_size, 0.0, 1, 0))
    workers, worker = config.cluster.workers[0], cluster.of_worker(config, cluster.uses_gpu(config))
    nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    slots = fits(left(nodes, cluster.held_by_entrypoint()).values(), worker)
    if slots < workers:
        raise UserError(f"sweep.workers: a trial needs {workers} workers, the cluster has room for {slots}; use sweep.workers={max(1, slots)}, or a larger cluster")
    return min(config.sweep.max_concurrent or slots, slots // workers)


def run_stage(prepared: Prepared, folder: Folder, stage: Stage, known: dict[Point, Result], take: Any, over: Any) -> None:
    """Runs a stage's trials, as many at a time as the cluster has room for; `take(result, running)` is told of each that has ended.

    `over()`: whether to end now; trials that run then have no result.
    """
    os.environ.update({"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "TUNE_FORCE_TRIAL_CLEANUP_S": str(CLEANUP_S + 30), "RAY_AIR_NEW_OUTPUT": "0"})
    logging.getLogger("ray.tune").setLevel(logging.ERROR)  # it warns of result files that are switched off above
    name = f"tune-{stage.name.replace(' ', '-')}"
    here = f"node:{ray.util.get_node_ip_address()}"
    trainable = tune.with_parameters(TrialRun, prepared=prepared, points=stage.points)
    tuner = tune.Tuner(
        tune.with_resources(trainable, tune.PlacementGroupFactory([{here: 0.001}])),
        param_space={"trial": tune.grid_search(list(range(len(stage.points))))},
        tune_config=tune.TuneConfig(max_concurrent_trials=room(prepared), scheduler=Referee(stage, known, prepared.config.sweep.patience, take), reuse_actors=True),
        run_config=tune.RunConfig(name=name, storage_path=folder.path(), storage_filesystem=folder.filesystem, verbose=0, stop=Limit(over),
                                  checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False)),
    )  # fmt: skip
    try:
        tuner.fit()
    finally:
        folder.delete(name)  # Tune's own notes: what counts are the results
