"""Where evaluations while training goes on find their GPUs."""

import pytest

from raytune70b.config import UserError, compose
from raytune70b.training import trainer


@pytest.mark.parametrize(("most", "gpus", "fits"), [(16, 1, False), (15, 1, True), (15, 2, False), (12, 4, True)])
def test_training_must_leave_the_gpus_that_an_evaluation_takes(monkeypatch, most, gpus, fits):
    monkeypatch.setattr(trainer.ray, "cluster_resources", lambda: {"GPU": 16.0, "CPU": 200.0})
    config = compose([f"cluster.workers=[8,{most}]", "evaluation.every=100", f"evaluation.gpus_per_model={gpus}"])
    if fits:
        hook = trainer.beside_the_workers(config, None, lambda job, checkpoint: {})
        assert hook.ray_remote_kwargs["num_gpus"] == gpus
    else:
        with pytest.raises(UserError, match=f"needs {gpus} GPUs .* the cluster has 16, of which training may take {most}"):
            trainer.beside_the_workers(config, None, lambda job, checkpoint: {})


def test_without_gpus_it_waits_for_no_cpu_either(monkeypatch):
    monkeypatch.setattr(trainer.ray, "cluster_resources", lambda: {"CPU": 3.0})
    hook = trainer.beside_the_workers(compose(["evaluation.every=100"]), None, lambda job, checkpoint: {"job": job})
    assert (hook.ray_remote_kwargs["num_gpus"], hook.ray_remote_kwargs["num_cpus"]) == (0, 0)
