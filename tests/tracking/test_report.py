import json

import pytest

from raytune70b.config import compose
from raytune70b.storage import Folder
from raytune70b.tracking import report as module
from raytune70b.tracking.journal import to_line
from raytune70b.tracking.report import main, report
from raytune70b.tracking.watch import Watch
from tests.tracking.run_of_records import Story


def test_an_error_that_looks_like_tex_is_shown_as_it_is():
    page = report(Story().start().group(2, 0).steps(1, 3).group_end(r"ValueError: $\foo$ failed").group(2, 0).steps(1, 4).records, "r")
    assert page.count(r"$\foo$") >= 2, "in the picture and among what happened"


def test_a_report_that_fails_leaves_the_goodput_timeline(tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise ValueError("no picture")

    monkeypatch.setattr(module, "report", fail)
    run = Folder(tmp_path) / "r"
    watch = Watch(compose([f"run.path={tmp_path}", "run.name=r", "tracking.mlflow=null"]), run, 1, 10)
    for record in Story().start().group(2, 0).steps(1, 5).records:
        watch.record(record)
    watch.close("finished")
    assert "report.html failed" in capsys.readouterr().out and not run.exists("report.html")
    assert json.loads(run.read("goodput.json"))["seconds"]["train"] == 5.0


@pytest.mark.parametrize(
    ("more", "status"),
    [(lambda s: s.start().group(2, 5), "running"), (lambda s: s, "stopped"), (lambda s: s.start().end("failed"), "failed")],
)
def test_the_last_start_or_end_says_how_a_run_stands(tmp_path, capsys, more, status):
    run = Folder(tmp_path / "r").make()
    run.write("journal.jsonl", b"".join(to_line(r) for r in more(Story().start().group(2, 0).steps(1, 5).end("stopped")).records))
    assert main([str(tmp_path / "r")]) == 0 and f'class="note">{status}<' in run.read("report.html").decode()
    assert json.loads(capsys.readouterr().out) == {"report": f"{run.uri}/report.html"}


@pytest.mark.parametrize(("arguments", "words"), [([], "one run folder is wanted, 0 arguments"), (["typo/run"], "holds no journal.jsonl")])
def test_what_is_no_run_folder_is_one_line_and_makes_none(tmp_path, capsys, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2 and list(tmp_path.iterdir()) == []
    line = capsys.readouterr().err
    assert line.startswith("error: ") and words in line and line.count("\n") == 1
