"""What stands beside the weights: generation ends where training ended answers, and the rest is the base's own."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, GenerationConfig

from raytune70b.config import UserError
from raytune70b.export.folder import write_configs
from raytune70b.model.generation import read_generation_config

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


PUBLISHED = [
    {"temperature": 0.9, "top_p": 0.6}, {"do_sample": True, "top_k": 20}, {"do_sample": False, "temperature": 0.6}, {"min_p": 0.1},
    {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": [3, 4]}, {"bad_words_ids": [[5]]}, {"forced_eos_token_id": 2}, {"its_own": {"a": [1]}},
]  # fmt: skip


@pytest.mark.parametrize("values", PUBLISHED)
def test_the_bases_own_file_is_kept(tmp_path, values):
    """Also where transformers would refuse to save it."""
    generation(tmp_path, {"eos_token_id": 2, **values}, (9,))
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {**values, "eos_token_id": [2, 9], "pad_token_id": 0}


@pytest.mark.parametrize("text", ["{", "[1, 2]", '"greedy"', '{"num_return_sequences": 3}'])
def test_a_generation_config_that_cannot_be_read_is_one_line(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=r"model.path: .*generation_config\.json cannot be read") as caught:
        read_generation_config(str(tmp_path))
    assert "\n" not in str(caught.value)
