"""Places that do not hold are one line within seconds, before a job starts anything: real addresses, real file systems."""

import os
import runpy
import socket
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from raytune70b import cluster, places
from raytune70b.config import compose
from raytune70b.errors import UserError
from raytune70b.places import check_mlflow, check_places, check_writable
from raytune70b.storage import Folder
from tests.running import ROOT, run_job

IN_TIME_S = 15


@pytest.fixture
def closed():
    """HOST:PORT where nobody listens."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    return f"127.0.0.1:{port}"


@pytest.fixture
def silent():
    """HOST:PORT that takes connections and never says a word."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def web():
    """HOST:PORT of a web server, as a dashboard is one."""
    server = HTTPServer(("127.0.0.1", 0), type("Quiet", (BaseHTTPRequestHandler,), {"log_message": lambda *_: None}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()


def refused(action, *words):
    begin = time.monotonic()
    with pytest.raises(UserError) as error:
        action()
    assert time.monotonic() - begin < IN_TIME_S
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(("kind", "why"), [("closed", "Connection refused"), ("silent", "no answer"), ("web", "no answer")])
def test_a_cluster_that_does_not_answer(kind, why, request, monkeypatch):
    monkeypatch.setattr(cluster, "ANSWER_S", 0.5)
    address = request.getfixturevalue(kind)
    refused(lambda: cluster.check(compose([f"cluster.address={address}"])), "cluster.address", address, why, "cluster.address=local")
    monkeypatch.setenv("RAY_ADDRESS", address)
    refused(lambda: cluster.check(compose([])), "cluster.address", address)


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "ray://head:10001", "head"])
def test_what_is_no_address_of_a_head(address, monkeypatch):
    refused(lambda: cluster.check(compose([f"cluster.address={address}"])), address, "HOST:PORT", "ray job submit")
    monkeypatch.setenv("RAY_ADDRESS", address)
    refused(lambda: cluster.check(compose([])), address, "HOST:PORT")


def test_a_job_that_starts_its_own_cluster_asks_nobody(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cluster.check(compose([]))
    monkeypatch.setenv("RAY_ADDRESS", "10.9.9.9:6379")
    cluster.check(compose(["cluster.address=local"]))


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    refused(lambda: check_writable("run.path", Folder(tmp_path / "file")), "run.path", str(tmp_path / "file"), "Not a directory")
    refused(lambda: check_writable("run.path", Folder(tmp_path / "file" / "a" / "b")), "Not a directory")
    refused(lambda: check_writable("run.path", Folder(tmp_path / ("n" * 300))), "File name too long")
    refused(lambda: check_writable("data.path", Folder("/proc/somewhere/else")), "data.path", "/proc/somewhere/else")
    refused(lambda: check_writable("data.path", Folder("nosuch://bucket/x")), "nosuch")
    check_writable("run.path", Folder(tmp_path / "new" / "run"))
    assert {p.name for p in tmp_path.iterdir()} == {"file"}, "nothing is left behind"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_of_somebody_else(tmp_path):
    (tmp_path / "theirs").mkdir(mode=0o500)
    refused(lambda: check_writable("run.path", Folder(tmp_path / "theirs" / "runs")), "Permission denied")


@pytest.mark.parametrize("kind", ["closed", "silent"])
def test_an_object_store_that_does_not_answer(kind, request, monkeypatch):
    monkeypatch.setattr(places, "ANSWER_S", 0.5)
    for name, value in {"AWS_ENDPOINT_URL": f"http://{request.getfixturevalue(kind)}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(name, value)
    refused(lambda: check_writable("run.path", Folder("s3://bucket/runs")), "run.path", "s3://bucket/runs", "no answer")


def test_data_that_does_not_answer_is_told_too(closed, tmp_path, monkeypatch):
    monkeypatch.setattr(places, "ANSWER_S", 0.5)
    for name, value in {"AWS_ENDPOINT_URL": f"http://{closed}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(name, value)
    refused(lambda: check_places(compose(["data.path=s3://bucket/data"]), "run.path", Folder(tmp_path)), "data.path", "s3://bucket/data", "no answer")


def test_an_mlflow_server_that_is_not_there_is_told_at_a_runs_beginning_only(closed, web, tmp_path):
    config = compose([f"tracking.mlflow=http://{closed}"])
    refused(lambda: check_mlflow(config), "tracking.mlflow", f"http://{closed}", "refused", "tracking.mlflow=sqlite")
    refused(lambda: check_places(config, "run.path", Folder(tmp_path)), "tracking.mlflow")
    Folder(tmp_path).write("config.yaml", b"")  # what a launch writes first
    check_places(config, "run.path", Folder(tmp_path))
    for fine in (f"http://{web}", "sqlite", "null", "sqlite:////tmp/somewhere.db", "databricks"):
        check_mlflow(compose([f"tracking.mlflow={fine}"]))


@pytest.mark.parametrize(("job", "settings", "key"), [
    ("finetune", ["run.path={file}/runs"], "run.path"), ("sweep", ["run.path={file}/runs"], "run.path"), ("prepare", ["data.path={file}/data"], "data.path"),
    ("export", ["run.path={tmp}", "export.path={file}/model"], "export.path"), ("evaluate", ["evaluation.model={file}/model"], "evaluation.model"),
    ("evaluate", ["run.path={file}"], "run.path"),
])  # fmt: skip
def test_each_job_looks_at_its_output_first(job, settings, key, tmp_path):
    (tmp_path / "file").touch()
    config = compose([s.format(file=tmp_path / "file", tmp=tmp_path) for s in settings])
    module = runpy.run_path(str(ROOT / f"jobs/{job}.py"))
    refused(lambda: module["run" if job == "prepare" else "main"](config), f"{key}: {tmp_path}/file", "Not a directory")


def test_a_job_ends_with_one_line_and_starts_nothing(closed, tmp_path):
    code, output = run_job("finetune", f"run.path={tmp_path}/runs", f"cluster.address={closed}", timeout=60)
    lines = [line for line in output.splitlines() if line.strip()]
    assert code == 2 and len(lines) == 1 and lines[0].startswith(f"error: cluster.address: no Ray cluster answers at {closed} (Connection refused)"), output
    assert not list(tmp_path.iterdir())
