import io

import pytest
from rich.console import Console as RichConsole

from raytune70b.tracking.console import Console, Progress, duration, lines_for, number
from tests.tracking.run_of_records import Story


def told(story, **options):
    """What a log shows of a story."""
    out = io.StringIO()
    console = Console(20, options.pop("quiet", False), options.pop("every_s", 0.0), RichConsole(file=out, width=200, soft_wrap=True, **options))
    for record in story.records:
        console.put(record)
    console.close()
    return out.getvalue()


def test_a_log_tells_faults_and_resizes_in_plain_words():
    story = Story().start().group(4, 0).steps(1, 7).group_end("Traceback\n  ...\nValueError: bad luck").group(2, 5).steps(6, 8)
    story.add("failure", rank=1, host="h", step=8, error="ValueError: bad luck", traceback="")
    story.add("wait", reason="4 workers wanted, 2 there")
    story.group(4, 8).steps(9, 9).group_end("preemption of node n7").group(4, 9).checkpoint(9).validation(9)
    story.add("checkpoint_failed", step=10, reason="disk full")
    lines = told(story).splitlines()
    for text in (
        "started 4 workers",
        "training starts at step 1 (model 3.0 s)",
        "the workers stopped after step 7: ValueError: bad luck",
        "resized from 4 to 2 workers",
        "training goes on after step 5; steps 6 to 7 are trained again (model 3.0 s)",
        "worker 1 on h failed after step 8: ValueError: bad luck",
        "waiting for machines: 4 workers wanted, 2 there",
        "resized from 2 to 4 workers",
        "the workers stopped after step 9: preemption of node n7",
        "back with 4 workers",
        "training goes on after step 9 (model 3.0 s)",
        "checkpoint of step 9: 1MB in 1.0 s, training stood still for 0.25 s",
        "checkpoint of step 10 failed, training goes on: disk full",
    ):
        assert text in lines, text
    assert any(line.startswith("validation at step 9: loss 4.1764") for line in lines)


def test_the_progress_line_has_step_loss_rate_and_time_left():
    line = told(Story().start().group(2, 0).steps(1, 10, seconds=2.0)).splitlines()[-1]
    assert line == "step 10/20  loss 4.9124  lr 1.00e-03  2048 tokens/s  2 workers  ETA 20s"


@pytest.mark.parametrize(("cost", "text"), [
    ({"hours": 1.0, "projected_hours": 2.0, "usd": 1234.5, "projected_usd": 4950.0}, "$1,234.50 so far, $4,950.00 at the end"),
    ({"hours": 1.0, "projected_hours": 50.0, "budget_share": 0.1}, "  1h00m so far, 2d02h at the end"), ({"hours": 0.1, "budget_share": 0.1}, "  6m00s so far"),
    ({"hours": 1.0, "projected_hours": 50.0}, "  ETA 18s"),  # no limit and no price: the ETA says it
])  # fmt: skip
def test_the_cost_stands_on_the_progress_line_in_money_or_else_in_hours(cost, text):
    story = Story().start().group(2, 0).steps(1, 1)
    story.add("cost", step=1, **cost)
    assert told(story.steps(2, 2)).splitlines()[-1].endswith(text)


def test_a_skipped_step_and_a_loss_that_is_no_number_are_said():
    line = told(Story().start().group(2, 0).steps(1, 1, loss=None, skipped=True)).splitlines()[-1]
    assert "loss not finite" in line and "SKIPPED" in line


def test_quiet_leaves_warnings():
    story = Story().start().group(2, 0).steps(1, 5).validation(5)
    story.add("warning", text="careful")
    assert told(story, quiet=True) == "warning: careful\n"


def test_lines_come_at_most_so_often_and_the_last_step_always():
    lines = [line for line in told(Story().start().group(2, 0).steps(1, 13), every_s=1000.0).splitlines() if line.startswith("step")]
    assert [line.split()[1] for line in lines] == ["1/20", "13/20"]


def test_a_terminal_shows_one_live_panel_and_the_events_above_it():
    shown = told(Story().start().group(2, 0).steps(1, 5).validation(5).steps(6, 6), force_terminal=True)
    assert "raytune70b" in shown and "6/20" in shown and "validation at step 5" in shown and "gradient norm" in shown


def test_the_time_left_counts_saves_and_forgets_the_pause_of_a_restart():
    story = Story().start().group(2, 0)
    for step in range(1, 40):
        story.steps(step, step, seconds=1.0).wait(1.0)
    progress = Progress(139)
    for record in story.records:
        progress.take(record)
    assert progress.seconds_left == pytest.approx(100 * 2.0, rel=0.03)
    second = Story()
    second.launch = 1
    for record in second.start().wait(5000).group(2, 39).steps(40, 40).records:
        progress.take(record)
    assert progress.seconds_left < 99 * 2.1


def test_the_first_step_of_a_group_says_nothing_of_the_speed():
    story = Story().start().group(2, 0).steps(1, 1, seconds=60.0).steps(2, 3, seconds=41.0).group_end("killed").group(2, 3).steps(4, 4, seconds=90.0)
    story.steps(5, 5, seconds=20.0)
    progress, left, forecasts = Progress(100), [], []
    for record in story.records:
        progress.take(record)
        if record["kind"] == "step":
            left.append(round(progress.seconds_left))
            forecasts.append(progress.forecast)
    assert left == [99 * 60, 98 * 41, 97 * 41, 96 * 41, 95 * 20] and forecasts == [None, *left[1:]]


@pytest.mark.parametrize(("seconds", "text"), [(8.4, "8s"), (200, "3m20s"), (18240, "5h04m"), (184000, "2d03h")])
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(950, "950"), (12_345, "12.3k"), (4_560_000, "4.56M"), (1.5e11, "150B"), (1.25e13, "12.5T")])
def test_numbers(value, text):
    assert number(value) == text


def test_a_clean_end_needs_no_words():
    assert lines_for({"kind": "group_end", "reason": "finished"}, Progress(1)) == []
