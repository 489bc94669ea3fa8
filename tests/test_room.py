"""The sum that says whether a worker group fits, against placing the workers one by one."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytune70b.room import cpu_share, fits, left, shortage, way_out


def placed(nodes, worker):
    """Workers that find a place, one after the other, in Ray's ten-thousandths."""
    free = [{name: round(amount * 10_000) for name, amount in node.items()} for node in nodes]
    wanted, count = {name: round(share * 10_000) for name, share in worker.items()}, 0
    for node in free:
        while all(node.get(name, 0) >= share for name, share in wanted.items()):
            for name, share in wanted.items():
                node[name] -= share
            count += 1
    return count


@pytest.mark.parametrize("cpus", [[2], [1], [4, 4], [3, 0], [16, 1, 7]])
def test_over_a_grid(cpus):
    for share, gpus, gpu in product((0.1, 0.3, 0.5, 1.0, 1.5, 2.0), (0, 1, 8), (False, True)):
        nodes = [{"CPU": float(c), "GPU": float(gpus), "node:10.0.0.1": 1.0} for c in cpus]
        worker = {"CPU": share, **({"GPU": 1.0} if gpu else {})}
        assert fits(nodes, worker) == placed(nodes, worker), (nodes, worker)
        for least in (1, 2, 5, 40):
            lacking = shortage(nodes, {}, worker, least)
            assert (lacking is None) == (placed(nodes, worker) >= least)
            best = cpu_share(nodes, worker, least)
            assert lacking is None or best == 0 or (best < share and placed(nodes, {**worker, "CPU": best}) >= least > placed(nodes, {**worker, "CPU": best + 0.01}))


@given(st.lists(st.integers(0, 2_000_000), min_size=1, max_size=4), st.integers(1, 40_000))
def test_of_any_fraction(amounts, share):
    """A reservation is a sum of shares, and comes out short by rounding."""
    nodes, worker = [{"CPU": amount / 10_000} for amount in amounts], {"CPU": share / 10_000}
    assert fits(nodes, worker) == sum(amount // share for amount in amounts)
    summed = sum(worker["CPU"] for _ in range(37))
    assert fits([{"CPU": summed}], worker) == 37


def test_what_is_taken_counts_on_its_node():
    nodes = {"a": {"CPU": 2.0}, "b": {"CPU": 2.0, "GPU": 1.0}}
    assert left(nodes, {}) == nodes
    assert left(nodes, {"b": {"CPU": 0.5, "GPU": 1.0, "memory": 1.0}, "gone": {"CPU": 1.0}}) == {"a": {"CPU": 2.0}, "b": {"CPU": 1.5, "GPU": 0.0}}


def test_the_lines_carry_both_numbers_and_settings_that_work():
    nodes, worker = [{"CPU": 2.0}], {"CPU": 1.0}
    assert shortage(nodes, {}, worker, 3) == "3 with 1 CPU each (cluster.cpus_per_worker) take 3 CPUs, the Ray cluster has 2 CPUs, room for 2"
    assert way_out(nodes, worker, 3) == "use cluster.workers=[2,2] or cluster.cpus_per_worker=0.66, or start Ray on more machines"
    taken = left({"n": {"CPU": 2.0}}, {"n": {"CPU": 1.0}})["n"]
    assert shortage([taken], {"CPU": 1.0}, worker, 2) == "2 with 1 CPU each (cluster.cpus_per_worker) take 2 CPUs, the Ray cluster has 1 CPU beside the 1 CPU of this job's entrypoint, room for 1"
    gpus, worker = [{"CPU": 96.0, "GPU": 8.0}], {"CPU": 1.0, "GPU": 1.0}
    assert shortage(gpus, {}, worker, 16) == "16 with 1 CPU and 1 GPU each (cluster.cpus_per_worker) take 16 CPUs and 16 GPUs, the Ray cluster has 96 CPUs and 8 GPUs, room for 8"
    assert way_out(gpus, worker, 16, replicate=3) == "use cluster.workers=[6,6], or start Ray on more machines"
    assert way_out([{"CPU": 0.0}], {"CPU": 1.0}, 1) == "start Ray on more or larger machines"
