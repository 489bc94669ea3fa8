"""Against MLflow itself: its sqlite store, and a server of its own that is down, slow or locked for a while."""

import contextlib
import json
import socket
import socketserver
import sqlite3
import threading
import time

import pytest
from mlflow import MlflowClient

from raytune70b.config import compose, to_dict
from raytune70b.storage import Folder
from raytune70b.tracking import mlflow as mirror_module
from raytune70b.tracking.entities import LONGEST_VALUE, parameters, shortened
from raytune70b.tracking.journal import to_line
from raytune70b.tracking.mlflow import MlflowMirror, experiment_id, tracking_uri
from tests.tracking.conftest import wait_for
from tests.tracking.run_of_records import Story


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(mirror_module, "CADENCE_S", 0.05)
    monkeypatch.setattr(mirror_module, "LONGEST_WAIT_S", 1.0)


def configure(tmp_path, *more):
    config = compose([f"run.path={tmp_path}", "run.name=r", *more])
    return config, (Folder(tmp_path) / "r").make()


def mirror(config, run, launch=1, history=(), told=None):
    return MlflowMirror(config, run, launch, list(history), (told if told is not None else []).append)


def put(target, records):
    for record in records:
        target.put(record)


def histories(uri, run_id, *keys):
    client = MlflowClient(uri)
    return [[m.step for m in client.get_metric_history(run_id, key)] for key in keys]


def test_a_run_with_fault_resize_and_driver_kill_is_one_mlflow_run_with_each_step_once(tmp_path):
    config, run = configure(tmp_path)
    first = Story().start(total_steps=20, data={"digest": "d1", "source": "/data/law", "rows": 7}).group(4, 0).validation(0).steps(1, 8).checkpoint(8)
    first.steps(9, 11).group_end("killed").group(2, 8).steps(9, 13)
    one = mirror(config, run)
    put(one, first.records)
    wait_for(lambda: not one._points and one.run_id and MlflowClient(tracking_uri(config)).get_run(one.run_id).inputs.dataset_inputs)
    done = len(first.records)
    first.wait(60).start(total_steps=20).group(3, 8).steps(9, 20).validation(20).end()  # the driver was killed: no close
    two = mirror(config, run, 2, first.records[:done])
    put(two, first.records[done:])
    assert two.close("finished", 60) is None and two.run_id == one.run_id
    one._closing.set()
    uri = tracking_uri(config)
    assert histories(uri, two.run_id, "train/loss", "validation/loss", "checkpoint/bytes") == [list(range(1, 21)), [0, 20], [8]]
    client = MlflowClient(uri)
    found = client.search_runs([client.get_experiment_by_name("raytune70b").experiment_id])
    assert [r.info.run_id for r in found] == [two.run_id] and found[0].info.status == "FINISHED"
    assert [(d.dataset.name, d.dataset.digest) for d in found[0].inputs.dataset_inputs] == [("law", "d1")]
    assert {"config.yaml", "launches"} <= {a.path for a in client.list_artifacts(two.run_id)}
    assert found[0].data.metrics["train/loss"] == pytest.approx(first.records[-3]["loss"])


def test_what_the_server_lacks_of_earlier_launches_is_delivered_by_the_next(tmp_path):
    config, run = configure(tmp_path)
    story = Story().start().group(2, 0).steps(1, 30)
    story.records[10:13] = reversed(story.records[10:13])  # records may overtake each other
    two = mirror(config, run, 2, story.records)
    assert two.close("stopped", 60) is None
    assert histories(tracking_uri(config), two.run_id, "train/loss") == [list(range(1, 31))]
    assert MlflowClient(tracking_uri(config)).get_run(two.run_id).info.status == "KILLED"


def test_a_kill_between_the_key_and_the_run_id_leaves_one_run(tmp_path):
    config, run = configure(tmp_path)
    one = mirror(config, run)
    assert one.close("stopped", 60) is None
    ids = json.loads(run.read("mlflow.json"))
    run.write("mlflow.json", json.dumps({**ids, "runs": {}}).encode())
    two = mirror(config, run, 2)
    assert two.close("finished", 60) is None and two.run_id == one.run_id


