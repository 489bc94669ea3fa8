"""The copy in host memory is made once and filled again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.distributed import run
from tests.model import common


def make_state(value: float, rows: int = 13) -> dict:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = torch.arange(rows * 7, dtype=torch.float32).reshape(rows, 7) + value
    return {"model": {"w": distribute_tensor(weight, mesh, [Shard(0)])}, "optimizer": {"w.step": torch.tensor(value)}}


def local_parts(state: dict) -> list:
    return [state["model"]["w"].to_local(), state["optimizer"]["w.step"]]


def copy_three_times(rank: int, world: int) -> list:
    from raytune70b.training.staging import HostCopy

    copy, second = HostCopy("cpu"), make_state(3.0)
    pointers = [t.data_ptr() for t in local_parts(copy.of(make_state(1.0)))]
    kept = copy.of(second)
    assert [t.data_ptr() for t in local_parts(kept)] == pointers, "the buffers are made once"
    assert not set(pointers) & {t.data_ptr() for t in local_parts(second)}
    for mine, theirs in zip(local_parts(kept), local_parts(second), strict=True):
        assert torch.equal(mine, theirs)
        theirs.add_(1.0)
        assert not torch.equal(mine, theirs)
    return common.full(copy.of(make_state(5.0, rows=17))["model"]["w"]).tolist()


def test_later_copies_fill_the_first_ones_buffers_and_another_structure_makes_new_ones():
    expected = (torch.arange(17 * 7, dtype=torch.float32).reshape(17, 7) + 5.0).tolist()
    assert run(copy_three_times, 2) == [expected, expected]
