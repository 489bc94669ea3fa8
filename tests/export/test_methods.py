"""Every architecture and method exports, and a fresh process with transformers alone computes what the sharded model computed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from raytune70b.export.job import export_run, summary
from raytune70b.export.tensors import Checkpoint
from raytune70b.storage import Folder
from tests import distributed
from tests.export.run_folders import VOCAB, blocks, run_config, write_data, write_runs
from tests.model.architectures import VALUES
from tests.reference import SIZES, write_model

TOLERANCE = 1e-5
CASES = [(arch, method) for arch in SIZES for method in ("full", "lora")] + [(arch, "qlora") for arch in ("llama_tied", "phi3", "gemma3")]

OF_THEIR_OWN = ("gemma2", "ernie4_5_moe")
"""Architectures that run with eager attention only, and that freeze a parameter themselves."""


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
    for arch in OF_THEIR_OWN:
        values = json.dumps({"model_type": arch, **VALUES[arch]})
        for method in ("full", "lora"):
            name = f"random-{arch}-{method}"
            configs.append(run_config(root, name, "model.precision=fp32", f"model.method={method}", f"model.config={values}", f"export.path={root / 'out' / name}"))
    sharded = distributed.run(write_runs, 2, configs)[0]
    torch.set_num_threads(1)
    exported = {c.run.name: export_run(c) for c in configs}
    torch.save(blocks(configs[0]), root / "input.pt")
    folders = {name: str(e.folder.local) for name, e in exported.items()}
    script = Path(__file__).with_name("fresh.py")
    subprocess.run([sys.executable, str(script), str(root / "input.pt"), str(root / "out.pt"), *folders.values()], check=True, cwd=root, capture_output=True)
    fresh = torch.load(root / "out.pt")
    return {name: (exported[name], sharded[name], fresh[folder]) for name, folder in folders.items()}


NAMES = [f"{a}-{m}" for a, m in CASES] + ["random-full", "random-lora", "random-qlora"] + [f"random-{arch}-{method}" for arch in OF_THEIR_OWN for method in ("full", "lora")]


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


def test_a_parameter_that_the_architecture_freezes_is_exported_too(results):
    weights = load_file(results["random-ernie4_5_moe-full"][0].folder.local / "model.safetensors")
    assert any(name.endswith("e_score_correction_bias") for name in weights)


def test_experts_have_the_layout_of_the_base(results):
    """Other programs read a mixture by the names of its own model folder, one tensor an expert."""
    from safetensors import safe_open

    def keys(folder):
        return {key for path in Path(folder).glob("*.safetensors") for key in safe_open(path, framework="pt").keys()}  # noqa: SIM118

    base = keys(results["mixtral-full"][0].folder.local.parent.parent / "bases" / "mixtral")
    assert keys(results["mixtral-full"][0].folder.local) == keys(results["mixtral-lora"][0].folder.local) == base


def changes(root: Path, name: str) -> dict[str, torch.Tensor]:
    """Weight name -> alpha / rank * B A, in double precision, from the tensors of a run's checkpoint."""
    checkpoint = Checkpoint(Folder(root / "runs" / name / "checkpoints/step-00000007"))
    found = {}
    for key in checkpoint.names():
        if key.endswith("lora_A.default.weight"):
            a, b = (checkpoint.source(key.replace("lora_A", part)).whole().double() for part in ("lora_A", "lora_B"))
            found[key.removeprefix("base_model.model.").replace(".lora_A.default", "")] = 32.0 / 4 * b @ a
    return found


def export_again(results, method: str, out: Path, *overrides: str):
    """(root, facts, weights) of another export of a run with adapters."""
    root = results[f"llama_tied-{method}"][0].folder.local.parent.parent
    base = [f"model.path={root / 'bases' / 'llama_tied'}", f"model.method={method}", "model.precision=fp32", "model.lora.rank=4"]
    done = export_run(run_config(root, f"llama_tied-{method}", *base, f"export.path={out}", *overrides))
    return root, done, load_file(out / "model.safetensors")


def test_rounding_of_a_bf16_export_is_reported(results, tmp_path):
    root, done, weights = export_again(results, "lora", tmp_path / "out", "export.dtype=bf16")
    base, lost, changed, error, size = load_file(root / "bases/llama_tied/model.safetensors"), 0, 0, 0.0, 0.0
    for name, change in changes(root, "llama_tied-lora").items():
        assert weights[name].dtype == torch.bfloat16
        lost += int(((change != 0) & (weights[name] == base[name].bfloat16())).sum())
        changed += int((change != 0).sum())
        error += float((weights[name].double() - (base[name].double() + change)).square().sum())
        size += float(change.square().sum())
    form = done.facts["export"]
    assert form["rounding_error_of_change"] == pytest.approx((error / size) ** 0.5, rel=1e-4) and form["rounding_error_of_change"] > 1e-4
    assert form["lost_entries_share"] == pytest.approx(lost / changed, rel=0.01) and lost > 0
    assert f"rounding takes {form['rounding_error_of_change']:.2%} of the change" in summary(done)
    assert f"| lost_entries_share | {form['lost_entries_share']:.6g} |" in (tmp_path / "out/README.md").read_text()
    assert done.facts["checks"]["logit_error"] <= 1e-5 < done.facts["checks"]["rounding_error"]
    assert results["llama_tied-lora"][0].facts["export"]["rounding_error_of_change"] < 1e-5  # in fp32


@pytest.mark.parametrize("onto", ["original", "trained"])
def test_qlora_merges_onto_the_base_that_is_asked_for(results, tmp_path, onto):
    """The original base under the change, or the one that training saw: bitsandbytes' four bits, whose scales are rounded too."""
    import bitsandbytes.functional as bnb

    root, done, weights = export_again(results, "qlora", tmp_path / "out", "export.dtype=fp32", f"export.merge_onto={onto}")
    base = load_file(root / "bases/llama_tied/model.safetensors")
    assert done.facts["export"]["merged_onto"] == {"original": "the base's own weights", "trained": "the dequantised base (NF4)"}[onto]
    moved = changes(root, "llama_tied-qlora")
    for name, change in moved.items():
        four_bits = bnb.dequantize_4bit(*bnb.quantize_4bit(base[name], blocksize=64, quant_type="nf4"))
        under, other, allowed = (base[name], four_bits, 2e-6) if onto == "original" else (four_bits, base[name], base[name].abs().max() / 256)
        assert (weights[name].double() - (under.double() + change)).abs().max() < allowed, name
        assert (weights[name].double() - (other.double() + change)).abs().max() > 4 * allowed, name
    assert all(torch.equal(weights[name], base[name]) for name in base.keys() - moved.keys())
    assert done.facts["checks"]["logit_error"] <= 1e-5
