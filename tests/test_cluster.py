"""When a run that does not fit is refused, and when it waits for machines; tests/first_hour does both on a real cluster."""

import pytest
import ray
from ray._private.state import state

from raytune70b import cluster
from raytune70b.config import compose
from raytune70b.errors import UserError

MACHINE = {"CPU": 2.0, "GPU": 8.0}
NAMED = ["hardware.gpu=H100-SXM-80GB", "hardware.nodes=2", "hardware.gpus_per_node=8"]


def check(monkeypatch, settings, alive=1, lost=0, autoscaled=None, worker=None, held=None):
    nodes = [{"NodeID": str(n), "Alive": n < alive, "Resources": MACHINE} for n in range(alive + lost)]
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(state, "get_max_resources_from_cluster_config", lambda: autoscaled)
    monkeypatch.setattr(cluster, "held_by_entrypoint", lambda: held or {})
    config = compose(settings)
    cluster.check_room(config, worker or cluster.of_worker(config, gpu=False), config.cluster.workers[0])


@pytest.mark.parametrize(("settings", "more"), [
    ([], {}), (["cluster.workers=[1,8]"], {}), (["cluster.workers=[8,8]", "cluster.cpus_per_worker=0.25"], {}), (["cluster.workers=[4,4]"], {"alive": 2}),
    (["cluster.workers=[3,4]"], {}), (["cluster.workers=[16,16]", *NAMED], {}), (["cluster.workers=[3,3]"], {"lost": 1}),
    (["cluster.workers=[3,3]"], {"autoscaled": {"CPU": 64, "GPU": 0}}),
], ids=["it fits", "elastic and fits", "fractions fit", "two machines fit", "elastic", "hardware names more", "a machine was lost", "an autoscaler can add"])  # fmt: skip
def test_what_fits_or_may_come_to_fit_goes_on(monkeypatch, settings, more):
    check(monkeypatch, settings, **more)


@pytest.mark.parametrize(("settings", "more", "words"), [
    (["cluster.workers=[3,3]"], {}, ["take 3 CPUs", "has 2 CPUs", "cluster.workers=[2,2]", "cluster.cpus_per_worker=0.66"]),
    (["cluster.workers=[3,4]", "cluster.address=local"], {}, ["take 3 CPUs", "has 2 CPUs"]),
    (["cluster.workers=[16,16]", *NAMED], {"alive": 2, "worker": {"CPU": 1.0, "GPU": 1.0}}, ["take 16 CPUs and 16 GPUs", "has 4 CPUs and 16 GPUs", "cluster.cpus_per_worker=0.25"]),
    (["cluster.workers=[3,3]"], {"autoscaled": {"CPU": 2, "GPU": 8}}, ["take 3 CPUs"]),
    ([], {"held": {"0": {"CPU": 1.0}}}, ["has 1 CPU beside the 1 CPU of this job's entrypoint", "submit without --entrypoint-num-cpus", "cluster.cpus_per_worker=0.5"]),
], ids=["fixed", "nobody joins a job's own cluster", "all machines are there", "the autoscaler's most is too little", "the entrypoint takes one"])  # fmt: skip
def test_what_can_never_run_is_refused_with_both_numbers_and_a_way_out(monkeypatch, settings, more, words):
    with pytest.raises(UserError) as error:
        check(monkeypatch, settings, **more)
    text = str(error.value)
    assert text.startswith("cluster.workers: there is no room for ") and "\n" not in text and all(word in text for word in words), text