def test_changed_long_and_odd_parameters_never_raise(tmp_path):
    long = "x" * 20_000
    config, run = configure(tmp_path, f"data.tokenizer={long}", 'model.config={"model_type": "llama", "rope ü{": 1, "eos": ""}')
    one = mirror(config, run)
    put(one, Story().start().records)
    assert one.close("stopped", 60) is None
    config.train.learning_rate *= 2
    two = mirror(config, run, 2)
    put(two, Story().start().records)
    assert two.close("finished", 60) is None
    client = MlflowClient(tracking_uri(config))
    data = client.get_run(two.run_id).data
    assert data.params["train.learning_rate"] == "0.003" and "train.learning_rate: 0.003 -> 0.006" in data.tags["changed_in_launch_2"]
    assert len(data.params["data.tokenizer"]) <= LONGEST_VALUE and "parameters/data.tokenizer.txt" in data.params["data.tokenizer"]
    with open(client.download_artifacts(two.run_id, "parameters/data.tokenizer.txt", str(tmp_path))) as full:
        assert full.read() == long
    assert data.params["model.config.rope __"] == "1"


def test_every_setting_becomes_a_parameter():
    config = compose([])
    flat = parameters(to_dict(config))
    assert flat["train.global_batch_size"] == "16" and flat["cluster.workers"] == "[2, 2]" and flat["budget.usd"] == "null"
    assert shortened(flat) == (flat, {})


def test_a_locked_database_delays_metrics_and_loses_none(tmp_path):
    config, run = configure(tmp_path)
    story = Story().start().group(2, 0).steps(1, 5)
    one = mirror(config, run)
    wait_for(lambda: one.run_id)
    lock = sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    put(one, story.records)
    time.sleep(2)
    assert one._points  # still waiting
    lock.execute("ROLLBACK")
    assert one.close("finished", 60) is None
    assert histories(tracking_uri(config), one.run_id, "train/loss") == [[1, 2, 3, 4, 5]]


def test_a_server_that_is_down_for_the_whole_run_costs_one_line_and_no_time(tmp_path):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    config, run = configure(tmp_path, f"tracking.mlflow=http://127.0.0.1:{port}")
    told = []
    one = mirror(config, run, told=told)
    begin = time.monotonic()
    put(one, Story().start().group(2, 0).steps(1, 500).records)
    assert time.monotonic() - begin < 0.5
    wait_for(lambda: told, 60)
    line = one.close("finished", 1.0)
    assert "lacks 500 entries" in line and "the same command again delivers them" in line and one.run_id is None
    assert time.monotonic() - begin < 60 and len(told) == 1


