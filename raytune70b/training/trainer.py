"""Builds the TorchTrainer and stands beside it: the driver's side of a run.

Ray Train restarts and resizes the worker group; the data set is rebuilt at every start of a group from the newest checkpoint
for the new number of workers (`ExactSplit`). The driver feeds the watch, passes on SIGTERM and the budget's end as a command,
and turns what came of it into an exit code.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
import ray.data
import ray.train
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, ValidationConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytune70b import cluster
from raytune70b.blocks.stream import Reader
from raytune70b.config import UserError, to_dict
from raytune70b.schema import Config
from raytune70b.signals import RESUME_ME
from raytune70b.storage import Folder
from raytune70b.tracking.journal import next_launch, read_journal
from raytune70b.tracking.watch import Watch
from raytune70b.training.budget import Stopper, check_left
from raytune70b.training.controller import ElasticTrainer
from raytune70b.training.expected import expectation
from raytune70b.training.job import ExactSplit, Job, train_on_worker
from raytune70b.training.lease import Lease
from raytune70b.training.mailbox import STOP, Mailbox
from raytune70b.training.network import BoundTorchConfig
from raytune70b.training.prepared import Prepared, write_resolved
from raytune70b.training.watchdog import Watchdog

FINISHED, FAILED, BAD_INPUT, OUT_OF_BUDGET = 0, 1, 2, 3
"""Exit codes. RESUME_ME: stopped with a checkpoint, the same command continues; 3: likewise, once the budget is raised."""

Evaluate = Callable[[Job, ray.train.Checkpoint], dict[str, Any]]
"""What Ray Train's validation hook calls with a checkpoint that is due, in a process of its own."""

STOP_WITHOUT_WORKERS_S = 3.0
"""How long a wish to stop waits for signs of workers that have something to save, where there are none. A group beats from its first second on."""


def set_up_ray_train(config: Config) -> None:
    """Ray Train's own settings are environment variables, read when the controller starts."""
    os.environ.update({
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(config.cluster.start_timeout_s),
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
        "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",  # the run in the Ray dashboard
    })  # fmt: skip


def beside_the_workers(config: Config, job: Job, evaluate: Evaluate) -> ValidationConfig:
    """Ray Train's hook for evaluations while training goes on. Raises UserError where training leaves them no GPU."""
    gpus = config.evaluation.gpus_per_model if cluster.uses_gpu(config) else 0
    there, taken = int(ray.cluster_resources().get("GPU", 0)), config.cluster.workers[1]
    if gpus and there < taken + gpus:
        raise UserError(
            f"evaluation.every: an evaluation beside training needs {gpus} GPUs (evaluation.gpus_per_model), the cluster has {there}, of which training may "
            f"take {taken}; lower the most workers of cluster.workers, or set evaluation.every=0 and evaluate afterwards"
        )
    # Without GPUs it shares the CPUs with training: asking for one of its own could wait until training has ended.
    return ValidationConfig(fn=partial(evaluate, job), ray_remote_kwargs={"num_cpus": 0, "num_gpus": gpus, "max_retries": 0})  # type: ignore[arg-type]


def build_trainer(prepared: Prepared, job: Job, launch: int, evaluate: Evaluate | None) -> ElasticTrainer:
    config = prepared.config
    gpu = cluster.uses_gpu(config)
    least, most = config.cluster.workers
    run_folder = Folder(config.run.path)
    (prepared.run).delete("checkpoint_manager_snapshot.json")  # Ray's own memory of checkpoints: ours is checked, and survives pruning
    return ElasticTrainer(
        train_on_worker,
        train_loop_config={"job": job},
        run=prepared.run.uri, mailbox=job.mailbox, launch=launch, hand_over_s=3 * config.run.hang_timeout_s, replicate=config.model.replicate,
        held=cluster.held_by_entrypoint(),
        torch_config=BoundTorchConfig(backend="cpu:gloo,cuda:nccl" if gpu else "gloo", timeout_s=int(max(60, 3 * config.run.hang_timeout_s))),
        scaling_config=ScalingConfig(  # type: ignore[call-arg]
            num_workers=(least, most), use_gpu=gpu,  # type: ignore[arg-type]
            resources_per_worker=cluster.of_worker(config, gpu),
            elastic_resize_monitor_interval_s=config.cluster.resize_check_s,
        ),
        datasets={"train": lambda: ray.data.range(1)},  # a placeholder: ExactSplit knows what is left to train
        validation_config=beside_the_workers(config, job, evaluate) if evaluate else None,
        dataset_config=ExactSplit(prepared.feed, prepared.run / "checkpoints"),
        run_config=RunConfig(
            name=config.run.name, storage_path=run_folder.path(), storage_filesystem=run_folder.filesystem,
            failure_config=FailureConfig(max_failures=config.cluster.max_failures), checkpoint_config=CheckpointConfig(num_to_keep=None),
        ),
    )  # fmt: skip


