"""An export has its base's precision and size, whatever it was trained in, and its card a serving line that the model can be served by."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from raytune70b.config import compose
from raytune70b.export.card import serving_gpus
from raytune70b.export.job import export_run
from raytune70b.export.tensors import Source
from raytune70b.export.weights import Wanted, default_dtype, full_tensors
from raytune70b.model.load import skeleton
from tests import distributed
from tests.export.run_folders import VOCAB, run_config, write_data, write_runs
from tests.reference import write_model


def test_a_bf16_base_trained_on_fp32_masters_is_exported_in_bf16_and_no_larger(tmp_path):
    write_data(tmp_path / "data")
    base = write_model(tmp_path / "base", "qwen3", VOCAB, dtype=torch.bfloat16)
    asked = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [3], "bad_words_ids": [[5]], "forced_eos_token_id": 2, "do_sample": True, "eos_token_id": 2}
    (base / "generation_config.json").write_text(json.dumps(asked))
    (base / "config.json").write_text(json.dumps({**json.loads((base / "config.json").read_text()), "repetition_penalty": 1.2}))  # as old models have it
    config = run_config(tmp_path, "full", f"model.path={base}", "model.precision=bf16_mixed", f"export.path={tmp_path / 'out'}")
    distributed.run(write_runs, 1, [config])
    torch.set_num_threads(1)
    exported = export_run(config)
    theirs, ours = load_file(base / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert {key: (t.dtype, t.shape) for key, t in ours.items()} == {key: (t.dtype, t.shape) for key, t in theirs.items()}
    assert exported.facts["export"]["bytes"] == sum(t.nbytes for t in theirs.values())
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {**asked, "pad_token_id": 0}
    assert "`vllm serve ./out --dtype bfloat16 --tensor-parallel-size 1`" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize(("stored", "named"), [(torch.bfloat16, None), (torch.float16, "float16"), (torch.float32, "bfloat16"), (torch.bfloat16, "float32")])
def test_the_bases_precision_is_that_of_its_files(tmp_path, stored, named):
    """A config.json may name none, and published ones name another than the files hold."""
    base = write_model(tmp_path, "llama", VOCAB, dtype=stored)
    values = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({key: v for key, v in values.items() if key != "dtype"} | ({"dtype": named} if named else {})))
    for precision in ("fp32", "bf16"):
        assert default_dtype(compose([f"model.path={base}", f"model.precision={precision}"]).model) == stored


def test_a_70b_export_has_138_gb():
    """Of Llama-2-70B's own shapes: fp32 master weights in the checkpoint, bf16 in the export."""
    model = skeleton(compose(["conf/recipe/legalfin.yaml", "model.precision=bf16_mixed", "model.attention=auto"]).model, 32000, torch.device("cpu"))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    checkpoint = SimpleNamespace(names=lambda: list(shapes), source=lambda name: Source(shapes[name], torch.float32, lambda: iter(())))
    tensors = full_tensors(model, checkpoint, Wanted(torch.bfloat16, "trained"))
    size = sum(t.elements * t.dtype.itemsize for t in tensors.values())
    assert size == 2 * 68_976_648_192
    assert serving_gpus(model.config, size) == 4 and serving_gpus(model.config, 2 * size) == 8


@pytest.mark.parametrize(
    ("family", "shape", "gigabytes", "gpus"),
    [
        ("qwen2", {"num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864, "hidden_size": 896}, 1, 1),
        ("qwen2", {"num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "hidden_size": 3584}, 140, 4),
        ("llama", {"num_attention_heads": 40, "num_key_value_heads": 40, "intermediate_size": 13824, "hidden_size": 5120}, 150, 4),
        ("llama", {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "hidden_size": 4096}, 9000, 32),
        ("mixtral", {"num_attention_heads": 48, "num_key_value_heads": 8, "intermediate_size": 16384, "hidden_size": 6144}, 281, 8),
        ("falcon", {"num_attention_heads": 71, "hidden_size": 4544}, 60, 1),
        ("gpt2", {"n_head": 12}, 1, 1),
    ],
)
def test_the_serving_line_divides_the_heads(family, shape, gigabytes, gpus):
    text = AutoConfig.for_model(family, **shape)
    assert serving_gpus(text, gigabytes * 10**9) == gpus and text.num_attention_heads % gpus == 0
