"""CPU threads of a worker: its share of the machine where the CPU steps, else what Ray reserved."""

import pytest

from raytune70b import cpus
from raytune70b.config import compose
from raytune70b.training.threads import worker_threads


@pytest.mark.parametrize(
    ("settings", "device", "expected"),
    [
        (["model.offload=params"], "cuda", 12),
        (["model.sharding=zero3", "model.offload=optimizer"], "cuda", 12),
        (["model.offload=params", "cluster.cpus_per_worker=16"], "cuda", 16),  # reserved for it
        (["model.offload=optimizer"], "cuda", 1),  # FSDP2 steps on the GPU
        ([], "cuda", 1),
        (["model.offload=params"], "cpu", 1),
        (["cluster.cpus_per_worker=2.5"], "cpu", 2),
        (["cluster.cpus_per_worker=0.25"], "cpu", 1),
    ],
)
def test_threads_of_a_worker(monkeypatch, settings, device, expected):
    monkeypatch.setattr(cpus, "usable", lambda: 96)
    assert worker_threads(compose(settings), device, 8) == expected


def test_more_workers_than_cpus_have_a_thread_each(monkeypatch):
    monkeypatch.setattr(cpus, "usable", lambda: 2)
    assert worker_threads(compose(["model.offload=params"]), "cuda", 8) == 1