class Post:
    """Carries records from the mailbox to the watch, the wish to stop to the workers, and looks after their signs of life."""

    def __init__(self, mailbox: Any, watch: Watch, hang_timeout_s: float):
        self.mailbox, self._watch, self._watchdog = mailbox, watch, Watchdog(hang_timeout_s)
        self.result: dict[str, Any] | None = None
        self.failure: dict[str, Any] | None = None
        """The first failure of the newest worker group, or of the one before if it has not come to train: those that follow are broken connections."""
        self.stop_reason: str | None = None
        self._told_s: float | None = None
        self._over = False
        self._thread = threading.Thread(target=self._carry, name="post", daemon=True)
        self._thread.start()

    def request_stop(self, reason: str) -> None:
        """Asks the workers to save and stop; safe in a signal handler."""
        self.stop_reason = self.stop_reason or reason

    def close(self) -> None:
        self._over = True
        self._thread.join(10)

    def _carry(self) -> None:
        try:
            self._carry_until_over()
        except Exception as error:
            if not self._over:
                self._watch.warn(f"the workers' records do not arrive any more ({type(error).__name__}: {error}); what they train is in the checkpoints")

    def _carry_until_over(self) -> None:
        last = False
        while not last:
            last = self._over
            if self.stop_reason and self._told_s is None:
                self._told_s = time.monotonic()
                self._watch.warn(f"{self.stop_reason}: saving a checkpoint, then stopping")
                ray.get(self.mailbox.order.remote(STOP))
            records, beats = ray.get(self.mailbox.drain.remote())
            for record in records:
                self._take(record)
            if not last:
                self._look_after(beats)
                time.sleep(0.1)

    def _look_after(self, beats: dict[int, dict[str, Any]]) -> None:
        if self.result is not None:  # the workers have ended; evaluations that are still going need none
            return
        warning = self._watchdog.look(beats)
        if warning is not None:
            self._watch.warn(warning)
        idle = all(beat["mark"] == "set up" for beat in beats.values())  # or there is no group: nothing was trained since the newest checkpoint
        if self._told_s is not None and idle and time.monotonic() - self._told_s > STOP_WITHOUT_WORKERS_S:
            self._told_s = float("inf")
            self._watch.warn("nothing was trained since the newest checkpoint, so there is nothing to save")
            os.kill(os.getpid(), signal.SIGINT)  # Ray Train's way to give its controller up

    def _take(self, record: dict[str, Any]) -> None:
        if record["kind"] == "result":
            self.result = record
            return
        if record["kind"] == "group_ready" and self.failure is not None and record["attempt"] != self.failure["attempt"]:
            self.failure = None  # the run has got over it: what ends it later is something else
        if record["kind"] == "failure" and (self.failure is None or record["attempt"] != self.failure["attempt"]):
            self.failure = record
        self._watch.record(record)


@dataclass(frozen=True)
class Ending:
    """What came of a run."""

    status: str
    """finished, stopped or failed."""
    reason: str
    exit_code: int


