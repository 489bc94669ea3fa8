"""The training loop of one worker, to be read from top to bottom.

Every decision that must fall alike on all ranks (stop, save, preemption) is agreed on in one small all-reduce at the top of
a step, on host tensors: it costs no GPU synchronisation.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray.train
import torch
import torch.distributed as dist

from raytune70b.blocks.ledger import Entry
from raytune70b.blocks.order import Ids
from raytune70b.blocks.stream import BlockStream, Feed, Reader, validation_batches
from raytune70b.config import UserError
from raytune70b.model.load import build_model
from raytune70b.model.shard import make_mesh, reshard
from raytune70b.schema import Config
from raytune70b.storage import Folder
from raytune70b.tracking.metrics import WorkerMetrics
from raytune70b.training.checkpoint import Cursor
from raytune70b.training.guards import Guard
from raytune70b.training.mailbox import Link
from raytune70b.training.optimizer import build_optimizer
from raytune70b.training.pace import Pace
from raytune70b.training.saver import Outcome, Saver
from raytune70b.training.schedule import learning_rate
from raytune70b.training.state import state_dict
from raytune70b.training.step import StepResult, train_step, validation_sums


@dataclass(frozen=True)
class Job:
    """What the driver gives every worker."""

    config: Config
    run: Folder
    feed: Feed
    validation: Reader
    vocab_size: int
    fingerprint: dict[str, Any]
    data_digest: str
    launch: int
    mlflow_run_id: str | None
    mailbox: Any


@dataclass
class Word:
    """What all ranks agreed on at the top of a step."""

    trained_tokens: int
    stop: bool
    save: bool
    preempted: bool
    save_ended: bool


def train_on_worker(job: Job) -> None:
    """Ray Train's training function. A failure is told to the driver with rank, host and step before it is raised."""
    torch.set_num_threads(max(1, int(job.config.cluster.cpus_per_worker)))
    link = Link(job.mailbox, ray.train.get_context().get_world_rank(), job.launch)
    worker = Worker(job, link)
    try:
        worker.train()
    except Exception as error:
        repeats = link.failed(error, worker.cursor.step)
        if repeats >= 3 or isinstance(error, UserError):
            link.send("result", status="failed", exit_code=2 if isinstance(error, UserError) else 1, reason=f"{type(error).__name__}: {error}")
            return  # the driver reports it; raising would only start the same again
        raise


