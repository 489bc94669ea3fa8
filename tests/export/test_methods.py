"""Every architecture and method exports, and a fresh process with transformers alone computes what the sharded model computed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from raytune70b.export.job import export_run
from tests import distributed
from tests.export.run_folders import VOCAB, blocks, run_config, write_data, write_runs
from tests.reference import SIZES, write_model

TOLERANCE = 1e-5
CASES = [(arch, method) for arch in SIZES for method in ("full", "lora")] + [(arch, "qlora") for arch in ("llama_tied", "phi3", "gemma3")]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{run name: (facts of the export, sharded logits, (fresh logits, chat text, generated ids))}"""
    root = tmp_path_factory.mktemp("methods")
    write_data(root / "data")
    configs = []
    for arch, method in CASES:
        base = root / "bases" / arch
        if not base.exists():
            write_model(base, arch, VOCAB, max_shard_size="100KB" if arch == "qwen3" else "5GB")
        path = [f"export.path={root / 'out' / f'{arch}-{method}'}", "export.dtype=fp32", "export.shard_gb=0.0002"]
        configs.append(run_config(root, f"{arch}-{method}", f"model.path={base}", f"model.method={method}", "model.precision=fp32", "model.lora.rank=4", *path))
    configs.append(run_config(root, "random-full", "model.precision=fp32", f"export.path={root / 'out' / 'random-full'}"))
    for method in ("lora", "qlora"):
        shape = "model.config={model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2}"
        configs.append(run_config(root, f"random-{method}", "model.precision=fp32", f"model.method={method}", shape, f"export.path={root / 'out' / f'random-{method}'}"))
    sharded = distributed.run(write_runs, 2, configs)[0]
    torch.set_num_threads(1)
    exported = {c.run.name: export_run(c) for c in configs}
    torch.save(blocks(configs[0]), root / "input.pt")
    folders = {name: str(e.folder.local) for name, e in exported.items()}
    script = Path(__file__).with_name("fresh.py")
    subprocess.run([sys.executable, str(script), str(root / "input.pt"), str(root / "out.pt"), *folders.values()], check=True, cwd=root, capture_output=True)
    fresh = torch.load(root / "out.pt")
    return {name: (exported[name], sharded[name], fresh[folder]) for name, folder in folders.items()}


NAMES = [f"{a}-{m}" for a, m in CASES] + ["random-full", "random-lora", "random-qlora"]


@pytest.mark.parametrize("name", NAMES)
def test_fresh_process_computes_what_was_trained(results, name):
    exported, sharded, (fresh, _, generated) = results[name]
    assert (fresh - sharded).abs().max() <= TOLERANCE * sharded.abs().max().clamp(min=1.0)
    assert exported.facts["checks"]["logit_error"] <= TOLERANCE
    assert generated.shape[1] > 4


@pytest.mark.parametrize("name", NAMES)
def test_chat_template_comes_along(results, name):
    assert results[name][2][1] == "<s>### Instruction:\nQui est visé ?\n\n### Response:\n"


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith("-lora") and not n.startswith("random")])
def test_adapter_folder_loads_onto_the_base(results, name):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    exported, sharded, _ = results[name]
    root = exported.folder.local.parent.parent
    base = AutoModelForCausalLM.from_pretrained(root / "bases" / name.split("-")[0], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(exported.folder.local / "adapter")).eval()
    batch = torch.load(root / "input.pt")
    with torch.no_grad():
        got = model(**batch, use_cache=False).logits
    assert (got - sharded).abs().max() <= TOLERANCE * sharded.abs().max().clamp(min=1.0)


def test_ties_are_stored_once_and_files_are_cut(results):
    from safetensors import safe_open

    folder = results["llama_tied-full"][0].folder.local
    keys = {key for path in folder.glob("*.safetensors") for key in safe_open(path, framework="pt").keys()}  # noqa: SIM118
    assert "lm_head.weight" not in keys and "model.embed_tokens.weight" in keys
    assert (folder / "model.safetensors.index.json").is_file() and len(list(folder.glob("*.safetensors"))) > 1


def test_experts_have_the_layout_of_the_base(results):
    """Other programs read a mixture by the names of its own model folder, one tensor an expert."""
    from safetensors import safe_open

    def keys(folder):
        return {key for path in Path(folder).glob("*.safetensors") for key in safe_open(path, framework="pt").keys()}  # noqa: SIM118

    base = keys(results["mixtral-full"][0].folder.local.parent.parent / "bases" / "mixtral")
    assert keys(results["mixtral-full"][0].folder.local) == keys(results["mixtral-lora"][0].folder.local) == base
