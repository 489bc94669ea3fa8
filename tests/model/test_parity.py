"""Losses and gradients against one process of plain transformers: Llama at 1, 2 and 3 workers, the others at 2."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

from tests import reference
from tests.distributed import run
from tests.model import common

pytestmark = pytest.mark.timeout(900)  # seconds where the cores are free
STEPS = 20
LEARNING_RATE = {"fp32": 3e-3, "bf16_mixed": 5e-4, "bf16": 5e-4}
ARCHITECTURES = tuple(reference.SIZES)
EVERY_WORLD_SIZE = ("llama", "llama_tied")
LORA = ("llama", "gemma3", "mixtral")
SIXTEEN_BITS = [("full", "bf16_mixed"), ("full", "bf16"), ("lora", "bf16_mixed"), ("qlora", "bf16_mixed")]


def tolerance(method: str, precision: str) -> tuple[float, float]:
    """(of the losses, of a parameter's gradient by its largest entry): rounding of the arithmetic, of NF4 scales, or of bf16's eight bits."""
    if precision != "fp32":
        return 2e-3, 5e-2
    return (2e-3, 2e-2) if method == "qlora" else (1e-5, 1e-4)


def cases(architecture: str) -> list[tuple[str, str]]:
    methods = [("full", "fp32")]
    if architecture in LORA:
        methods.append(("lora", "fp32"))
    if architecture == "llama":
        methods += [("qlora", "fp32"), *SIXTEEN_BITS]
    return methods


def saved_as(architecture: str, precision: str) -> str:
    """16 bits are compared on weights of the usual size, which 16 bits hold: at larger ones rounding, not the trainer, moves the losses."""
    return architecture if precision == "fp32" else f"{architecture}_small"


def train_all(rank: int, world_size: int, folder: Path, data: list[dict[str, torch.Tensor]]) -> dict[Any, Any]:
    """Trains every case; adapters are returned so that the reference starts from the same."""
    found = {}
    for architecture in ARCHITECTURES if world_size == 2 else EVERY_WORLD_SIZE:
        for method, precision in cases(architecture):
            config = common.config_for(folder / saved_as(architecture, precision), method, precision, f"train.learning_rate={LEARNING_RATE[precision]}")
            model, optimizer = common.build(config)
            adapters = {name: common.full(p) for name, p in model.named_parameters() if ".lora_" in name}
            gradients = common.gradients(model, config, data[0])
            losses = [loss for loss, _ in common.train(model, optimizer, config, data)]
            found[architecture, method, precision] = (losses, gradients, adapters)
    return found if rank == 0 else {}


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    for name in ARCHITECTURES:
        reference.write_model(folder / name, name, common.VOCAB)
    reference.write_model(folder / "llama_small", "llama", common.VOCAB, dtype=torch.bfloat16, spread=0.02)
    return folder, reference.batches(2, rows=4, seq_len=24, vocab_size=common.VOCAB) * (STEPS // 2)


@pytest.fixture(scope="module")
def ours(setting):
    return {world_size: run(train_all, world_size, *setting)[0] for world_size in (1, 2, 3)}


def expected(folder: Path, method: str, learning_rate: float, data: list, adapters: dict[str, torch.Tensor]) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = reference.reference_model(folder)
    if method != "full":
        model = adapted(model, method, adapters)
    losses, gradients = reference.train(model, data, learning_rate, weight_decay=0.1, max_norm=1.0)
    return losses, {name.removeprefix("base_model.model."): g for name, g in gradients.items()}


def adapted(model: Any, method: str, adapters: dict[str, torch.Tensor]) -> Any:
    """peft's own wrapper; for qlora on weights that went through bitsandbytes' NF4 and back."""
    linears = {name: m for name, m in model.model.layers.named_modules() if isinstance(m, torch.nn.Linear)}
    if method == "qlora":
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        for linear in linears.values():
            linear.weight.data = dequantize_4bit(*quantize_4bit(linear.weight.data, quant_type="nf4"))
    targets = sorted({name.rsplit(".", 1)[-1] for name in linears})
    wrapped = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"))
    state = {f"base_model.model.{name.replace('.default', '')}": value for name, value in adapters.items()}
    assert not set_peft_model_state_dict(wrapped, state).unexpected_keys
    return wrapped


@pytest.mark.parametrize(("architecture", "method", "precision"), [(a, *case) for a in ARCHITECTURES for case in cases(a)])
def test_losses_and_gradients_equal_those_of_one_plain_process(setting, ours, architecture, method, precision):
    folder, data = setting
    case = (architecture, method, precision)
    losses, gradients = expected(folder / saved_as(architecture, precision), method, LEARNING_RATE[precision], copy.deepcopy(data), ours[2][case][2])
    assert losses[-2] < losses[0] - 0.05, "it does not learn, so equal losses would mean little"
    of_loss, of_gradient = tolerance(method, precision)
    for world_size, results in ours.items():
        if case not in results:
            continue
        mine, mine_gradients, _ = results[case]
        assert mine == pytest.approx(losses, abs=of_loss), f"losses at world_size {world_size}"
        assert mine_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            worst = (mine_gradients[name].float() - gradient).abs().max() / (gradient.abs().max() + 1e-12)
            assert worst < of_gradient, f"gradient of {name} at world_size {world_size}"