class Gate(socketserver.ThreadingTCPServer):
    """Stands before a server: refuses for a while (`open` is clear), or answers each request late."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, port, delay_s=0.0):
        super().__init__(("127.0.0.1", 0), GateHandler)
        self.target, self.delay_s, self.open = port, delay_s, threading.Event()
        self.open.set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def uri(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class GateHandler(socketserver.BaseRequestHandler):
    def handle(self):
        if not self.server.open.is_set():
            return
        with socket.create_connection(("127.0.0.1", self.server.target)) as target, contextlib.suppress(OSError):
            threading.Thread(target=self.copy, args=(target, self.request, 0.0), daemon=True).start()
            self.copy(self.request, target, self.server.delay_s)

    def copy(self, source, sink, delay_s):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(delay_s)
                if not self.server.open.is_set():
                    break
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)


def test_a_server_away_in_mid_run_gets_each_step_once(tmp_path, mlflow_server):
    gate = Gate(mlflow_server)
    config, run = configure(tmp_path, f"tracking.mlflow={gate.uri}", "tracking.experiment=away")
    told, story = [], Story().start().group(2, 0).steps(1, 200)
    one = mirror(config, run, told=told)
    for n, record in enumerate(story.records):
        one.put(record)
        time.sleep(0.01)
        if n == 40:
            wait_for(lambda: one.run_id, 60)
            gate.open.clear()
        if n == 120:
            gate.open.set()
    assert one.close("finished", 60) is None
    assert histories(gate.uri, one.run_id, "train/loss") == [list(range(1, 201))]
    assert len(told) <= 2, "of metrics and of the rest once each"


def test_a_slow_server_delays_nobody(tmp_path, mlflow_server):
    gate = Gate(mlflow_server, delay_s=0.2)
    config, run = configure(tmp_path, f"tracking.mlflow={gate.uri}", "tracking.experiment=slow")
    one = mirror(config, run)
    begin = time.monotonic()
    put(one, Story().start().group(2, 0).steps(1, 300).records)
    assert time.monotonic() - begin < 0.5
    assert one.close("finished", 120) is None
    gate.delay_s = 0.0
    assert histories(gate.uri, one.run_id, "train/loss") == [list(range(1, 301))]


def test_an_artifact_that_cannot_be_stored_holds_up_nothing_else(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no credentials for the artifact store")

    config, run = configure(tmp_path)
    monkeypatch.setattr(MlflowClient, "log_text", refuse)
    asked, ask = [], MlflowClient.get_metric_history
    monkeypatch.setattr(MlflowClient, "get_metric_history", lambda *a, **k: asked.append(a) or ask(*a, **k))
    told: list[str] = []
    one = mirror(config, run, told=told)
    story = Story().start(total_steps=3, data={"digest": "d1", "source": "/data/law", "rows": 7}).group(1, 0).steps(1, 3)
    put(one, story.records)
    uri = tracking_uri(config)
    wait_for(lambda: told and one.run_id and MlflowClient(uri).get_run(one.run_id).inputs.dataset_inputs)
    done = len(story.records)
    put(one, story.steps(4, 6).end().records[done:])
    wait_for(lambda: not one._points)
    line = one.close("finished", 3)
    assert "no credentials" in str(one._trouble) and "lacks config.yaml, launches/config-1.yaml (no credentials for the artifact store)" in line
    assert told == [f"MLflow at {uri} did not take config.yaml (no credentials for the artifact store); training goes on, it is tried again"]
    assert asked == [], "what was delivered is known"
    assert histories(uri, one.run_id, "train/loss") == [[1, 2, 3, 4, 5, 6]]
    assert MlflowClient(uri).get_run(one.run_id).info.status == "FINISHED"


def story_of_launches():
    story = Story().start(total_steps=9, data={"digest": "d1", "source": "/data/law", "rows": 7}).group(2, 0).steps(1, 5).checkpoint(5)
    return story, len(story.records)


@pytest.mark.parametrize("gone", ["deleted", "never there"])
def test_a_run_that_was_deleted_between_launches_is_made_anew_and_filled_from_the_journal(tmp_path, gone):
    config, run = configure(tmp_path)
    story, _ = story_of_launches()
    one = mirror(config, run)
    put(one, story.records)
    assert one.close("stopped", 60) is None
    uri, ids = tracking_uri(config), json.loads(run.read("mlflow.json"))
    if gone == "deleted":
        MlflowClient(uri).delete_run(one.run_id)
    else:  # the server's database was made anew
        run.write("mlflow.json", json.dumps({"key": "another", "runs": {**ids["runs"], uri: "f" * 32}}).encode())
    before, launch = len(story.records), story.start(total_steps=9)
    two = mirror(config, run, 2, story.records[:before])
    put(two, launch.records[before:])
    assert two.close("finished", 60) is None and two.run_id not in (one.run_id, "f" * 32)
    assert histories(uri, two.run_id, "train/loss", "checkpoint/bytes") == [[1, 2, 3, 4, 5], [5]]
    assert json.loads(run.read("mlflow.json"))["runs"] == {uri: two.run_id}


def test_a_run_that_is_deleted_while_it_trains_is_made_anew_and_filled_from_the_journal(tmp_path):
    config, run = configure(tmp_path)
    story, done = story_of_launches()
    run.write("journal.jsonl", b"".join(to_line(r) for r in story.records))
    one = mirror(config, run)
    put(one, story.records)
    client = MlflowClient(tracking_uri(config))
    wait_for(lambda: not one._points and not one._tasks and one.run_id)
    first = one.run_id
    client.delete_run(first)
    put(one, story.steps(6, 9).records[done:])
    wait_for(lambda: one.run_id != first and not one._points)
    assert one.close("finished", 60) is None
    assert histories(tracking_uri(config), one.run_id, "train/loss", "checkpoint/bytes") == [list(range(1, 10)), [5]]
    found = client.get_run(one.run_id)
    assert found.info.status == "FINISHED" and found.inputs.dataset_inputs and "train.learning_rate" in found.data.params
    assert found.data.tags["checkpoint.newest"] == "step-00000005"


def test_a_child_run_names_its_parent(tmp_path):
    config, run = configure(tmp_path)
    parent = mirror(config, run)
    assert parent.close("finished", 60) is None
    child_config = compose([f"run.path={tmp_path}", "run.name=child", f"tracking.parent_run={parent.run_id}"])
    child = mirror(child_config, (Folder(tmp_path) / "child").make())
    assert child.close("finished", 60) is None
    assert MlflowClient(tracking_uri(config)).get_run(child.run_id).data.tags["mlflow.parentRunId"] == parent.run_id


def test_the_artifacts_of_a_database_file_lie_beside_it(tmp_path):
    config = compose([f"tracking.mlflow=sqlite:///{tmp_path}/mlflow.db"])
    client = MlflowClient(tracking_uri=config.tracking.mlflow)
    made = experiment_id(client, config)
    assert client.get_experiment(made).artifact_location == f"{tmp_path}/mlflow-artifacts" and experiment_id(client, config) == made
