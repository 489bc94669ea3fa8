"""Goodput under faults, played through: machines fail or are taken, the group goes on with the rest, goes back to its newest checkpoint, grows.

The plan's own functions say how long steps, saves, loads and restarts take for each number of machines; faults come at random or from
a trace. Goodput is the time that the steps which count would have taken on all machines, as a share of the wall-clock. A run is
played from fault to fault, not step by step, so three days of 128 machines take milliseconds.
"""

from __future__ import annotations

import csv
import heapq
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raytune70b.config import UserError
from raytune70b.planning.cost import RESTART_S
from raytune70b.planning.plan import build_plan, planned_hours, with_nodes
from raytune70b.planning.workload import config_shape
from raytune70b.schema import Config

FAULTS = Path(__file__).with_name("faults.csv")
KINDS = ("trained", "fewer machines", "validation", "stalls", "work again", "recovery", "waiting")
"""Where the wall-clock goes; `fewer machines` is what the steps that count took longer than on all of them."""


@dataclass(frozen=True)
class FaultRate:
    """Faults that come at random: each machine goes every `mtbf_hours` on average, and is back, or another one, after `back_hours`."""

    name: str
    mtbf_hours: float
    notice_s: float
    back_hours: float
    source: str


@dataclass(frozen=True, order=True)
class Fault:
    """A machine goes `at_s` seconds after the start, announced `notice_s` before, and is back after `back_s` (inf: never)."""

    at_s: float
    machine: int
    back_s: float = 0.0
    notice_s: float = 0.0


@dataclass(frozen=True)
class Group:
    """A worker group on some number of machines, as the plan has it. Seconds; a save stops training for `stall_s` and is whole `write_s` later."""

    step_s: float
    every_steps: int
    stall_s: float
    write_s: float
    restart_s: float
    validation_s: float = 0.0
    """Validation, as a share of each step."""

    @property
    def cycle_s(self) -> float:
        """From one save to the next."""
        return self.every_steps * (self.step_s + self.validation_s) + self.stall_s

    @property
    def save_s(self) -> float:
        """A save on leaving, for which the group waits."""
        return self.stall_s + self.write_s


@dataclass
class Outcome:
    """One run: steps that count, faults that met it, and seconds by kind, which add up to the wall-clock."""

    steps: float = 0.0
    faults: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))

    @property
    def goodput(self) -> float:
        return self.seconds["trained"] / max(sum(self.seconds.values()), 1e-9)


def play(groups: Sequence[Group | None], faults: Iterable[Fault], total_s: float) -> Outcome:
    """Plays a run of `total_s` seconds that starts with all machines there.

    groups: by number of machines, from 0; None where they are too few for the run. faults: in order of their notice.
    """
    full = groups[-1]
    assert full is not None
    out, away, back = Outcome(), set[int](), list[tuple[float, int]]()
    source, now, hand_over = iter(faults), 0.0, 0.0
    upcoming = next(source, None)
    while now < total_s:
        group = groups[len(groups) - 1 - len(away)]
        fault_s = upcoming.at_s - upcoming.notice_s if upcoming else total_s
        until = max(now, min(fault_s, back[0][0] if back else total_s, total_s))
        fault = upcoming if fault_s <= until < total_s else None
        keeps = fault is None or (group is not None and group.save_s <= fault.notice_s)
        _train(out, group, full, now, until, hand_over, keeps)
        hand_over = group.save_s if group is not None and keeps else 0.0
        now = until
        if fault is not None:
            upcoming = next(source, None)
            if fault.machine not in away:
                out.faults += 1
                away.add(fault.machine)
                heapq.heappush(back, (fault.at_s + fault.back_s, fault.machine))
        while back and back[0][0] <= now:
            away.discard(heapq.heappop(back)[1])
    return out


