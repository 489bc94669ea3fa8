import threading
import time

import pytest

from raytune70b.config import compose, to_dict
from raytune70b.storage import Folder
from raytune70b.tracking.console import Progress
from raytune70b.tracking.cost import Spent, outlook
from raytune70b.tracking.derive import Accountant, Derived, RunGauges, back_within, budget_warnings, straggler_ratios
from raytune70b.tracking.journal import lineage, read_journal
from raytune70b.tracking.series import point
from raytune70b.tracking.watch import Watch, closing_table
from tests.tracking.conftest import wait_for
from tests.tracking.run_of_records import T0, Story, step_fields


def watch(tmp_path, *more, **options):
    config = compose([f"run.path={tmp_path}", "run.name=r", "tracking.mlflow=null", "tracking.console_every_s=0", "tracking.report=false", *more])
    return Watch(config, Folder(tmp_path) / "r", options.pop("launch", 1), 100, **options), Folder(tmp_path) / "r"


def test_records_from_many_threads_reach_the_journal_whole(tmp_path):
    seen, (w, run) = [], watch(tmp_path, "run.quiet=true")

    def worker(rank):
        for step in range(1, 101):
            w.record({"kind": "worker", "rank": rank, "host": "h", "step": step, "step_seconds": 1.0})

    threads = [threading.Thread(target=worker, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    w.close("finished")
    workers = [r for r in read_journal(run) if r["kind"] == "worker"]
    assert sorted((r["rank"], r["step"]) for r in workers) == [(rank, step) for rank in range(8) for step in range(1, 101)]
    assert all(r["launch"] == 1 and r["time"] > 0 for r in workers) and not seen


def test_a_sink_that_raises_or_hangs_harms_nobody(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("raytune70b.tracking.watch.DRAIN_S", 0.5)

    class Raises:
        calls = 0

        def put(self, record):
            Raises.calls += 1
            raise RuntimeError("a bad sink")

    class Hangs:
        def put(self, record):
            time.sleep(1000)

    w, run = watch(tmp_path, more_sinks=(Raises(), Hangs()))
    begin = time.monotonic()
    for step in range(1, 201):
        w.record({"kind": "step", **step_fields(step)})
    assert time.monotonic() - begin < 0.5
    w.close("finished")
    assert time.monotonic() - begin < 5
    assert len(lineage(read_journal(run), "step")) == 200 and Raises.calls >= 1
    assert capsys.readouterr().out.count("Raises failed") == 1


def test_a_record_costs_the_caller_less_than_a_tenth_of_a_millisecond(tmp_path):
    w, _ = watch(tmp_path, "run.quiet=true")
    begin = time.thread_time()
    for step in range(1, 2001):
        w.record({"kind": "step", **step_fields(step)})
    spent = (time.thread_time() - begin) / 2000
    w.close("finished")
    assert spent < 1e-4


@pytest.mark.parametrize(("refusals", "patience"), [(2, 60), (1000, 2)])
def test_the_report_is_written_when_storage_refuses_for_a_moment_and_told_when_it_never_takes_it(tmp_path, capsys, monkeypatch, refusals, patience):
    write, left = Folder.write, [refusals]

    def refuses(folder, name, content):
        if name == "report.html" and left[0]:
            left[0] -= 1
            raise OSError("Service Unavailable")
        write(folder, name, content)

    monkeypatch.setattr(Folder, "write", refuses)
    w, run = watch(tmp_path, "tracking.report=true", f"tracking.close_timeout_s={patience}")
    for record in Story().start().group(2, 0).steps(1, 5).records:
        w.record(record)
    w.close("finished")
    lacks = "report.html could not be written (Service Unavailable)" in capsys.readouterr().out
    assert (lacks, run.exists("report.html")) == ((True, False) if refusals > 2 else (False, True))


def test_nonsense_is_refused_without_raising(tmp_path, capsys):
    w, run = watch(tmp_path)
    w.record({"no": "kind"})
    w.record(None)
    w.close("finished")
    assert [r["kind"] for r in read_journal(run)] == ["run_end"] and "journal failed" in capsys.readouterr().out


def test_the_closing_table_tells_the_run_as_if_nothing_had_failed(tmp_path):
    story = Story().start().group(4, 0).validation(0).steps(1, 7).group_end("killed").group(2, 5).steps(6, 10, skipped=True).validation(10).end()
    config = compose([f"run.path={tmp_path}", "tracking.mlflow=http://host:5000"])
    rows = dict(closing_table(story.records, config, Folder(tmp_path) / "r", "finished"))
    assert rows["steps"] == "10, 5 skipped" and rows["train loss"] == "5.8812 -> 4.9124" and rows["validation loss"] == "5.0000 -> 4.0937 (-18.1%)"
    assert rows["tokens"] == "40,960 of which 39,000 trained" and "lost work 2.0s" in rows["time"]
    assert rows["checkpoints"].endswith("r/checkpoints") and "http://host:5000" in rows["MLflow"]


def test_the_next_launch_goes_on_in_the_same_journal(tmp_path, capsys):
    w, run = watch(tmp_path)
    for record in Story().start().group(2, 0).steps(1, 5).records:
        w.record(record)
    w.close("stopped")
    w, run = watch(tmp_path, launch=2)
    w.record({"kind": "run_start", "total_steps": 100})
    w.record({"kind": "group_start", "attempt": 1, "world_size": 2, "hosts": ["a", "a"]})
    w.record({"kind": "group_ready", "attempt": 1, "world_size": 2, "resumed_step": 5})
    w.record({"kind": "step", "attempt": 1, **step_fields(6)})
    w.close("finished")
    assert [r["step"] for r in lineage(read_journal(run), "step")] == [1, 2, 3, 4, 5, 6]
    out = capsys.readouterr().out
    assert "back with 2 workers\ntraining goes on after step 5\n" in out


def test_mfu_is_the_plans_formula():
    derived = Derived()
    derived.take({"kind": "run_start", "plan": {"flops_per_token": 6 * 7e10, "peak_flops": 989e12}})
    record, _ = derived.take({"kind": "step", "tokens": 131072, "seconds": 8.0, "world_size": 16})
    assert record["mfu"] == pytest.approx(131072 / 8.0 * 6 * 7e10 / (16 * 989e12))
    record, _ = Derived().take({"kind": "step", "tokens": 1, "seconds": 1.0, "world_size": 1})
    assert "mfu" not in record


def told_of_probes(derived, *probes):
    """Warnings of three workers' probes; the third one's times are given."""
    derived.take({"kind": "group_start"})
    told = []
    for number, seconds in enumerate(probes, 1):
        for rank, own in enumerate((1.0, 1.02, seconds)):
            for _ in range(4):  # a probe's result stands in several samples
                told.append(derived.take({"kind": "worker", "rank": rank, "host": f"h{rank}", "probe_seconds": own, "probe": number})[1])
    return [text for text in told if text]


def test_a_straggler_is_named_once_a_worker_group_when_it_stays_slow():
    derived = Derived()
    assert told_of_probes(derived, 1.7, 1.8, 1.0, 1.6, 1.6) == [], "a busy start or moment is no straggler"
    for _ in range(2):
        assert told_of_probes(derived, 1.0, 1.5, 1.5, 1.53, 1.5, 1.5) == ["worker 2 on h2 computes 1.50 times slower than the median worker; all wait for it"]
    assert straggler_ratios({0: 1.0, 1: 2.0}) == {0: 1.0, 1: 2.0}


def test_budget_warnings_come_at_80_percent_and_when_the_end_lies_beyond():
    budget = compose(["budget.hours=10", "budget.usd=100", "budget.price_per_gpu_hour=2"]).budget
    assert budget_warnings(budget, {"hours": 1, "projected_hours": 9, "usd": 10, "projected_usd": 90}) == {}
    found = budget_warnings(budget, {"hours": 8, "projected_hours": 9, "usd": 79, "projected_usd": 150})
    assert list(found.values()) == [
        "80% of the budget are used: 8h00m of 10h00m",
        "at this speed the run ends at $150.00, its budget is $100.00; it will stop before that with a checkpoint",
    ]


def test_a_projection_that_wavers_about_its_limit_is_told_once_and_a_later_overrun_again():
    budget = compose(["budget.hours=10", "budget.usd=10", "budget.price_per_gpu_hour=2"]).budget
    assert back_within(budget, {"hours": 1, "projected_hours": 9.8, "usd": 1, "projected_usd": 9}) == {"beyond usd"}
    assert back_within(budget, {"hours": 1, "usd": 1}) == set()
    unknown = outlook(budget, Spent(3600.0, 3600.0, 0.0, 1), None)
    assert unknown == {"hours": 1.0, "usd": 2.0, "budget_share": 0.2}, "nothing is projected before a speed is known"
    assert budget_warnings(budget, unknown) == {}


def accounts(story, total_steps, monkeypatch, **budget):
    """What an accountant wrote of a story, played on its own clock."""
    now, written, records = [0.0], [], []
    monkeypatch.setattr("raytune70b.tracking.derive.time.monotonic", lambda: now[0])
    monkeypatch.setattr("raytune70b.tracking.derive.time.time", lambda: now[0])
    progress = Progress(total_steps)
    accountant = Accountant(compose([f"budget.{k}={v}" for k, v in budget.items()]).budget, progress, [], lambda: records, written.append)
    for record in story.records:
        while record["kind"] != "run_start" and record["time"] - now[0] > 60:  # the watch looks once a minute
            now[0] += 60
            accountant.look()
        now[0] = record["time"]
        records.append(record)
        progress.take(record)
        accountant.put(record)
    return written


def test_a_slow_first_step_is_no_overrun_and_a_true_overrun_later_is_told_again(monkeypatch):
    story = Story().start().group(16, 0).steps(1, 1, seconds=60.0).steps(2, 40, seconds=41.0)
    written = accounts(story, 5000, monkeypatch, hours=72)
    assert "projected_hours" not in next(r for r in written if r["kind"] == "cost" and r["step"] == 1)
    assert [r for r in written if r["kind"] == "warning"] == []
    story.steps(41, 60, seconds=80.0).steps(61, 200, seconds=41.0).steps(201, 260, seconds=80.0)
    warnings = [r["text"] for r in accounts(story, 5000, monkeypatch, hours=72) if r["kind"] == "warning"]
    assert len(warnings) == 2 and all(text.startswith("at this speed the run ends at") for text in warnings)


def test_money_goes_on_while_a_run_waits_or_loads(monkeypatch):
    story = Story().start().group(2, 0).steps(1, 5, seconds=20.0).group_end("the node went").wait(70 * 3600).group(2, 5).steps(6, 6)
    written = accounts(story, 100, monkeypatch, hours=80)
    costs = [r for r in written if r["kind"] == "cost" and r["step"] == 5]
    assert 4100 < len(costs) < 4300 and costs[-1]["hours"] > 69.9 and costs[-1]["budget_share"] > 0.87
    assert costs[-1]["seconds_by_label"]["recovery"] > 69.9 * 3600
    assert [r["text"] for r in written if r["kind"] == "warning"] == ["80% of the budget are used: 2d16h of 3d08h"]
    loading = accounts(Story().start().wait(3600).group(2, 0), 100, monkeypatch, hours=10)
    assert loading[-1]["step"] == 0 and 0.98 < loading[-1]["hours"] <= 1 and "projected_hours" not in loading[-1]


def test_the_watch_looks_at_the_money_until_it_is_closed_and_not_before_this_launch_has_begun(tmp_path, monkeypatch):
    monkeypatch.setattr("raytune70b.tracking.watch.LOOK_EVERY_S", 0.01)
    monkeypatch.setattr("raytune70b.tracking.derive.ACCOUNT_EVERY_S", 0.01)
    w, run = watch(tmp_path, "run.quiet=true")
    w.record({"kind": "run_start", "time": time.time() - 7200})
    wait_for(lambda: sum(r["kind"] == "cost" for r in w.records) >= 2)
    w._ending.set()  # the driver is killed
    killed, _ = watch(tmp_path, "run.quiet=true", launch=2)
    before = len(killed.records)
    time.sleep(0.1)
    assert len(killed.records) == before
    killed.close("failed")
    assert not killed._looking.is_alive() and read_journal(run)[-1]["kind"] == "run_end"


def test_costs_that_go_on_within_a_step_are_points_of_their_own():
    costs = [point({"kind": "cost", "step": 5, "time": 1000.0 + n, "hours": 1.0 + n}) for n in range(2)]
    steps = [point({"kind": "step", "time": 1000.0 + n, **step_fields(5)}) for n in range(2)]
    assert len({p.place for p in costs}) == 2 and len({p.place for p in steps}) == 1


def test_the_gauges_of_a_launch_stand_before_its_first_step_and_follow_its_own_checkpoint_interval(monkeypatch):
    shown, connected = {}, [False]
    monkeypatch.setattr("raytune70b.tracking.derive.ray.is_initialized", lambda: connected[0])
    monkeypatch.setattr("raytune70b.tracking.derive.Gauges.set", lambda self, name, value, **labels: shown.update({name: value}))
    config, progress = compose(["checkpoint.every=1000"]), Progress(5000)
    gauges = RunGauges("r", 5000, config.budget, progress)

    def put(story):
        for record in story.records:
            progress.take(record)
            gauges.put(record)

    put(Story().start(total_steps=4000, resumed_step=7, config=to_dict(config)))
    assert shown == {}, "Ray is not there yet"
    connected[0] = True
    put(Story().group(2, 7))
    assert shown == {
        "step": 7, "total_steps": 4000, "last_step_unixtime": T0, "checkpoint_step": 7, "checkpoint_unixtime": T0 + 5, "checkpoint_due_seconds": 4 * 3600,
    }  # fmt: skip
    put(Story().steps(8, 20, seconds=41.0))
    assert shown["step"] == 20 and shown["checkpoint_due_seconds"] == pytest.approx(41_000)
