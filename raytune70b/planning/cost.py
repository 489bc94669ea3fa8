"""Money and time: price lists, the expected loss to failures, checkpoints and how often to take them.

Prices are dated inputs: `budget.price_per_gpu_hour`, or a CSV of offers. Seconds, bytes and USD throughout.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from raytune70b.config import UserError
from raytune70b.planning.hardware import Machine
from raytune70b.planning.workload import Workload

PRICES = Path(__file__).with_name("prices.csv")
HOURS_PER_MONTH = 730.0
RESTART_S = 90.0
"""Seconds from a failure to the first new step beside loading: noticing, a new worker group, building the model."""
STALL_S = 0.2
"""Least seconds that training stops for an asynchronous checkpoint, however small."""


class PriceError(UserError):
    """A price that is none."""


@dataclass(frozen=True)
class Offer:
    """A price of one GPU for one hour, with its day and its source."""

    name: str
    usd_per_gpu_hour: float
    date: str
    source: str


def read_prices(path: Path = PRICES) -> list[Offer]:
    """The offers of a price list. Raises PriceError."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise PriceError(f"budget.price_list: {path} cannot be read ({error})") from error
    offers = []
    for line, row in enumerate(rows, start=2):
        try:
            price = float(row["usd"]) / int(row["gpus"])
            offers.append(Offer(row["offer"], price, row["date"], row["source"]))
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise PriceError(f"budget.price_list: {path}:{line} is no offer (usd, gpus, date, source): {error}") from error
        if not price > 0:
            raise PriceError(f"budget.price_list: {path}:{line} asks {row['usd']} USD; a price is above 0")
    return offers


def young_daly_interval(stall_s: float, mtbf_s: float) -> float:
    """Seconds of training between checkpoints that lose the least time, when each stops training for `stall_s` seconds and failures
    come every `mtbf_s` seconds on average (Daly 2006, the higher-order estimate; Young's sqrt(2 stall mtbf) is its first term)."""
    if stall_s <= 0:
        return 0.0
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(stall_s / (2 * mtbf_s))
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + ratio / 3 + ratio**2 / 9) - stall_s


@dataclass(frozen=True)
class CheckpointPlan:
    """Size of one checkpoint, what it costs and how often to take it; `every_s` is training time between two."""

    bytes: float
    stall_s: float
    write_s: float
    every_s: float
    every_steps: int
    kept: int


def plan_checkpoints(
    workload: Workload,
    resting: dict[str, float],
    machine: Machine,
    step_s: float,
    mtbf_hours: float,
    every: int | str,
    kept: int,
    asynchronous: bool,
) -> CheckpointPlan:
    """A checkpoint holds what training changes: trained weights and optimizer states. mtbf_hours: of one node.

    With `every: auto` it is taken as often as Young and Daly say; `kept`: how many lie on disk at once.
    """
    size = (workload.trained_shard * workload.weight_bytes + resting["optimizer states"]) * workload.shards
    write = size / (machine.storage_bandwidth * machine.nodes)
    copy = size / workload.shards / machine.gpu.pcie
    stall = max(STALL_S, copy if asynchronous else copy + write)
    seconds = young_daly_interval(stall, mtbf_hours * 3600 / machine.nodes)
    if isinstance(every, int):
        seconds = every * step_s
    elif asynchronous:
        seconds = max(seconds, write)  # the next one waits for the one before
    return CheckpointPlan(size, stall, write, seconds, max(1, round(seconds / step_s)), kept)


@dataclass(frozen=True)
class ValidationPlan:
    """What one validation takes, and how often it comes: every so many steps (0: never in between), perhaps before the first, and at the end."""

    blocks: int
    seconds: float
    every: int
    at_start: bool

    def total(self, steps: int) -> float:
        """Seconds of all validations of a run of so many steps."""
        between = (steps - 1) // self.every if self.every and steps else 0
        return self.seconds * (between + self.at_start + 1)

    def steps_in(self, seconds: float, step_s: float) -> int:
        """Steps of `step_s` seconds that, with their validations, take so long."""
        rest = seconds - self.seconds * (self.at_start + 1)
        return max(0, math.floor(rest / (step_s + (self.seconds / self.every if self.every else 0.0))))


def plan_validation(blocks: int, every: int, at_start: bool, workload: Workload, tokens_per_s_per_gpu: float) -> ValidationPlan:
    """blocks: of the validation split that are scored. A forward pass is its share of a training step's passes.

    tokens_per_s_per_gpu: of training, whose micro-batches may have empty places; those of a validation are full.
    """
    backward = 2.0 if workload.method == "full" else 1.0
    forward = 1.0 / (1.0 + workload.recomputed + backward)
    full = tokens_per_s_per_gpu * workload.slots_per_step / workload.tokens_per_step
    seconds = blocks * workload.seq_len / (full * workload.world_size) * forward
    return ValidationPlan(blocks, seconds, every, at_start)


@dataclass(frozen=True)
class Losses:
    """Expected shares of wall-clock: checkpoint stalls, work done again, recovery and validation. `goodput` is the rest."""

    failures: float
    stall: float
    lost_work: float
    recovery: float
    validation: float = 0.0

    @property
    def kept(self) -> float:
        """The share that faults and checkpoints leave."""
        return max(0.0, 1.0 - self.stall - self.lost_work - self.recovery)

    @property
    def goodput(self) -> float:
        return max(0.0, self.kept - self.validation)


def expected_losses(checkpoint: CheckpointPlan, machine: Machine, mtbf_hours: float, hours: float) -> Losses:
    """Each failure repeats half an interval and the write that was under way, and waits for a restart and the load."""
    mtbf = mtbf_hours * 3600 / machine.nodes
    again = checkpoint.every_s / 2 + checkpoint.write_s
    recovery = RESTART_S + checkpoint.write_s
    return Losses(
        hours * 3600 / mtbf,
        checkpoint.stall_s / (checkpoint.every_s + checkpoint.stall_s),
        min(1.0, again / mtbf),
        min(1.0, recovery / mtbf),
    )


@dataclass(frozen=True)
class Cost:
    """USD of a run at one price."""

    offer: Offer
    gpu_hours: float
    compute: float
    storage: float
    egress: float
    lost: float

    @property
    def total(self) -> float:
        return self.compute + self.storage + self.egress


def cost(
    offer: Offer, gpus: int, hours: float, stored: float, taken_out: float, storage_usd: float, egress_usd: float, losses: Losses
) -> Cost:
    """What `hours` on `gpus` cost. stored: bytes kept for the run; taken_out: bytes of the finished model; prices per GB(-month).

    `lost` is the part of compute that failures and checkpoints eat; it is in `compute` already.
    """
    gpu_hours = gpus * hours
    compute = gpu_hours * offer.usd_per_gpu_hour
    storage = stored / 1e9 * storage_usd * max(hours, 24.0) / HOURS_PER_MONTH
    return Cost(offer, gpu_hours, compute, storage, taken_out / 1e9 * egress_usd, compute * (1 - losses.kept))