def _train(out: Outcome, group: Group | None, full: Group, begin: float, end: float, hand_over: float, keeps: bool) -> None:
    """What one worker group does between two changes. hand_over: seconds of the save that the group before it left with.
    keeps: it leaves with a save of the step that it is at, and loses none."""
    if group is None:
        out.seconds["waiting"] += end - begin
        return
    recovery = min(hand_over + group.restart_s, end - begin)
    elapsed = end - begin - recovery
    cycles, rest = divmod(elapsed, group.cycle_s)
    step = group.step_s + group.validation_s
    steps = cycles * group.every_steps + min(rest / step, group.every_steps)
    whole = max(0.0, (elapsed - group.write_s) // group.cycle_s)
    kept = steps if keeps else min(steps, whole * group.every_steps)
    out.steps += kept
    out.seconds["recovery"] += recovery
    out.seconds["stalls"] += elapsed - steps * step
    out.seconds["work again"] += (steps - kept) * step
    out.seconds["validation"] += kept * group.validation_s
    out.seconds["trained"] += kept * full.step_s
    out.seconds["fewer machines"] += kept * (group.step_s - full.step_s)


def at_random(rate: FaultRate, machines: int, total_s: float, seed: int) -> Iterator[Fault]:
    """Faults of independent machines, in the order in which they are known: exponential times between them."""
    chance = random.Random(seed)
    now = rate.notice_s  # none is announced before the run begins
    while True:
        now += chance.expovariate(machines / (rate.mtbf_hours * 3600))
        if now - rate.notice_s >= total_s:
            return
        yield Fault(now, chance.randrange(machines), rate.back_hours * 3600, rate.notice_s)


def groups_of(config: Config) -> list[Group | None]:
    """The worker group for each number of machines up to `hardware.nodes`; None below `cluster.workers`' least or where memory does not hold the run."""
    shape, found = config_shape(config), list[Group | None]([None])
    for nodes in range(1, config.hardware.nodes + 1):
        workers = nodes * config.hardware.gpus_per_node
        if nodes < config.hardware.nodes and (workers < config.cluster.workers[0] or workers % config.model.replicate):
            found.append(None)
            continue
        plan = build_plan(with_nodes(config, nodes), shape)
        c, v = plan.checkpoint, plan.validation
        fits = nodes == config.hardware.nodes or plan.verdict != "does not fit"
        validation = v.seconds / v.every if v.every else 0.0
        found.append(Group(plan.throughput.step_seconds, c.every_steps, c.stall_s, c.write_s, RESTART_S + c.write_s, validation) if fits else None)
    return found


def simulate(config: Config, rate: FaultRate | list[Fault], seeds: int) -> list[Outcome]:
    """Runs of `config` under faults that come at random, one a seed, or under the faults of a trace. Raises UserError."""
    hours = planned_hours(build_plan(config).schedule)
    if hours is None:
        raise UserError("simulate: the run has no end; set budget.hours, train.steps, or a data set at data.path")
    groups, total_s = groups_of(config), hours * 3600
    if isinstance(rate, list):
        return [play(groups, sorted(rate, key=lambda f: f.at_s - f.notice_s), total_s)]
    return [play(groups, at_random(rate, config.hardware.nodes, total_s, seed), total_s) for seed in range(seeds)]


def read_rates(path: Path = FAULTS) -> dict[str, FaultRate]:
    """Published rates of faults, by name."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {r["faults"]: FaultRate(r["faults"], float(r["mtbf_hours"]), float(r["notice_s"]), float(r["back_hours"]), r["source"]) for r in rows}


def own_rate(config: Config) -> FaultRate:
    """`cluster.mtbf_hours`, for which the plan and `checkpoint.every=auto` make provision."""
    return FaultRate("own", config.cluster.mtbf_hours, 0.0, 0.5, "cluster.mtbf_hours; half an hour until a machine is back is an assumption")


def read_trace(path: Path, machines: int) -> list[Fault]:
    """Faults of a CSV with the columns hours, machine, back_hours (empty: never) and notice_s (empty: none). Raises UserError."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--faults: {path} is neither a trace of faults that can be read ({error}) nor one of {', '.join(read_rates())}") from error
    faults = []
    for line, row in enumerate(rows, start=2):
        try:
            back = float(row["back_hours"]) * 3600 if row["back_hours"] else float("inf")
            faults.append(Fault(float(row["hours"]) * 3600, int(row["machine"]), back, float(row.get("notice_s") or 0.0)))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"--faults: {path}:{line} is no fault (hours, machine, back_hours, notice_s): {error}") from error
        if not 0 <= faults[-1].machine < machines:
            raise UserError(f"--faults: {path}:{line} names machine {faults[-1].machine}; hardware.nodes={machines} has 0 to {machines - 1}")
    return faults


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which `share` of them lie, by linear interpolation."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def shares(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Mean share of the wall-clock by kind."""
    total = sum(itertools.chain.from_iterable(o.seconds.values() for o in outcomes))
    return {kind: sum(o.seconds[kind] for o in outcomes) / total for kind in KINDS}
