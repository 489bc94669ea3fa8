"""Dashboard, alert rules and metrics against Prometheus itself; skipped where it is not installed (Debian: apt-get install prometheus)."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml

import raytune70b.tracking
from raytune70b.storage import Folder
from raytune70b.tracking.gauges import GPU_ONLY, PREFIX, RUN, WORKER
from tests.conftest import write_blocks
from tests.running import TINY, start_job

MONITORING = Path(raytune70b.tracking.__path__[0]) / "monitoring"
needs_prometheus = pytest.mark.skipif(not shutil.which("prometheus") or not shutil.which("promtool"), reason="prometheus is not installed")


def dashboard_queries():
    """(panel, query) of every target, for any run."""
    panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    return [(p["title"], t["expr"].replace("$run", ".*")) for p in panels for t in p.get("targets", [])]


def names_in(text):
    return set(re.findall(rf"ray_{PREFIX}(\w+)", text))


def test_dashboard_and_rules_use_documented_metrics_and_the_dashboard_all_of_them():
    documented = {**RUN, **WORKER}
    shown = names_in(" ".join(query for _, query in dashboard_queries()))
    assert shown == set(documented)
    assert names_in((MONITORING / "alerts.yml").read_text()) <= set(documented)


def test_each_legend_of_the_dashboard_names_the_run():
    panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    assert [(p["title"], t["legendFormat"]) for p in panels for t in p.get("targets", []) if not t["legendFormat"].startswith("{{run}}")] == []
    unit = {p["fieldConfig"]["defaults"]["unit"] for p in panels for t in p.get("targets", []) if "failed_checkpoints" in t["expr"]}
    assert unit == {"short"}, "a count"


@needs_prometheus
def test_promtool_accepts_the_files_and_each_alert_comes_when_it_should(tmp_path):
    for name in ("alerts.yml", "prometheus.yml"):
        shutil.copy(MONITORING / name, tmp_path)
    shutil.copy(Path(__file__).with_name("alerts_test.yml"), tmp_path)
    tested = {t["alertname"] for group in yaml.safe_load((tmp_path / "alerts_test.yml").read_text())["tests"] for t in group["alert_rule_test"]}
    assert tested == {rule["alert"] for rule in yaml.safe_load((tmp_path / "alerts.yml").read_text())["groups"][0]["rules"]}
    for command in (["check", "config", "prometheus.yml"], ["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        result = subprocess.run(["promtool", *command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stdout + result.stderr


class Prometheus:
    """A Prometheus with this package's configuration, scraping each second."""

    def __init__(self, folder: Path):
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
            self.address = f"127.0.0.1:{taken.getsockname()[1]}"
        shutil.copy(MONITORING / "alerts.yml", folder)
        (folder / "prometheus.yml").write_text((MONITORING / "prometheus.yml").read_text().replace("10s", "1s"))
        with open(folder / "log", "w") as log:
            self.process = subprocess.Popen(
                ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={self.address}"],
                stdout=log, stderr=log,
            )  # fmt: skip

    def get(self, path, **query):
        with urllib.request.urlopen(f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
            return json.load(answer)["data"]

    def has(self, query):
        with contextlib.suppress(OSError):
            return bool(self.get("query", query=query)["result"])
        return False

    def close(self):
        self.process.terminate()
        self.process.wait(20)


@pytest.fixture
def prometheus(tmp_path):
    server = Prometheus(tmp_path)
    yield server
    server.close()


@needs_prometheus
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_every_documented_metric_of_a_real_run_is_read_back_and_every_dashboard_query_has_data(prometheus, tmp_path):
    write_blocks(Folder(tmp_path / "blocks"), {"train": [64], "validation": [8]}, seq_len=32)
    job = start_job(
        "finetune", *TINY, f"data.path={tmp_path}/blocks", f"run.path={tmp_path}", "run.name=watched", "train.epochs=1000", "train.global_batch_size=4",
        "train.micro_batch_size=2", "cluster.address=local", "validation.every=20", "validation.max_blocks=4", "checkpoint.every=20",
        "budget.hours=10", "budget.usd=100", "budget.price_per_gpu_hour=2", "tracking.mlflow=null", env={"RAY_metrics_report_interval_ms": "5000"},
    )  # fmt: skip
    try:
        wanted = {f'ray_{PREFIX}{name}{{run="watched"}}' for name in {**RUN, **WORKER} if name not in GPU_ONLY}
        queries = {query for _, query in dashboard_queries() if not names_in(query) & set(GPU_ONLY)}
        missing = wanted | queries
        end = time.monotonic() + 300
        while missing and job.poll() is None and time.monotonic() < end:
            missing = {query for query in missing if not prometheus.has(query)}
            time.sleep(0.5)
        assert not missing, f"{sorted(missing)} without data; the job said {job.stdout.read() if job.poll() is not None else 'nothing yet'}"
        for _ in range(8):  # and stay, though some are set seldom
            time.sleep(1)
            assert {r["metric"]["rank"] for r in prometheus.get("query", query=f"ray_{PREFIX}worker_step")["result"]} == {"0", "1"}
            assert prometheus.has(f"ray_{PREFIX}validation_loss")
        assert {rule["health"] for group in prometheus.get("rules")["groups"] for rule in group["rules"]} == {"ok"}
    finally:
        job.send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=150)
    assert job.returncode == 75, output
    assert os.path.exists(tmp_path / "watched" / "report.html")
