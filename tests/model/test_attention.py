from __future__ import annotations

import collections
import itertools

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from raytune70b.config import UserError, compose
from raytune70b.model import attention, load
from raytune70b.model.attention import FLASH, choose_attention, decoder_inputs, document_bounds, fallback, repeat_backward
from raytune70b.model.load import skeleton
from tests import reference
from tests.model import architectures

ROWS, SEQ_LEN, CUT = 2, 20, 9


def varlen_attention(module, query, key, value, attention_mask, scaling, cu_seq_lens_q, **kwargs):
    """What FlashAttention's varlen kernel computes, in plain torch: causal attention inside each [bound, next bound)."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    out, bounds = [], cu_seq_lens_q.tolist()
    window = kwargs.get("sliding_window") or SEQ_LEN
    for first, last in itertools.pairwise(bounds):
        part = slice(first, last)
        distance = torch.arange(last - first)[:, None] - torch.arange(last - first)
        scores = (query[:, :, part] @ key[:, :, part].transpose(2, 3) * scaling).masked_fill((distance < 0) | (distance >= window), -torch.inf)
        out.append(scores.softmax(-1) @ value[:, :, part])
    return torch.cat(out, 2).transpose(1, 2).contiguous(), None


def batch(vocab: int = 50) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    positions = torch.cat([torch.arange(CUT), torch.arange(SEQ_LEN - CUT)]).expand(ROWS, -1).clone()
    positions[1] = torch.arange(SEQ_LEN)
    positions[1, 5:] = torch.arange(SEQ_LEN - 5)
    return {"input_ids": torch.randint(1, vocab, (ROWS, SEQ_LEN)), "position_ids": positions}


def model_of(name: str, implementation: str):
    values = reference.config_values(name)
    torch.manual_seed(0)
    config = AutoConfig.for_model(values.pop("model_type"), vocab_size=50, **{"pad_token_id": None, **values})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def hidden(model, arrays: dict[str, torch.Tensor], implementation: str) -> torch.Tensor:
    return model.model(**decoder_inputs(arrays, implementation)).last_hidden_state.view(ROWS, SEQ_LEN, -1)


@pytest.fixture(scope="module", autouse=True)
def varlen():
    AttentionInterface.register("varlen_in_plain_torch", varlen_attention)
    AttentionMaskInterface.register("varlen_in_plain_torch", ALL_MASK_ATTENTION_FUNCTIONS[FLASH])


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "varlen_in_plain_torch"])
@pytest.mark.parametrize("name", list(reference.SIZES))
def test_documents_of_a_block_never_see_each_other(name, implementation):
    """Changing the first document moves the second by nothing, in value and in gradient; and packed equals alone."""
    inputs_of = FLASH if implementation.startswith("varlen") else implementation
    model, arrays = model_of(name, implementation), batch()
    before = hidden(model, arrays, inputs_of)
    changed = {**arrays, "input_ids": arrays["input_ids"].clone()}
    changed["input_ids"][0, :CUT] = (changed["input_ids"][0, :CUT] + 7) % 49 + 1
    after = hidden(model, changed, inputs_of)
    assert (after[0, :CUT] - before[0, :CUT]).abs().max() > 0.1
    tolerance = 1e-4 if name == "mixtral" else 0.0  # experts multiply tokens of all documents together, in another grouping
    assert (after[0, CUT:] - before[0, CUT:]).abs().max() <= tolerance and torch.equal(after[1], before[1])
    embedded = model.get_input_embeddings()
    embedded.register_forward_hook(lambda module, args, output: kept.append(output.requires_grad_()) or output)
    kept: list[torch.Tensor] = []
    (gradient,) = torch.autograd.grad(hidden(model, arrays, inputs_of)[0, CUT:].sum(), kept[0])
    gradient = gradient.view(ROWS, SEQ_LEN, -1)
    assert not gradient[0, :CUT].any() and not gradient[1].any() and gradient[0, CUT:].any()
    alone = model_of(name, "eager").model(input_ids=arrays["input_ids"][:1, CUT:], use_cache=False).last_hidden_state
    torch.testing.assert_close(before[:1, CUT:], alone, rtol=1e-3, atol=1e-4)


def test_bounds_of_documents_run_over_the_joined_rows():
    bounds = document_bounds(batch()["position_ids"])
    assert bounds.dtype == torch.int32 and bounds.tolist() == [0, CUT, SEQ_LEN, SEQ_LEN + 5, 2 * SEQ_LEN]
    inputs = decoder_inputs(batch(), FLASH)
    assert inputs["input_ids"].shape == (1, ROWS * SEQ_LEN) and inputs["max_length_q"] == SEQ_LEN


def test_auto_takes_sdpa_on_a_cpu_and_flash_attention_is_refused_there_with_the_reason():
    assert choose_attention(compose([]).model, torch.device("cpu")) == "sdpa"
    with pytest.raises(UserError, match="the device is cpu; use auto or sdpa"):
        choose_attention(compose([f"model.attention={FLASH}"]).model, torch.device("cpu"))


LLAMA4 = {"model_type": "llama4_text", "hidden_size": 32, "intermediate_size": 64, "intermediate_size_mlp": 64, "num_hidden_layers": 2,
          "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2, "pad_token_id": None}  # fmt: skip
GPU = torch.device("cuda")


@pytest.fixture
def flash_there(monkeypatch):
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: True)
    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)


def test_auto_takes_the_next_kernel_where_an_architecture_lacks_one_and_says_so(flash_there, monkeypatch):
    config = compose([]).model
    config.config = LLAMA4
    assert choose_attention(config, GPU) == FLASH
    built = skeleton(config, 64, GPU)
    assert built.config._attn_implementation == "sdpa"
    assert fallback(config, GPU, built) == "attention is sdpa: transformers does not run this architecture with flash_attention_2"
    config.attention = FLASH
    with pytest.raises(UserError, match="llama4_text"):
        skeleton(config, 64, GPU)
    assert fallback(compose([]).model, torch.device("cpu"), built) is None
    assert fallback(compose(["model.attention=sdpa"]).model, GPU, built) is None
    config.attention, config.config = "auto", {"model_type": "gemma2", **architectures.VALUES["gemma2"]}
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: False)
    assert fallback(config, GPU, skeleton(config, 64, GPU)) == "attention is eager: transformers does not run this architecture with sdpa"
    config.attention = "sdpa"
    with pytest.raises(UserError, match=r"transformers cannot build gemma2: .*scaled_dot_product_attention"):
        skeleton(config, 64, GPU)
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: True)
    built.config._attn_implementation = FLASH
    assert fallback(compose([]).model, GPU, built) is None


def test_flash_attention_is_asked_to_add_in_a_fixed_order(monkeypatch):
    from transformers.modeling_flash_attention_utils import _process_flash_attention_kwargs

    def deterministic():
        there = collections.defaultdict(lambda: True)
        return _process_flash_attention_kwargs(query_length=4, key_length=4, is_causal=True, supports_mapping=there)["deterministic"]

    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)
    assert not deterministic()
    repeat_backward()
    assert deterministic()
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "0")  # who wants the speed
    repeat_backward()
    assert not deterministic()


def test_a_model_built_with_flash_attention_is_asked_so(flash_there, monkeypatch):
    asked = []
    monkeypatch.setattr(load, "repeat_backward", lambda: asked.append(True))
    monkeypatch.setattr(load, "supports_flash", lambda *_: None)
    monkeypatch.setattr(load.AutoModelForCausalLM, "from_config", lambda *_, **__: torch.nn.Linear(1, 1))
    skeleton(compose([]).model, 64, GPU)
    assert asked
    skeleton(compose([]).model, 64, torch.device("cpu"))
    assert len(asked) == 1
