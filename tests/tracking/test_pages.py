"""What a person sees: the run report and MLflow's own pages, in headless Chromium."""

import re

import pytest
from mlflow import MlflowClient

from raytune70b.config import compose
from raytune70b.storage import Folder
from raytune70b.tracking.mlflow import MlflowMirror
from raytune70b.tracking.report import report
from tests.tracking.browser import colours, needs_chromium, visit
from tests.tracking.run_of_records import Story


def eventful() -> Story:
    """A run with everything in it: a fault, a wait, a resize, a killed driver, skipped steps, costs."""
    story = Story().start(total_steps=200, config={"budget": {"usd": 1.0}}, plan={"tokens_per_s": 4000, "memory_bytes": 1.2e9, "hours": 0.08, "mfu": 0.4})
    story.group(4, 0).validation(0).steps(1, 60).checkpoint(60).validation(60).steps(61, 75)
    for rank in range(4):
        story.add("worker", rank=rank, host="h", step=70, memory_allocated=1e9 + rank * 1e7)
    story.wait(20).group_end("a machine <died>").add("wait", reason="4 workers wanted")
    story.wait(30).group(2, 60).steps(61, 100, seconds=1.8).checkpoint(100).validation(100)
    story.add("cost", step=100, hours=0.06, projected_hours=0.1, usd=0.2, projected_usd=0.4)
    story.wait(40).start(total_steps=200).group(4, 100).steps(101, 180).steps(181, 182, loss=None, skipped=True).steps(183, 200, mfu=0.38)
    story.add("cost", step=200, hours=0.12, projected_hours=0.12, usd=0.45, projected_usd=0.45)
    return story.checkpoint(200).validation(200).end()


def test_the_report_needs_nothing_from_elsewhere_and_shows_everything():
    page = report(eventful().records, "law-70b", "train:\n  steps: 200\n")
    assert not re.search(r"""(src|href)=["'](?!#)|url\((?!#)|@import|<script""", page)
    assert page.count("<svg") == 7
    for text in ("Where the time went", "lost work", "a machine &lt;died&gt;", "the driver was killed", "$0.45", "steps: 200", "step-00000200", "38.0%"):
        assert text in page, text
    ids = re.findall(r'\bid="([^"]+)"', page)
    unique = [i for i in ids if not re.match(r"(figure|axes|patch|line2d|text|xtick|ytick|legend|matplotlib|.*Collection|.*collection)[._]", i, re.IGNORECASE)]
    assert len(unique) == len(set(unique))


@pytest.mark.parametrize("records", [[], Story().start().records, Story().start().group(2, 0).records, Story().start().group(2, 0).steps(1, 1).records])
def test_a_run_that_ended_early_has_a_report_too(records):
    assert "<h1>r</h1>" in report(records, "r")


@needs_chromium
def test_the_report_opens_in_a_browser_without_an_error(tmp_path):
    (tmp_path / "report.html").write_text(report(eventful().records, "law-70b"))
    dom, errors = visit(f"file://{tmp_path}/report.html", tmp_path / "report.png", "1140,3400")
    assert errors == [] and dom.count("<svg") == 7 and colours(tmp_path / "report.png") > 30


@needs_chromium
@pytest.mark.timeout(900)
@pytest.mark.slow
def test_mlflow_compares_two_runs(tmp_path, mlflow_server):
    uri = f"http://127.0.0.1:{mlflow_server}"
    ids = []
    for name, rate in (("first", "3e-3"), ("second", "1e-3")):
        config = compose([f"run.path={tmp_path}", f"run.name={name}", f"tracking.mlflow={uri}", "tracking.experiment=compared", f"train.learning_rate={rate}"])
        mirror = MlflowMirror(config, (Folder(tmp_path) / name).make(), 1, [], print)
        for record in eventful().records:
            mirror.put(record)
        mirror.put_artifact("report.html", report(eventful().records, name).encode())
        assert mirror.close("finished", 120) is None
        ids.append(mirror.run_id)
    experiment = MlflowClient(uri).get_run(ids[0]).info.experiment_id
    pages = {
        "compare": f"{uri}/#/compare-runs?runs=[%22{ids[0]}%22,%22{ids[1]}%22]&experiments=[%22{experiment}%22]",
        "metrics": f"{uri}/#/experiments/{experiment}/runs/{ids[0]}/model-metrics",
    }
    wanted = {"compare": ("first", "second", "train.learning_rate", "0.003", "0.001", "validation/loss"), "metrics": ("first", "stall_s", "projected_usd")}
    for page, address in pages.items():
        missing = set(wanted[page])
        for patience_s in (15, 30, 60, 120):  # the page asks its server many things, and a busy machine answers slowly
            dom, _ = visit(address, tmp_path / f"{page}.png", "1600,1300", patience_ms=1000 * patience_s)
            missing = {text for text in wanted[page] if text not in dom}
            if not missing and colours(tmp_path / f"{page}.png") > 20:
                break
        assert not missing and colours(tmp_path / f"{page}.png") > 20, (page, missing)
