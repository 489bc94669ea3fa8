"""Workers that stop, raise once, or raise for ever."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.faults.conftest import check_undisturbed


@pytest.mark.timeout(900)
def test_a_stopped_worker_is_named_and_a_worker_that_raises_once_is_forgiven(fleet, start, data, reference):
    fleet.size(1)
    fleet.misbehave(pace=0.03, **{"raise": {"rank": 1, "step": 12, "times": 1, "text": "a passing fault"}})
    run = start("cluster.workers=[2,2]", "run.hang_timeout_s=15")
    run.until(lambda records: [r for r in records if r["kind"] == "group_end" and "a passing fault" in r["reason"]])
    run.until(lambda records: [r for r in records if r["kind"] == "step" and r["attempt"] == 2 and r["step"] > 20])

    victim, stopped = run.workers()[1], time.time()
    os.kill(victim["pid"], signal.SIGSTOP)
    warning = run.until(lambda records: [r for r in records if r["kind"] == "warning" and "is stuck" in r["text"]])[0]
    assert warning["text"].startswith(f"worker 1 on {victim['host']} (pid {victim['pid']}) is stuck after step ")
    assert 13 <= warning["time"] - stopped < 40
    run.until_world(2, stopped)

    fleet.misbehave()
    assert run.end() == 0
    check_undisturbed(run, data, reference)


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_worker_that_always_raises_ends_the_run_with_its_traceback(fleet, start):
    fleet.size(1)
    fleet.misbehave(**{"raise": {"rank": 1, "step": 3, "times": 1000, "text": "a fault of the program"}})
    run = start("cluster.workers=[2,2]")
    assert run.end() == 1
    failures = run.records("failure")
    assert len({r["attempt"] for r in failures}) == 2, "one more try, no hundred"
    assert {r["rank"] for r in failures} == {1}
    assert "ValueError: a fault of the program" in run.text() and "Traceback (most recent call last)" in run.text() and "step_with_faults" in run.text()
    assert run.records("run_end")[-1]["status"] == "failed"