def open_post(watch: Watch, hang_timeout_s: float) -> Post:
    """A mailbox for the workers on this node, and who carries it to the watch. Needs an initialised Ray."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return Post(Mailbox.options(scheduling_strategy=here).remote(), watch, hang_timeout_s)  # type: ignore[attr-defined]


def fit(prepared: Prepared, watch: Watch, post: Post, launch: int, evaluate: Evaluate | None = None) -> Ending:
    """Trains on the Ray that runs, until the run has ended or fails for good. Several may run side by side in processes of their own."""
    set_up_ray_train(prepared.config)
    job = Job(prepared.config, prepared.run, prepared.feed, Reader(prepared.data, prepared.manifest, "validation"), prepared.manifest.vocab_size,
              prepared.fingerprint, prepared.manifest.digest, launch, watch.mlflow_run_id, post.mailbox,
              prepared.config.evaluation.every if evaluate else 0)  # fmt: skip
    reason = ""
    try:
        build_trainer(prepared, job, launch, evaluate).fit()
    except ray.train.TrainingFailedError as error:
        reason = str(error).strip().splitlines()[-1]
    except (KeyboardInterrupt, SystemExit, ray.exceptions.RayActorError) as error:  # Ray Train gave its controller up
        if post.stop_reason is None:
            raise KeyboardInterrupt from error
    finally:
        post.close()
    return ending(post, reason)


def ending(post: Post, reason: str) -> Ending:
    """The run's end from what the workers said last. reason: what Ray Train said."""
    if post.result is not None and post.result["status"] == "finished":
        return Ending("finished", "", FINISHED)
    if post.stop_reason is not None and (not reason or (post.result is not None and post.result["status"] == "stopped")):
        return Ending("stopped", post.stop_reason, OUT_OF_BUDGET if post.stop_reason.startswith("budget.") else RESUME_ME)
    if post.failure is None:
        return Ending("failed", reason, FAILED)
    return Ending("failed", post.failure["error"], BAD_INPUT if post.failure["final"] else FAILED)


def train_here(prepared: Prepared, watch: Watch, launch: int, evaluate: Evaluate | None) -> Ending:
    """Listens to SIGTERM and the budget, and trains on the Ray that runs."""
    config = prepared.config
    post = open_post(watch, config.run.hang_timeout_s)
    watch.add_sink(Stopper(config.budget, watch.records, post.request_stop))
    signal.signal(signal.SIGTERM, lambda *_: post.request_stop("SIGTERM"))
    end = fit(prepared, watch, post, launch, evaluate)
    if end.status == "failed" and post.failure is not None:
        print(post.failure["traceback"], file=sys.stderr)
    return end


def run(prepared: Prepared, evaluate: Evaluate | None = None) -> int:
    """Trains until the run has ended, the budget or a signal stops it, or it fails for good; returns the exit code.

    evaluate: for checkpoints that are due by `evaluation.every`.
    """
    with Lease(prepared.run):
        try:
            return _run(prepared, evaluate)
        finally:
            ray.shutdown()


def join(config: Config) -> None:
    """Joins or starts a Ray cluster that has room for the run, or may come to have it. Raises UserError. It may wait, and a signal ends the job at once."""
    cluster.start(config)
    cluster.check_room(config, cluster.of_worker(config, cluster.uses_gpu(config)), config.cluster.workers[0])


def _run(prepared: Prepared, evaluate: Evaluate | None) -> int:
    config = prepared.config
    history = read_journal(prepared.run)
    launch, ended = next_launch(history), prepared.ended(history)
    if not ended:
        check_left(config.budget, history)
        join(config)
    write_resolved(prepared)
    watch = Watch(config, prepared.run, launch, prepared.feed.total_steps)
    end = Ending("failed", "", FAILED)
    try:
        watch.record(start_record(prepared))
        end = Ending("finished", "", FINISHED) if ended else train_here(prepared, watch, launch, evaluate)
    except UserError as error:
        end = Ending("failed", str(error), BAD_INPUT)
        raise
    except KeyboardInterrupt:
        end = Ending("stopped", "interrupted; the same command continues from the newest checkpoint", 130)
    except SystemExit:  # before training: `end_on_sigterm`
        end = Ending("stopped", "SIGTERM", RESUME_ME)
    finally:
        watch.close(end.status, end.reason, end.exit_code)
    return end.exit_code


def start_record(prepared: Prepared) -> dict[str, Any]:
    """The journal's run_start: what will be done."""
    order, feed, manifest = prepared.feed.order, prepared.feed, prepared.manifest
    data = {"digest": manifest.digest, "source": prepared.data.uri, "seq_len": manifest.seq_len, "vocab_size": manifest.vocab_size, "tokenizer": manifest.tokenizer}
    data |= {f"{split}_{what}": count for split in manifest.splits for what, count in (("blocks", manifest.rows(split)), ("trained_tokens", manifest.trained_tokens(split)))}
    return {
        "kind": "run_start", "config": to_dict(prepared.config), "total_steps": feed.total_steps, "steps_per_epoch": order.steps_per_epoch, "blocks": order.blocks,
        "tokens_per_step": order.global_batch_size * prepared.manifest.seq_len, "data": data,
        "plan": expectation(prepared.config, manifest, feed.total_steps),
        "resumed_step": prepared.resumed.step if prepared.resumed else 0,
    }  # fmt: skip
