"""The benchmark of one GPU runs at toy size on a CPU, every case of it."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks import gpu_slice
from tests.distributed import run

pytestmark = pytest.mark.timeout(900)


def toy(rank: int, world_size: int) -> list[tuple[str, ...]]:
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1
    return gpu_slice.main(toy=True)


def test_every_case_gives_a_row_of_figures():
    rows = run(toy, 1)[0]
    assert [row[0] for row in rows] == ["full", "lora", "qlora"] + ["full"] * 3
    assert all(float(row[5].replace(",", "")) > 0 for row in rows), rows
    assert all(float(row[8]) >= 0 for row in rows[:3]), "the stall of each method"
    assert [(row[2], row[3], row[4]) for row in rows[3:]] == [("sdpa", "full logits", "no"), ("eager", "chunks of 1024", "no"), ("sdpa", "chunks of 1024", "yes")]


def test_layers_and_operations_follow_from_the_shape():
    llama = gpu_slice.LLAMA_70B
    assert llama.layer_weights == 855_638_016
    assert llama.layers("full", 80e9) == 2 and llama.layers("lora", 80e9) == llama.most_layers and llama.layers("full", 150e9) == 6
    plain = gpu_slice.flops_per_token(llama, "full", 80)
    weights = 80 * llama.layer_weights + 8192 * 128256
    assert plain == 6 * weights + 6 * 80 * 8192 * 2048
    assert torch.isclose(torch.tensor(gpu_slice.flops_per_token(llama, "lora", 80) - 6 * 80 * 8192 * 2048), torch.tensor(4.0 * weights))
