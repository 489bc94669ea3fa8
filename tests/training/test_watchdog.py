import pytest

from raytune70b.training.watchdog import Watchdog, describe, stuck

LIMIT = 10.0


def beat(rank, silent=0.5, still=0.1, count=100, mark="compute", step=40):
    return {"rank": rank, "host": f"host{rank}", "pid": 1000 + rank, "node": "n", "step": step, "mark": mark, "count": count, "still": still, "silent": silent, "stack": ""}


def beats(*some):
    return {b["rank"]: b for b in some}


def test_all_is_well():
    assert stuck({}, LIMIT) is None
    assert stuck(beats(beat(0), beat(1, still=9.0), beat(2, silent=9.0)), LIMIT) is None


def test_the_silent_one_is_stuck_though_all_stand_still():
    found, why = stuck(beats(beat(0, still=11.0), beat(1, silent=11.0), beat(2, still=11.0)), LIMIT)
    assert found["rank"] == 1 and "no sign of life for 11 s" in why


@pytest.mark.parametrize(("mark", "says"), [("compute", "stood still for 12 s"), ("data", "waited 12 s for its data")])
def test_the_one_behind_holds_up_the_others(mark, says):
    found, why = stuck(beats(beat(0, still=12, count=101, mark="agree"), beat(1, still=12, count=99, mark=mark), beat(2, still=12, count=101, mark="agree")), LIMIT)
    assert found["rank"] == 1 and says in why


def test_a_worker_that_waits_for_data_is_not_blamed_but_one_that_fell_silent_there_is():
    waits = {**beat(1, still=12, mark="data"), "stack": "its stack"}
    text = describe(waits, "has waited 12 s for its data", LIMIT)
    assert text.startswith("no worker hangs, but the data stands still after step 40") and "data.path" in text and "stuck" not in text and "its stack" not in text
    assert "worker 1 on host1 (pid 1001) is stuck" in describe({**waits, "silent": 11}, "no sign of life for 11 s", LIMIT)


def test_one_that_moves_shows_that_none_is_stuck():
    assert stuck(beats(beat(0, still=60), beat(1, still=60), beat(2, still=1)), LIMIT) is None


@pytest.mark.parametrize("mark", ["set up", "wait"])
def test_a_start_and_a_last_save_may_take_their_time_but_not_fall_silent(mark):
    assert stuck(beats(beat(0, still=600, mark=mark), beat(1, still=600, mark=mark)), LIMIT) is None
    assert stuck(beats(beat(0, mark=mark, silent=11), beat(1, mark=mark)), LIMIT)[0]["rank"] == 0


def test_the_warning_names_rank_host_pid_step_and_stack():
    text = describe({**beat(3), "stack": 'File "worker.py", line 7'}, "no sign of life for 11 s", LIMIT)
    for word in ("worker 3", "host3", "1003", "step 40", "no sign of life", 'File "worker.py", line 7', "run.hang_timeout_s=10"):
        assert word in text


def test_a_driver_that_was_stopped_itself_accuses_no_one(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("raytune70b.training.watchdog.time.monotonic", lambda: clock[0])
    watchdog = Watchdog(LIMIT)
    clock[0] = 60.0
    assert watchdog.look(beats(beat(0, silent=60.0))) is None