class Worker:
    """One rank of one worker group."""

    def __init__(self, job: Job, link: Link):
        self.job, self.config, self.link = job, job.config, link
        self.cursor = Cursor(seed=job.config.run.seed, data=job.data_digest, fingerprint=job.fingerprint)
        self.pending: list[Entry] = []
        self.ledger_head: str | None = None
        self.fed_once = False

    def train(self) -> None:
        self.set_up()
        if self.cursor.step == 0 and self.config.validation.at_start:
            self.validate()
        stopped, begin = None, time.perf_counter()
        for step, ids, micro_batches in self.stream():
            fed = time.perf_counter()
            word = self.agree(micro_batches)
            waits = {"data": fed - begin, "agree": time.perf_counter() - fed}
            if word.save_ended:
                self.settle(self.saver.take())
            if word.save or word.preempted or (word.stop and self.config.checkpoint.at_end):
                self.save()
            if word.stop:
                stopped = self.link.command() or "stop"
                break
            self.step(step, ids, micro_batches, word.trained_tokens, waits)
            if self.guard.exhausted:
                raise UserError(f"{self.guard.bad_in_a_row} bad steps in a row (train.max_bad_steps); the newest checkpoint is from before them")
            every = self.config.validation.every
            if every and self.cursor.step % every == 0 and self.cursor.step < self.job.feed.total_steps:
                self.validate()
            begin = time.perf_counter()
        self.finish(stopped)

    def set_up(self) -> None:
        """Process groups, model, optimizer, and the newest checkpoint that holds."""
        begin = time.monotonic()
        self.device = ray.train.torch.get_device()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.control, saving = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
        self.link.attempt = self.from_rank_0(self.link.begin() if self.rank == 0 else None)
        hosts: list[Any] = [None] * self.world
        dist.all_gather_object(hosts, self.link.host, group=self.control)
        if self.rank == 0:
            self.link.send("group_start", world_size=self.world, hosts=hosts)
        self.metrics = WorkerMetrics(self.config.run.name, self.rank, self.link.host, self.device, lambda record: self.link.send(**record))
        mesh = make_mesh(self.world, self.config.model.replicate, self.device.type)
        self.model = build_model(self.config, self.job.vocab_size, mesh, self.device)
        self.optimizer = build_optimizer(self.model, self.config)
        built = time.monotonic()
        self.saver = Saver(self.job.run, self.config.checkpoint, saving, self.link.warn)
        loaded = self.saver.load(state_dict(self.model, self.optimizer))  # live tensors: loading fills them in place
        if loaded is not None:
            self.cursor, self.ledger_head = loaded, loaded.ledger
        self.guard = Guard(self.config.train.spike_sigma, self.config.train.max_bad_steps, list(self.cursor.recent_losses), self.cursor.bad_in_a_row)
        self.pace = Pace(self.config.checkpoint.every, self.config.cluster.mtbf_hours, self.cursor.step)
        if self.rank == 0:
            seconds = {"build": built - begin, "load": time.monotonic() - built}
            self.link.send("group_ready", world_size=self.world, resumed_step=self.cursor.step, seconds=seconds)

    def stream(self) -> Iterator[tuple[int, Ids, list[dict[str, np.ndarray]]]]:
        """The steps from the cursor on, with this rank's micro-batches."""
        if self.cursor.step >= self.job.feed.total_steps:
            return
        shard = ray.train.get_dataset_shard("train")
        if self.rank == 0 and self.cursor.step:
            first = next(self.job.feed.order.step_ids(self.cursor.step, self.cursor.step + 1))[1]
            self.link.warn(f"resume at step {self.cursor.step + 1}, block {first[0]}")
        yield from BlockStream(shard, self.job.feed, self.cursor.step, self.rank, self.world)

    def agree(self, micro_batches: list[dict[str, np.ndarray]]) -> Word:
        """One all-reduce: trained tokens of the global batch, and whether to stop, save or settle a save."""
        trained = sum(int((m["labels"] >= 0).sum()) for m in micro_batches)
        stop = self.rank == 0 and (self.link.command() or "").startswith("stop")
        save = self.rank == 0 and self.pace.due(self.cursor.step)
        mine = torch.tensor([trained, stop, save, self.saver.busy, self.saver.ended], dtype=torch.int64)
        dist.all_reduce(mine, group=self.control)
        tokens, stops, saves, busy, ended = mine.tolist()
        # A save that is still being written, or tried again, is not waited for: the next one begins when it has ended.
        return Word(tokens, stops > 0, saves > 0 and not busy, self.preempted(), ended == self.world)

    def preempted(self) -> bool:
        return False

    def step(self, step: int, ids: Ids, micro_batches: list[dict[str, np.ndarray]], trained_tokens: int, waits: dict[str, float]) -> None:
        """One step. `waits`: seconds that went into the step before its arithmetic."""
        train, begin = self.config.train, time.perf_counter()
        rate = learning_rate(train, step, self.job.feed.total_steps)
        result = train_step(
            self.model, self.optimizer, micro_batches, trained_tokens=trained_tokens, learning_rate=rate, max_grad_norm=train.max_grad_norm,
            loss_chunk_tokens=self.config.model.loss_chunk_tokens, seed=self.config.run.seed, step=step, guard=self.guard, device=self.device,
        )  # fmt: skip
        tokens = len(ids) * self.job.validation.manifest.seq_len
        self.cursor = dataclasses.replace(
            self.cursor, step=step + 1, trained_tokens=self.cursor.trained_tokens + trained_tokens, tokens=self.cursor.tokens + tokens,
            world_size=self.world, recent_losses=self.guard.recent, bad_in_a_row=self.guard.bad_in_a_row, validation_loss=None,
        )  # fmt: skip
        if self.fed_once:
            result.seconds_by.update(waits)
        else:
            self.fed_once = True  # the first step's wait for data is the start of the stream, not the pace of the run
        seconds = time.perf_counter() - begin + sum(result.seconds_by.get(part, 0.0) for part in waits)
        self.metrics.step(self.cursor.step, seconds, result.seconds_by)
        if self.rank == 0:
            self.record(result, ids, trained_tokens, tokens, rate, seconds)

    def record(self, result: StepResult, ids: Ids, trained_tokens: int, tokens: int, rate: float, seconds: float) -> None:
        """Rank 0's notes of a step: the ledger entry, and the record for the driver."""
        epoch = self.job.feed.order.step_positions(self.cursor.step - 1)[0]
        skipped = result.skipped is not None
        self.pending.append(
            Entry(self.cursor.step, epoch, ids.tolist(), result.loss, result.grad_norm, trained_tokens, self.world, skipped)
        )
        self.pace.stepped(seconds)
        self.link.send(
            "step", step=self.cursor.step, loss=result.loss, grad_norm=result.grad_norm, learning_rate=rate, trained_tokens=trained_tokens,
            tokens=tokens, seconds=seconds, seconds_by=result.seconds_by, world_size=self.world, skipped=skipped,
        )  # fmt: skip
        if skipped:
            self.link.warn(f"step {self.cursor.step} was skipped: {result.skipped}; blocks {ids.tolist()}")

    def validate(self) -> None:
        """Mean loss over the trained tokens of the validation split; the same at any world size."""
        begin, sums = time.monotonic(), torch.zeros(2, dtype=torch.float64)
        self.model.eval()
        micro = self.job.feed.micro_batch_size
        for arrays in validation_batches(self.job.validation, self.config.validation.max_blocks, micro, self.rank, self.world):
            loss, trained = validation_sums(self.model, arrays, self.config.model.loss_chunk_tokens, self.device)
            sums += torch.tensor([loss, trained], dtype=torch.float64)
        dist.all_reduce(sums, group=self.control)
        reshard(self.model)  # without a backward pass the root stays gathered, and a checkpoint would hold the gathered copies
        self.model.train()
        if sums[1] > 0:
            self.cursor.validation_loss = (sums[0] / sums[1]).item()
            if self.rank == 0:
                self.link.send("validation", step=self.cursor.step, loss=self.cursor.validation_loss, trained_tokens=int(sums[1]), seconds=time.monotonic() - begin)

    def save(self) -> None:
        """Starts a save of the state after `cursor.step` steps; waits for the one before it."""
        self.saver.wait()
        if self.saver.ended:
            self.settle(self.saver.take())
        entries = [e for e in self.pending if e.step <= self.cursor.step]
        cursor = dataclasses.replace(self.cursor, ledger=self.ledger_head, mlflow_run_id=self.job.mlflow_run_id)
        self.saver.start(state_dict(self.model, self.optimizer), cursor, entries)
        self.pace.saving(self.cursor.step)

    def settle(self, outcome: Outcome) -> None:
        """A save has ended: tells Ray Train and the driver; all ranks call it together."""
        self.pace.saved(outcome.stall_s, outcome.error is None)
        if outcome.error is not None:
            if self.rank == 0:
                self.link.send("checkpoint_failed", step=outcome.step, reason=outcome.error)
            return
        if outcome.cursor is not None and self.rank == 0:
            self.ledger_head = outcome.cursor.ledger
            self.pending = [e for e in self.pending if e.step > outcome.step]
            self.link.send("checkpoint", step=outcome.step, stall_s=outcome.stall_s, seconds=outcome.seconds, bytes=outcome.bytes, path=outcome.path)
        folder = Folder(outcome.path)
        checkpoint = ray.train.Checkpoint(folder.path(), filesystem=folder.filesystem)
        ray.train.report({"step": outcome.step}, checkpoint=checkpoint, checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD)

    def finish(self, stopped: str | None) -> None:
        """The last validation and the last checkpoint; the run's end is told only when that is published."""
        if stopped is None and self.cursor.validation_loss is None:
            self.validate()
        if self.config.checkpoint.at_end and not self.saved():
            self.save()
        self.saver.wait()
        outcome = self.saver.take() if self.saver.ended else None
        if outcome is not None:
            self.settle(outcome)
        if outcome is not None and outcome.error is not None:
            raise RuntimeError(f"the last checkpoint could not be written: {outcome.error}")
        self.metrics.close()
        if self.rank == 0:
            self.link.send("result", status="stopped" if stopped else "finished", reason=stopped or "", exit_code=75 if stopped else 0)

    def saved(self) -> bool:
        """Whether the state as it stands is saved, or being saved."""
        return bool(self.from_rank_0(self.pace.saved_step == self.cursor.step))

    def from_rank_0(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]
