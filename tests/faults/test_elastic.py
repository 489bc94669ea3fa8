"""Machines and workers come and go under one run; it must not notice."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from raytune70b.training.checkpoint import newest, saved_steps
from tests.faults.conftest import STEPS, ZERO3, check_undisturbed

pytestmark = pytest.mark.slow

CHANCE = random.Random(11)


def wait_a_little(fleet, run) -> None:
    """Some steps, and a random part of the next: a fault falls anywhere in a step. Then slow ones, for the run must not end meanwhile."""
    fleet.misbehave(pace=0.1)
    run.until_steps(CHANCE.randint(4, 9))
    fleet.misbehave(pace=1)
    time.sleep(CHANCE.random())


def pauses(records, since: float) -> tuple[list[int], list[int]]:
    """(steps recorded before, steps recorded after) the first worker group that started after `since`."""
    started = next(r["time"] for r in records if r["kind"] == "group_start" and r["time"] > since)
    steps = [r for r in records if r["kind"] == "step"]
    return [r["step"] for r in steps if r["time"] < started], [r["step"] for r in steps if r["time"] > started]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sharding", ["fsdp", ZERO3])
def test_a_run_through_kills_losses_joins_and_a_preemption(fleet, start, data, reference, sharding):
    """W: 4, a worker killed, 4; a node lost, 2; half a node joins, 3, which does not divide the batch; a node joins, 4; a notice, 2 or 3."""
    fleet.size(2)
    fleet.misbehave(pace=0.1)
    run = start("cluster.workers=[1,4]", f"model.sharding={sharding}")
    run.until_world(4)

    wait_a_little(fleet, run)
    hurt = time.time()
    os.kill(CHANCE.choice(run.workers())["pid"], signal.SIGKILL)
    run.until_world(4, hurt)

    wait_a_little(fleet, run)
    hurt = time.time()
    fleet.lose(run.workers()[-1]["node"])
    run.until_world(2, hurt)

    wait_a_little(fleet, run)
    joined = time.time()
    fleet.join(cpus=2)
    run.until_world(3, joined)
    before, after = pauses(run.records(), joined)
    assert after[0] == before[-1] + 1, "a resize costs no step"

    wait_a_little(fleet, run)
    joined = time.time()
    fleet.size(2)  # the half node goes, a whole one comes
    run.until(lambda records: [r for r in records if r["kind"] == "step" and r["world_size"] == 4 and r["time"] > joined])

    wait_a_little(fleet, run)
    noticed = time.time()
    fleet.preempt(run.workers()[-1]["node"], deadline_s=300)
    run.until_world(2, noticed)
    before, after = pauses(run.records(), noticed)
    assert after[0] == before[-1] + 1, "a notice costs no step"
    assert any("preemption" in r["reason"] for r in run.records("group_end"))

    fleet.misbehave()
    assert run.end() == 0
    assert run.records("step")[-1]["step"] == STEPS
    assert {r["world_size"] for r in run.records("step")} == {2, 3, 4}
    check_undisturbed(run, data, reference)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sharding", ["fsdp", ZERO3])
def test_a_worker_killed_inside_a_save(fleet, start, data, reference, sharding):
    fleet.size(1)
    fleet.misbehave(pace=0.05)
    run = start("cluster.workers=[2,2]", f"model.sharding={sharding}")
    checkpoints = run.folder / "checkpoints"
    caught = 0
    while caught < 2:
        run.until_steps(3)
        unpublished = run.until(lambda _: unfinished(checkpoints))
        victim, hurt = CHANCE.choice(run.workers())["pid"], time.time()
        os.kill(victim, signal.SIGKILL)
        run.until_world(2, hurt)
        resumed = run.records("group_ready")[-1]["resumed_step"]
        caught += resumed < unpublished
    fleet.misbehave()
    assert run.end() == 0
    check_undisturbed(run, data, reference)


def unfinished(checkpoints) -> int:
    """The step of a checkpoint that is being written, 0 where none is."""
    steps, whole = saved_steps(checkpoints), newest(checkpoints)
    return steps[-1] if steps and whole is not None and steps[-1] > whole.step else 0
