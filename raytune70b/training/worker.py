"""The training loop of one worker, to be read from top to bottom.

Every decision that must fall alike on all ranks (stop, save, resize, preemption) is agreed on in one small all-reduce at the
top of a step and of a validation batch, on host tensors: it costs no GPU synchronisation.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray.train.torch
import torch
import torch.distributed as dist

from raytune70b.blocks.ledger import Entry
from raytune70b.blocks.order import Ids
from raytune70b.blocks.stream import BlockStream, validation_batches
from raytune70b.config import UserError
from raytune70b.model.attention import fallback
from raytune70b.model.dryrun import dry_run
from raytune70b.planning.advice import memory_line, workload_of
from raytune70b.tracking.metrics import WorkerMetrics
from raytune70b.training.checkpoint import Cursor
from raytune70b.training.commits import Commits
from raytune70b.training.engine import build_engine, check_engine
from raytune70b.training.guards import Guard
from raytune70b.training.job import Job
from raytune70b.training.mailbox import HAND_OVER, STOP, Link
from raytune70b.training.pace import Pace
from raytune70b.training.preemption import Notice, Preempted
from raytune70b.training.saver import Saver, from_rank_0
from raytune70b.training.schedule import learning_rate
from raytune70b.training.step import StepResult, train_step, validation_sums
from raytune70b.training.threads import worker_threads
from raytune70b.training.watchdog import Heart

GO_ON, STOPPED, RESIZED, PREEMPTED = 0, 1, 2, 3
"""Why the loop is left before its end."""


@dataclass
class Word:
    """What all ranks agreed on."""

    trained_tokens: int
    save: bool
    save_ended: bool
    leave: int


def train(job: Job) -> None:
    """Ray Train's training function. A failure is told to the driver with rank, host and step before it is raised."""
    context = ray.train.get_context()
    torch.set_num_threads(worker_threads(job.config, ray.train.torch.get_device().type, context.get_local_world_size()))
    link = Link(job.mailbox, context.get_world_rank(), job.launch)
    worker = Worker(job, link)
    worker.heart.start()
    try:
        worker.train()
    except Preempted:
        raise
    except BaseException as error:  # CheckpointException is no Exception
        link.failed(error, worker.cursor.step, final=isinstance(error, UserError))
        raise
    finally:
        worker.heart.stop()


