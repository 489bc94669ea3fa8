"""What stands beside the weights: generation ends where training ended answers, and samples as the base was published to."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, GenerationConfig

from raytune70b.config import UserError
from raytune70b.export.folder import write_configs

TOKENIZER = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=0)


def generation(tmp_path, base: dict | None = None, answer_ends: tuple[int, ...] = ()) -> GenerationConfig:
    """The generation config of an export whose base has the given one."""
    folder = None
    if base is not None:
        folder = tmp_path / "base"
        folder.mkdir()
        (folder / "generation_config.json").write_text(json.dumps(base))
    config = AutoConfig.for_model("llama", hidden_size=64, num_hidden_layers=1, num_attention_heads=4, bos_token_id=None, eos_token_id=None)
    write_configs(tmp_path, SimpleNamespace(config=config), TOKENIZER, answer_ends, torch.float32, folder and str(folder))
    return GenerationConfig.from_pretrained(tmp_path)


def test_an_answer_ends_where_training_ended_it(tmp_path):
    assert generation(tmp_path, {"eos_token_id": [2, 7]}, (9,)).eos_token_id == [2, 7, 9]


@pytest.mark.parametrize("answer_ends", [(), (2,)])
def test_one_end_stays_a_number(tmp_path, answer_ends):
    assert generation(tmp_path, None, answer_ends).eos_token_id == 2


@pytest.mark.parametrize("values", [{"temperature": 0.9, "top_p": 0.6}, {"top_k": 20}, {"min_p": 0.1}, {"eta_cutoff": 0.1}, {"top_h": 0.5}])
def test_a_base_with_sampling_values_alone_samples(tmp_path, values):
    made = generation(tmp_path, {"eos_token_id": 2, **values})
    assert made.do_sample is True and {k: getattr(made, k) for k in values} == values


@pytest.mark.parametrize("values", [{"temperature": 1.0, "top_k": 50, "top_p": 1.0}, {"do_sample": False, "temperature": 0.6}])
def test_a_base_that_does_not_sample_goes_on_so(tmp_path, values):
    assert not generation(tmp_path, {"eos_token_id": 2, **values}).do_sample


def test_a_generation_config_that_contradicts_itself_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"base/generation_config\.json: .*num_return_sequences"):
        generation(tmp_path, {"eos_token_id": 2, "num_return_sequences": 3})
