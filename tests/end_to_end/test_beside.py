"""An evaluation beside training that cannot be made: a warning in the journal, never an error of the run."""

from __future__ import annotations

import os

import pytest
import ray
import torch
from ray.train import Checkpoint

from raytune70b.blocks.held_out import Pair
from raytune70b.config import UserError
from raytune70b.evaluation.beside import Questions
from raytune70b.storage import Folder
from raytune70b.training.job import Job
from raytune70b.training.mailbox import STOP, Mailbox
from tests import distributed
from tests.export.run_folders import run_config, write_data, write_runs

pytestmark = pytest.mark.slow
PAIRS = tuple(Pair(n, (5, 6, 7 + n), "", "The Supplier.", "question", "en", "file") for n in range(3))


@pytest.fixture(scope="module")
def job(head, tmp_path_factory):
    """A run with a checkpoint of step 7, and a mailbox on a living cluster."""
    root = tmp_path_factory.mktemp("beside")
    write_data(root / "data")
    config = run_config(root, "run", "model.precision=fp32", "evaluation.max_new_tokens=4")
    distributed.run(write_runs, 2, [config])
    torch.set_num_threads(1)
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
    yield Job(config, Folder(root / "runs/run"), None, None, 320, {}, "", 1, None, Mailbox.remote(), 5)
    ray.shutdown()


def ask(job, step):
    """(what Ray Train gets, the records that the driver gets)"""
    found = Questions(PAIRS)(job, Checkpoint((job.run / f"checkpoints/step-{step:08d}").path()))
    return found, ray.get(job.mailbox.drain.remote())[0]


def test_what_goes_wrong_is_a_warning(job):
    found, records = ask(job, 7)
    assert set(found) >= {"token_f1", "chrf"} and [(r["kind"], r["step"], r["answers"]) for r in records] == [("evaluation", 7, 3)]
    found, records = ask(job, 3)  # retention was faster
    assert found == {} and records[0]["kind"] == "warning" and "step 3" in records[0]["text"] and "[7]" in records[0]["text"]
    shard = next((job.run / "checkpoints/step-00000007").local.glob("__0_*.distcp"))
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    found, records = ask(job, 7)
    assert found == {} and "checksum" in records[0]["text"]
    ray.get(job.mailbox.order.remote(STOP))
    assert ask(job, 7) == ({}, [])  # the end of the run does not wait for it


def test_nothing_to_ask_is_told_at_the_start(job):
    with pytest.raises(UserError, match=r"evaluation\.every: is 0, but .* holds no held-out conversations"):
        Questions.of(job.config, [])