class Worker:
    """One rank of one worker group."""

    def __init__(self, job: Job, link: Link):
        self.job, self.config, self.link = job, job.config, link
        self.heart = Heart(link)
        self.cursor = Cursor(seed=job.config.run.seed, data=job.data_digest, fingerprint=job.fingerprint, mlflow_run_id=job.mlflow_run_id)
        self.notice = Notice(job.config.cluster.workers[0])
        self.fed_once = False

    def train(self) -> None:
        self.set_up()
        left = self.work()
        self.metrics.close()
        self.finish(left)

    def work(self) -> int:
        """Trains to the end of the run, or until there is a reason to leave, which is returned."""
        if self.owes_validation() and (left := self.validate()):
            return left
        begin = time.perf_counter()
        for step, ids, micro_batches in self.stream():
            fed = time.perf_counter()
            word = self.agree(micro_batches)
            waits = {"data": fed - begin, "agree": time.perf_counter() - fed}
            if word.save_ended:
                self.commits.settle()
            if word.leave and (left := self.hand_over() if word.leave == RESIZED else word.leave):
                return left
            if word.save:
                self.at("save" if self.config.checkpoint.asynchronous else "wait")  # a copy is quick, the writing takes what it takes
                self.commits.save(self.cursor)
            self.step(step, ids, micro_batches, word.trained_tokens, waits)
            if self.guard.exhausted:
                raise UserError(f"{self.guard.bad_in_a_row} bad steps in a row (train.max_bad_steps); the newest checkpoint is from before them")
            if self.owes_validation() and (left := self.validate()):
                return left
            begin = time.perf_counter()
            self.at("data")
        return self.validate() if self.cursor.validation_loss is None else GO_ON

    def set_up(self) -> None:
        """Process groups, the newest checkpoint that holds, model and optimizer; the data starts while the model is built."""
        begin = time.monotonic()
        self.device = ray.train.torch.get_device()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.control, saving = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
        machines = self.introduce()
        self.metrics = WorkerMetrics(self.config.run.name, self.rank, self.link.host, self.device, lambda record: self.link.send(**record))
        saver = Saver(self.job.run, self.config.checkpoint, saving, self.link.warn)
        found = saver.choose()
        self.cursor = dataclasses.replace(found, mlflow_run_id=self.job.mlflow_run_id) if found else self.cursor
        self.shard = self.ask_for_data()
        chosen = time.monotonic()
        self.engine = build_engine(self.config, self.job.vocab_size, self.device, resumes=found is not None)
        self.model = self.engine.model
        if self.rank == 0 and (said := fallback(self.config.model, self.device, self.model)):
            self.link.warn(said)
        built = time.monotonic()
        if found is not None:
            saver.load(self.engine.state(), found)
            self.engine.loaded()
        check_engine(self.engine, self.config, self.job.vocab_size, self.device)
        if found is None and self.config.train.dry_run:
            self.engine.state()  # makes the optimizer's states: they count
            manifest = self.job.validation.manifest
            dry_run(self.model, self.config, manifest.vocab_size, manifest.seq_len, self.job.feed.micro_batch_size, self.device, self.memory_plan())
            self.engine.forget()
        self.guard = Guard(self.config.train.spike_sigma, self.config.train.max_bad_steps, list(self.cursor.recent_losses), self.cursor.bad_in_a_row)
        pace = Pace(self.config.checkpoint.every, self.config.cluster.mtbf_hours / machines, self.cursor.step)
        self.commits = Commits(saver, pace, self.link, self.control, self.engine.state, self.cursor.ledger, self.job.evaluate_every)
        if self.rank == 0:
            seconds = {"choose": chosen - begin, "build": built - chosen, "load": time.monotonic() - built}
            self.link.send("group_ready", world_size=self.world, resumed_step=self.cursor.step, seconds=seconds)
        self.at("data")

    def memory_plan(self) -> str:
        """What the plan says of this GPU's memory, for the message when it does not suffice."""
        if self.device.type != "cuda":
            return ""
        size = torch.cuda.get_device_properties(self.device).total_memory
        data = dataclasses.replace(self.config.data, seq_len=self.job.validation.manifest.seq_len)
        return memory_line(workload_of(dataclasses.replace(self.config, data=data), self.world, size, self.job.vocab_size), size)

    def introduce(self) -> int:
        """Rank 0 registers the worker group and says who is in it; returns the number of machines."""
        self.link.attempt = from_rank_0(self.link.begin() if self.rank == 0 else None, self.control)
        workers: list[Any] = [None] * self.world
        dist.all_gather_object(workers, {"rank": self.rank, "host": self.link.host, "pid": self.link.pid, "node": self.link.node}, group=self.control)
        if self.rank == 0:
            self.link.send("group_start", world_size=self.world, hosts=[w["host"] for w in workers], workers=workers)
        return len({w["node"] for w in workers})

    def ask_for_data(self) -> Future | None:
        """Has Ray Data begin to read the steps from the cursor on; None where none are left."""
        if self.cursor.step >= self.job.feed.total_steps:
            return None
        if self.rank == 0 and self.cursor.step:
            first = next(self.job.feed.order.step_ids(self.cursor.step, self.cursor.step + 1))[1]
            self.link.warn(f"resume at step {self.cursor.step + 1}, block {first[0]}")
        return ThreadPoolExecutor(1, "data").submit(ray.train.get_dataset_shard, "train")

    def stream(self) -> Iterator[tuple[int, Ids, list[dict[str, np.ndarray]]]]:
        """The steps from the cursor on, with this rank's micro-batches."""
        if self.shard is not None:
            yield from BlockStream(self.shard.result(), self.job.feed, self.cursor.step, self.rank, self.world)

    def at(self, mark: str) -> None:
        self.heart.at(mark, self.cursor.step)

    def agree(self, micro_batches: list[dict[str, np.ndarray]] | None = None) -> Word:
        """One all-reduce: trained tokens of the global batch, whether to save or settle a save, and whether to leave."""
        self.at("agree")
        trained = sum(int((m["labels"] >= 0).sum()) for m in micro_batches or ())
        save, leave, look = False, GO_ON, False
        if self.rank == 0:
            save = micro_batches is not None and self.commits.pace.due(self.cursor.step)
            leave = {STOP: STOPPED, HAND_OVER: RESIZED}.get(self.heart.command, PREEMPTED if self.notice.time_to_leave(self.commits.longest_s) else GO_ON)
            look = self.notice.time_to_look()
        mine = torch.tensor([trained, save, self.commits.busy, self.commits.ended, leave, look], dtype=torch.int64)
        dist.all_reduce(mine, group=self.control)
        tokens, saves, busy, ended, leave, look = mine.tolist()
        if look:
            self.notice.look(self.world)
        # A save that is still being written, or tried again, is not waited for: the next one begins when it has ended.
        return Word(tokens, saves > 0 and not busy, ended == self.world, leave)

    def step(self, step: int, ids: Ids, micro_batches: list[dict[str, np.ndarray]], trained_tokens: int, waits: dict[str, float]) -> None:
        """One step. `waits`: seconds that went into the step before its arithmetic."""
        self.at("compute")
        train, begin = self.config.train, time.perf_counter()
        rate = learning_rate(train, step, self.job.feed.total_steps)
        result = train_step(
            self.engine, micro_batches, trained_tokens=trained_tokens, learning_rate=rate, max_grad_norm=train.max_grad_norm,
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
        entry = Entry(self.cursor.step, epoch, ids.tolist(), result.loss, result.grad_norm, trained_tokens, self.world, skipped)
        self.commits.stepped(entry, seconds)
        self.link.send(
            "step", step=self.cursor.step, loss=result.loss, grad_norm=result.grad_norm, learning_rate=rate, trained_tokens=trained_tokens,
            tokens=tokens, seconds=seconds, seconds_by=result.seconds_by, world_size=self.world, skipped=skipped,
        )  # fmt: skip
        if skipped:
            self.link.warn(f"step {self.cursor.step} was skipped: {result.skipped}; blocks {ids.tolist()}")

    def owes_validation(self) -> bool:
        """Whether a validation is due at this step and has not been made, perhaps because it was interrupted."""
        if self.cursor.validation_loss is not None or self.cursor.step >= self.job.feed.total_steps:
            return False
        every = self.config.validation.every
        return self.config.validation.at_start if self.cursor.step == 0 else bool(every) and self.cursor.step % every == 0

    def validate(self) -> int:
        """Mean loss over the trained tokens of the validation split; the same at any world size. Given up for a reason to leave."""
        begin, sums, leave = time.monotonic(), torch.zeros(2, dtype=torch.float64), GO_ON
        self.model.eval()
        micro = self.job.feed.micro_batch_size
        for arrays in validation_batches(self.job.validation, self.config.validation.max_blocks, micro, self.rank, self.world):
            leave = self.agree().leave
            if leave in (STOPPED, PREEMPTED):
                break
            self.at("validate")
            loss, trained = validation_sums(self.model, arrays, self.config.model.loss_chunk_tokens, self.device)
            sums += torch.tensor([loss, trained], dtype=torch.float64)
        self.engine.rest()
        self.model.train()
        if leave in (STOPPED, PREEMPTED):
            return leave
        dist.all_reduce(sums, group=self.control)
        if sums[1] > 0:
            self.cursor.validation_loss = (sums[0] / sums[1]).item()
            if self.rank == 0:
                self.link.send("validation", step=self.cursor.step, loss=self.cursor.validation_loss, trained_tokens=int(sums[1]), seconds=time.monotonic() - begin)
        return GO_ON

    def hand_over(self) -> int:
        """Before a resize: publishes the state as it is and waits to be ended. Returns to go on where it cannot be published or is not wanted any more, or to stop."""
        self.at("wait")
        try:
            self.commits.flush(self.cursor)
        except RuntimeError as error:
            if self.rank == 0:
                self.link.warn(f"the worker group is not resized: {error}")
                ray.get(self.link.mailbox.order.remote(""))
                self.heart.command = ""
            return GO_ON
        if not from_rank_0(self.rank == 0 and ray.get(self.link.mailbox.handed_over.remote()), self.control):
            self.heart.command = ""  # the next beat brings what is in force now
            return GO_ON
        end = time.monotonic() + self.config.run.hang_timeout_s
        while time.monotonic() < end:  # the controller ends this process
            if self.heart.command == STOP:
                return STOPPED
            time.sleep(0.5)
        raise RuntimeError("the worker group was to be resized, but was not")

    def finish(self, left: int) -> None:
        """Publishes the state as it is, and only then tells the run's end or makes way."""
        self.at("wait")
        if self.config.checkpoint.at_end or left == PREEMPTED:
            self.commits.flush(self.cursor)
        if left == PREEMPTED:
            raise Preempted(f"left after step {self.cursor.step}, which is saved: {self.notice.text}")
        if self.rank == 0:
            self.link.send("result", status="stopped" if left else "finished")
