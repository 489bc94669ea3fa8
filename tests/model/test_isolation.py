"""Every start asks the model whether the documents of a block are kept apart."""

from __future__ import annotations

import pytest
import torch

from raytune70b.config import UserError
from raytune70b.model.isolation import check_documents
from tests.distributed import run
from tests.model import common
from tests.model.architectures import VOCAB, config_of, tiny_model


@pytest.mark.parametrize("name", ["bloom", "gpt_oss", "lfm2", "opt", "qwen3_next"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_architecture_whose_documents_see_each_other_is_refused(name, precision):
    with pytest.raises(UserError, match=f"the documents of a block would see each other: {name} with attention"):
        check_documents(tiny_model(config_of(name, f"model.precision={precision}")), VOCAB, 5, common.CPU)


@pytest.mark.parametrize("name", ["cohere", "ernie4_5_moe", "gemma2", "gemma3n_text", "gpt2", "gpt_neo", "mixtral", "phi3"])
@pytest.mark.parametrize("settings", [("model.precision=fp32",), ("model.precision=bf16", "model.method=lora", "model.activation_checkpointing=full")])
def test_an_architecture_that_keeps_them_apart_passes_and_nothing_stays(name, settings):
    if name == "gpt2" and "model.method=lora" in settings:
        with pytest.raises(UserError, match=r"gpt2 has no linear layer that takes an adapter; use model.method=full"):
            tiny_model(config_of(name, *settings))
        return
    model = tiny_model(config_of(name, *settings))
    before = {key: p.clone() for key, p in model.named_parameters()}
    hooks = list(model.get_input_embeddings()._forward_hooks)
    check_documents(model, VOCAB, 5, common.CPU)
    assert model.training and list(model.get_input_embeddings()._forward_hooks) == hooks
    assert all(p.grad is None and torch.equal(p, before[key]) for key, p in model.named_parameters())


def starts(rank: int, world_size: int, config) -> None:
    from raytune70b.training.engine import build_engine, check_engine

    check_engine(build_engine(config, VOCAB, common.CPU), config, VOCAB, common.CPU)


def test_the_check_runs_on_the_sharded_model():
    for name in ("lfm2", "opt"):
        with pytest.raises(AssertionError, match="UserError: model: the documents of a block would see each other"):
            run(starts, 2, config_of(name))
    run(starts, 2, config_of("mixtral", "model.activation_checkpointing=full"))
