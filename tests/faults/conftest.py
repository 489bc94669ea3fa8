from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from raytune70b.blocks.ledger import lineage
from raytune70b.storage import Folder
from raytune70b.training.checkpoint import newest
from raytune70b.training.proof import prove
from tests.conftest import write_blocks
from tests.faults import s3, undisturbed
from tests.faults.fleet import MODEL, Fleet, Launch

STEPS = 160
SETTINGS = ("train.epochs=2", "checkpoint.every=7", "validation.every=40", "train.warmup_steps=5", "cluster.resize_check_s=2",
            "tracking.close_timeout_s=120")  # fmt: skip
ZERO3 = pytest.param("zero3", marks=[pytest.mark.slow, pytest.mark.skipif(find_spec("deepspeed") is None, reason="the extra deepspeed is not installed")])
"""The other sharding engine, compared with the same undisturbed run; its rows are slow ones."""


@pytest.fixture(scope="package")
def data(tmp_path_factory) -> Path:
    """A data set of 80 steps an epoch, at 16 blocks a step."""
    folder = tmp_path_factory.mktemp("data")
    write_blocks(Folder(folder), {"train": [600, 680], "validation": [16]}, seq_len=16, group=64)
    return folder


@pytest.fixture(scope="package")
def reference(data, tmp_path_factory):
    return undisturbed.train([f"data.path={data}", f"run.path={tmp_path_factory.mktemp('none')}", *MODEL, *SETTINGS])


@pytest.fixture(scope="package")
def door():
    """The door of an S3 server, which is up before the nodes are: they inherit where it is."""
    with s3.server() as door:
        yield door


@pytest.fixture(scope="package")
def fleet(door, tmp_path_factory):
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    yield fleet
    fleet.close()


@pytest.fixture
def start(fleet, data, tmp_path):
    """Starts a run, the same again with the same name; what is still running at the end is stopped."""
    launches: list[Launch] = []

    def begin(*settings: str, runs: str = "", data: Path | str = data) -> Launch:
        launches.append(fleet.start("run", runs or tmp_path, data, tmp_path, *SETTINGS, *settings))
        return launches[-1]

    yield begin
    fleet.misbehave()
    for launch in launches:
        launch.stop()


def check_undisturbed(launch: Launch, data: Path, reference) -> None:
    """The committed run is the undisturbed one: every step's blocks and loss, the ledger, the checkpoints, MLflow's one run."""
    import mlflow

    check_committed(launch.folder, data, reference)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{Path(launch.folder.path()).parent}/mlflow.db")
    (found,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert [m.step for m in client.get_metric_history(found.info.run_id, "train/loss")] == list(range(1, STEPS + 1))


def check_committed(run: Folder, data: Path | str, reference) -> None:
    """The same without MLflow."""
    table = lineage(run / "ledger", newest(run / "checkpoints").ledger)[0]
    assert table.column("block_ids").to_pylist() == reference.ids
    assert table.column("loss").to_pylist() == pytest.approx(reference.losses, abs=1e-5)
    assert prove(run, Folder(data)).faults == []
