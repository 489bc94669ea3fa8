import threading
import time

import pytest

from raytune70b.config import compose
from raytune70b.storage import Folder
from raytune70b.tracking.derive import Derived, budget_warnings, straggler_ratios
from raytune70b.tracking.journal import lineage, read_journal
from raytune70b.tracking.watch import Watch, closing_table
from tests.tracking.run_of_records import Story, step_fields


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
