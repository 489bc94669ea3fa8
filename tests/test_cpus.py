"""The CPUs that a process may use, and who takes them."""

import runpy
from pathlib import Path

import pytest
import torch

from raytune70b import cpus
from raytune70b.config import UserError, compose

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000\n", 96), ("3200000 100000\n", 32), ("9999999 100000\n", 96), ("50000 100000\n", 1), ("", 96)]
)
def test_a_containers_quota_counts(monkeypatch, tmp_path, quota, expected):
    monkeypatch.setattr(cpus.os, "sched_getaffinity", lambda _: set(range(96)))
    (tmp_path / "cpu.max").write_text(quota)
    assert cpus.usable(tmp_path / "cpu.max") == expected
    assert cpus.usable(tmp_path / "none") == 96


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.get_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({cpus.SUBMITTED: "{}", "OMP_NUM_THREADS": "1"}, 3),  # Ray's precaution
        ({cpus.SUBMITTED: "{}", "OMP_NUM_THREADS": "2"}, 1),  # --entrypoint-num-cpus 2
        ({cpus.SUBMITTED: "{}"}, 1),
        ({"OMP_NUM_THREADS": "1"}, 1),  # the user's own
    ],
)
@pytest.mark.parametrize(("job", "module", "work"), [("export", "export.job", "export_run"), ("evaluate", "evaluation.job", "evaluate")])
def test_a_submitted_job_that_works_by_itself_takes_the_cpus(monkeypatch, threads, environment, expected, job, module, work):
    import importlib

    found = []

    def watched(*_):
        found.append(threads())
        raise UserError("that is all")

    monkeypatch.setattr(cpus, "usable", lambda: 3)
    monkeypatch.setattr(importlib.import_module(f"raytune70b.{module}"), work, watched)
    for name in (cpus.SUBMITTED, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="that is all"):
        runpy.run_path(str(ROOT / f"jobs/{job}.py"))["main"](compose([]))
    assert found == [expected]
