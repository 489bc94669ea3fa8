"""No worker holds the model: the memory of all workers together, while it loads and after, stays below one and a half copies.

A process takes 15 to 30 MB beside its share whatever the model (modules, the allocator, the piece in work and the pages of the file
around it), so four of them meet the bar from about 240 MB on; the models here are of 300 MB and more, quantised or not.
"""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from raytune70b.config import compose
from tests.distributed import run
from tests.model import common

pytestmark = pytest.mark.timeout(900)
LAYERS, HIDDEN, INNER, VOCABULARY = 22, 1024, 2816, 45056


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Llama of 750 MB in bf16, or 334 MB with its layers in 4 bits: one file a layer, all layers alike."""
    folder = tmp_path_factory.mktemp("model")
    config = AutoConfig.for_model(
        "llama", hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=VOCABULARY, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    config.save_pretrained(folder)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16).mul_(0.02)

    shapes = {f"self_attn.{p}_proj": (HIDDEN, HIDDEN) for p in "qkvo"}
    shapes |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
    layer = {name: random(*shape) for name, shape in (shapes | {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}).items()}
    for n in range(LAYERS):
        save_file({f"model.layers.{n}.{name}.weight": tensor for name, tensor in layer.items()}, folder / f"layer-{n:02d}.safetensors")
    rest = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    save_file({name: random(*shape) for name, shape in rest.items()}, folder / "rest.safetensors")
    return folder


def load(rank: int, world_size: int, folder: Path, method: str) -> tuple[int, int]:
    """(growth of this process at its largest, mapped file pages included; bytes of its shards)."""
    common.build(compose([f"model.method={method}", "model.precision=bf16"]), 300)  # libraries and their buffers
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = compose([f"model.path={folder}", f"model.method={method}", "model.precision=bf16"])
    from raytune70b.model.load import build_model
    from raytune70b.model.shard import make_mesh

    model = build_model(config, VOCABULARY, make_mesh(world_size, 1, "cpu"), common.CPU)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return grown, sum(p.to_local().nbytes for p in model.parameters())


@pytest.mark.parametrize(("method", "world_size"), [("full", 2), ("full", 4), ("qlora", 2), ("qlora", 4)])
def test_all_workers_together_hold_less_than_one_and_a_half_models(folder, method, world_size):
    results = run(load, world_size, folder, method)
    peak, resting = (sum(values) for values in zip(*results, strict=True))
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert resting > 300e6
    if method == "qlora":
        assert resting < 0.48 * stored
    else:
        assert resting == pytest.approx(stored, rel=0.01)
    print(f"{method} on {world_size}: {peak / 1e6:.0f} MB at the peak, {resting / 1e6:.0f} MB of shards")
    assert peak < 1.5 * resting, f"{peak / 1e6:.0f} MB at the peak for {resting / 1e6:.0f} MB of shards"
