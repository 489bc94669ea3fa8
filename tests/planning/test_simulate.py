"""Goodput under faults, beside a second-by-second play of the same run and beside Daly's exact formula."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytune70b.config import UserError, compose
from raytune70b.planning.plan import build_plan
from raytune70b.planning.report import main
from raytune70b.planning.simulate import KINDS, Fault, FaultRate, Group, at_random, play, quantile, read_rates, read_trace, shares, simulate


def second_by_second(groups, faults, total):
    """The same run with a clock that ticks. Times are whole seconds; returns (steps that count, seconds of waiting, of recovery)."""
    machines = len(groups) - 1
    notices = sorted(faults, key=lambda f: f.at_s - f.notice_s)
    returns, away = [], set()
    group, hand_over, changed = None, 0, True
    steps_saved = steps = waiting = recovery = 0
    for now in range(total):
        while True:  # every change at this second: one that goes, then all who are back by then
            due = notices and notices[0].at_s - notices[0].notice_s <= now
            back = [r for r in returns if r[0] <= now]
            if not due and not back:
                break
            kept = not due or (group is not None and group.stall_s + group.write_s <= notices[0].notice_s)
            if group is not None and not changed:
                if kept:
                    steps_saved, hand_over = steps, group.stall_s + group.write_s
                else:
                    steps, hand_over = steps_saved, 0
            elif group is not None and changed:
                hand_over = group.stall_s + group.write_s if kept else 0
            else:
                hand_over = 0
            changed = True
            if due:
                fault = notices.pop(0)
                if fault.machine not in away:
                    away.add(fault.machine)
                    returns.append((fault.at_s + fault.back_s, fault.machine))
            for r in [r for r in returns if r[0] <= now]:
                returns.remove(r)
                away.discard(r[1])
            group = groups[machines - len(away)]
        if changed:
            group = groups[machines - len(away)]
            changed, steps = False, steps_saved
            start, in_cycle, writes = now + (hand_over + group.restart_s if group else 0), 0, []
        if group is None:
            waiting += 1
        elif now < start:
            recovery += 1
        else:
            in_cycle += 1
            if in_cycle <= group.every_steps * group.step_s:
                steps += 1 / group.step_s
            if in_cycle == group.every_steps * group.step_s + group.stall_s:
                in_cycle = 0
                writes.append((now + 1 + group.write_s, steps))
            for done in [w for w in writes if w[0] <= now + 1]:
                writes.remove(done)
                steps_saved = done[1]
    return steps, waiting, recovery


@settings(max_examples=150)
@given(st.data())
def test_a_run_counts_the_steps_that_a_ticking_clock_counts(data):
    draw = data.draw
    machines = draw(st.integers(1, 4))
    least = draw(st.integers(1, machines))
    make = st.builds(Group, st.integers(1, 9), st.integers(1, 6), st.integers(1, 3), st.integers(0, 12), st.integers(0, 15))
    groups = [draw(make) if n >= least else None for n in range(machines + 1)]
    seconds = draw(st.lists(st.integers(1, 399), max_size=5, unique=True))
    faults = [Fault(s + notice, draw(st.integers(0, machines - 1)), draw(st.integers(1, 90)), notice)
              for s in sorted(seconds) if (notice := draw(st.sampled_from([0, 0, 5, 30]))) is not None]  # fmt: skip
    total = 400
    out = play(groups, faults, total)
    steps, waiting, recovery = second_by_second(groups, faults, total)
    assert out.steps == pytest.approx(steps, abs=1e-6)
    assert (out.seconds["waiting"], out.seconds["recovery"]) == (waiting, recovery)
    assert sum(out.seconds.values()) == pytest.approx(total) and min(out.seconds[k] for k in KINDS if k != "fewer machines") >= -1e-9


@pytest.mark.parametrize(("mtbf_s", "work_s", "stall_s", "restart_s"), [(3600, 600, 30, 120), (20_000, 1500, 5, 400), (1000, 300, 60, 200)])
def test_mean_goodput_is_dalys(mtbf_s, work_s, stall_s, restart_s):
    """Daly 2006: work between saves takes M e^(R/M) (e^((tau + delta)/M) - 1) on average, restarts that fail again included."""
    group = Group(1.0, work_s, stall_s, 0.0, restart_s)
    total = mtbf_s * 20_000.0
    out = play([None, group], at_random(FaultRate("x", mtbf_s / 3600, 0.0, 0.0, ""), 1, total, seed=3), total)
    daly = work_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((work_s + stall_s) / mtbf_s))
    assert out.goodput == pytest.approx(daly, rel=0.02) and out.faults == pytest.approx(20_000, rel=0.03)


def test_without_faults_only_stalls_and_validations_and_the_start_are_lost():
    out = play([None, Group(2.0, 10, 5.0, 50.0, 100.0, validation_s=0.5)], [], 100 + 40 * 30.0)
    assert out.steps == 400 and out.seconds == {**dict.fromkeys(KINDS, 0.0), "trained": 800.0, "validation": 200.0, "stalls": 200.0, "recovery": 100.0}


def test_a_notice_that_is_long_enough_costs_no_step_and_a_short_one_does():
    groups = [None, Group(2.0, 100, 1.0, 20.0, 10.0), Group(1.0, 100, 1.0, 20.0, 10.0)]
    for notice, again in ((30.0, 0.0), (20.0, 90.0)):
        out = play(groups, [Fault(100 + notice, 0, 1e9, notice)], 200.0)
        assert out.seconds["work again"] == again
        assert out.steps == (90 - again) + (100 - 10 - (21 if not again else 0)) / 2  # alone it is half as fast, and starts behind the save


@pytest.mark.parametrize("name", ["llama3", "rsc-1", "opt-175b"])
def test_legalfin_keeps_97_per_cent_at_the_published_rates_of_rented_machines(name):
    rate = read_rates()[name]
    config = compose(["recipe/legalfin", "checkpoint.every=auto", f"cluster.mtbf_hours={rate.mtbf_hours}"])
    outcomes = simulate(config, rate, seeds=100)
    assert sum(o.goodput for o in outcomes) / 100 >= 0.97
    kept = build_plan(config).losses.goodput - shares(outcomes)["waiting"]  # the plan's estimate knows no waiting for a machine
    assert sum(o.goodput for o in outcomes) / 100 == pytest.approx(kept, abs=0.01)


def test_a_run_that_the_others_hold_shrinks_and_one_that_they_do_not_waits():
    rate = FaultRate("x", 20.0, 0.0, 2.0, "")
    small = simulate(compose(["recipe/legalfin", "hardware.nodes=4", "cluster.workers=[13,32]"]), rate, 40)
    large = simulate(compose(["recipe/legalfin"]), rate, 40)
    assert shares(small)["fewer machines"] > 0.05 > shares(small)["waiting"] and shares(large)["waiting"] > 0.1 and shares(large)["fewer machines"] == 0


def test_the_command(capsys, tmp_path):
    (tmp_path / "trace.csv").write_text("hours,machine,back_hours,notice_s\n10,1,1,\n20,0,,120\n")
    assert main("", ["simulate", "recipe/legalfin", "--faults", "llama3", "--seeds", "20"]) == 0
    assert "(auto)" in capsys.readouterr().out
    assert main("", ["simulate", "recipe/legalfin", "--faults", str(tmp_path / "trace.csv")]) == 0
    assert "2 faults of a trace" in capsys.readouterr().out
    for arguments, words in {
        ("--seeds", "0"): "--seeds: is 0",
        ("--seeds", "many"): "--seeds",
        ("--faults", "nowhere.csv"): "one of llama3, rsc-1, opt-175b, spot",
        ("--fault", "spot"): "--fault: unknown option",
    }.items():
        assert main("", ["simulate", "recipe/legalfin", *arguments]) == 2
        assert words in capsys.readouterr().err


def test_a_trace_names_machines_that_are_there(tmp_path):
    for text, words in (("hours,machine,back_hours\n1,2,1\n", "names machine 2"), ("hours,machine\n1,0\n", ":2 is no fault"), ("hours,machine,back_hours\nx,0,1\n", ":2 is no fault")):
        (tmp_path / "t.csv").write_text(text)
        with pytest.raises(UserError, match=words):
            read_trace(tmp_path / "t.csv", 2)


def test_quantiles_lie_between_the_values():
    assert [quantile([3.0, 1.0, 2.0], q) for q in (0.0, 0.25, 0.5, 1.0)] == [1.0, 1.5, 2.0, 3.0]
