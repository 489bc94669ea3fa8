"""The benchmark of one GPU runs at toy size on a CPU, every case of it."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks import gpu_slice
from tests.distributed import run

pytestmark = pytest.mark.timeout(900)


def toy(rank: int, world_size: int) -> str:
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1
    return gpu_slice.main(toy=True)


def test_every_case_gives_a_row_of_figures():
    rows = [line.strip("| ").split(" | ") for line in run(toy, 1)[0].splitlines()[4:]]
    assert [row[0] for row in rows] == ["full"] * 4 + ["lora", "qlora"]
    assert all(float(row[5].replace(",", "")) > 0 and float(row[8]) >= 0 for row in rows)
    assert [row[3] for row in rows][:2] == ["chunks of 1024", "full logits"] and rows[3][4] == "yes"


def test_layers_and_operations_follow_from_the_shape():
    llama = gpu_slice.LLAMA_70B
    assert llama.layer_weights == 855_638_016
    assert llama.layers("full", 80e9) == 2 and llama.layers("lora", 80e9) == llama.most_layers
    plain = gpu_slice.flops_per_token(llama, "full", 80)
    weights = 80 * llama.layer_weights + 8192 * 128256
    assert plain == 6 * weights + 6 * 80 * 8192 * 4096
    assert torch.isclose(torch.tensor(gpu_slice.flops_per_token(llama, "lora", 80) - 6 * 80 * 8192 * 4096), torch.tensor(4.0 * weights))
