from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from raytune70b.config import UserError, compose
from raytune70b.model.buffers import restore_buffers
from raytune70b.model.load import check_model, hf_config, skeleton
from raytune70b.model.nf4 import dequantise, quantise
from raytune70b.model.weights import initialise, slots_by_name, stored_tensors
from raytune70b.training.prepared import prepare_run
from tests import reference
from tests.distributed import run
from tests.model import common
from tests.model.architectures import VALUES, VOCAB, config_of, tiny_model

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    reference.write_model(root / "llama", "llama", common.VOCAB, dtype=torch.bfloat16, max_shard_size="50KB")
    for name in ("mixtral", "llama_tied"):
        reference.write_model(root / name, name, common.VOCAB)
    return root


def random_config(precision: str = "fp32", *overrides: str):
    return compose([f"model.precision={precision}", "model.loss_chunk_tokens=10", "model.config.hidden_size=32", *overrides])


def build_everything(rank: int, world_size: int, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Whole tensors of models of several kinds; all checks of sharded building share one start of the processes."""
    found = {}
    kinds = {
        "random": random_config(),
        "random_qlora": compose(["model.method=qlora", "model.precision=fp32"]),
        "loaded": common.config_for(folder / "llama", "full", "fp32"),
        "loaded_qlora": common.config_for(folder / "llama", "qlora", "bf16_mixed", "model.lora.modules_to_save=[lm_head,embed_tokens]"),
        "experts": common.config_for(folder / "mixtral", "lora", "fp32"),
        "bf16": random_config("bf16"),
        "offloaded": random_config("fp32", "model.offload=params"),
    }
    for kind, config in kinds.items():
        model, _ = common.build(config)
        assert model.training
        found[kind] = {name: common.full(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    return found if rank == 0 else {}


@pytest.fixture(scope="module")
def built(folder):
    return {world_size: run(build_everything, world_size, folder)[0] for world_size in (1, 3)}


def test_weights_do_not_depend_on_the_number_of_workers(built):
    """Random, loaded and quantised alike, with shards of unequal size and experts that do not divide by three."""
    for kind, tensors in built[1].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor.nan_to_num(), built[3][kind][name].nan_to_num()), f"{kind}: {name}"


def test_random_weights_are_drawn_in_host_memory_wherever_the_model_lies(monkeypatch):
    """A GPU's generator draws others: an export, and the base of an evaluation, would not be what the run trained on."""
    model = skeleton(random_config().model, common.VOCAB, common.CPU)
    drawn, draw = [], PreTrainedModel._init_weights

    def watched(self, module):
        drawn.append({p.device.type for p in module.parameters(recurse=False)})
        draw(self, module)

    monkeypatch.setattr(PreTrainedModel, "_init_weights", watched)
    before = torch.random.get_rng_state()
    initialise(model, 0)  # its tensors lie on the meta device
    assert set().union(*drawn) == {"cpu"}
    assert torch.equal(before, torch.random.get_rng_state())


def test_loaded_weights_are_those_of_the_files_bit_for_bit(built, folder):
    theirs = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32).state_dict()
    assert theirs.keys() <= built[1]["loaded"].keys()
    assert all(torch.equal(built[1]["loaded"][name], tensor) for name, tensor in theirs.items())
    theirs = AutoModelForCausalLM.from_pretrained(folder / "mixtral", dtype=torch.float32).state_dict()
    ours = {name.replace(".base_layer", ""): tensor for name, tensor in built[1]["experts"].items()}
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_qlora_quantises_every_linear_layer_and_keeps_trained_copies_exact(built, folder):
    theirs = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32).state_dict()
    ours = built[1]["loaded_qlora"]
    packed = [name for name, tensor in ours.items() if tensor.dtype == torch.uint8]
    assert len(packed) == 2 * 7
    for name in packed:
        weight = theirs[name.replace(".base_layer", "")]
        back = dequantise(ours[name], ours[f"{name}_scale"], torch.float32)
        blocks = weight.view(-1, 64)
        assert ((back.view(-1, 64) - blocks).abs().amax(1) <= 0.17 * blocks.abs().amax(1)).all(), name
    trained = ours["lm_head.modules_to_save.default.weight"]
    assert trained.dtype == torch.float32 and torch.equal(trained, theirs["lm_head.weight"])
    assert torch.equal(ours["model.embed_tokens.modules_to_save.default.weight"], theirs["model.embed_tokens.weight"])
    assert ours["model.norm.weight"].dtype == torch.bfloat16


def test_rotary_tables_stay_fp32_when_the_weights_are_bf16(built):
    tensors = built[1]["bf16"]
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    table = tensors["model.rotary_emb.inv_freq"]
    assert table.dtype == torch.float32
    size = 2 * len(table)
    for n in range(len(table)):
        assert math.cos(8191 * table[n].item()) == pytest.approx(math.cos(8191 * 10000 ** (-2 * n / size)), abs=2e-3)


def test_rows_quantise_alone_as_they_do_together():
    weight = torch.randn(10, 128)
    packed, scale = quantise(weight)
    for rows in (slice(0, 4), slice(4, 7), slice(9, 10)):
        part, part_scale = quantise(weight[rows])
        assert torch.equal(part, packed[rows]) and torch.equal(part_scale, scale[rows])


def load(rank: int, world_size: int, config) -> None:
    common.build(config)


def damage(folder: Path, change) -> Path:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks 1 tensors of the model, the first is model.norm.weight"),
        (lambda t: t.update({"model.layers.7.mlp.up_proj.weight": torch.ones(2)}), "1 tensors that its config.json has no place for"),
        (lambda t: t.update({"model.norm.weight": torch.ones(63)}), r"model.norm.weight has shape \(63,\), the config says \(64,\)"),
    ],
)
def test_a_folder_that_does_not_fit_its_config_is_refused_by_name(tmp_path, change, message):
    folder = damage(reference.write_model(tmp_path, "llama_tied", common.VOCAB), change)
    with pytest.raises(AssertionError, match=message):
        run(load, 1, common.config_for(folder))


def test_missing_cut_off_and_pickled_weights_are_refused_by_name(tmp_path):
    folder = reference.write_model(tmp_path, "llama_tied", common.VOCAB)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(AssertionError, match=r"UserError: model.path: .*model.safetensors is damaged"):
        run(load, 1, common.config_for(folder))
    file.rename(folder / "pytorch_model.bin")
    with pytest.raises(AssertionError, match=r"lacks \*.safetensors files; fetch or convert"):
        run(load, 1, common.config_for(folder))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=/nowhere", "holds no config.json"),
        ("model.config.model_type=lama", "transformers refuses it: Unrecognized model identifier: lama"),
        ("model.config={}", "has no model_type"),
    ],
)
def test_an_unusable_config_is_one_clear_error(override, message):
    config = compose([])
    if override == "model.config={}":
        config.model.config = {}
    else:
        config = compose([override])
    with pytest.raises(UserError, match=message):
        hf_config(config.model, 300)


def test_data_and_model_that_disagree_are_refused_with_both_numbers():
    hf = hf_config(compose(["model.config.max_position_embeddings=128"]).model, 300)
    check_model(hf, 128, 300)
    with pytest.raises(UserError, match="tokenizer has 301 tokens, the model's vocabulary 300"):
        check_model(hf, 128, 301)
    with pytest.raises(UserError, match=r"seq_len: is 129, the model's context is 128"):
        check_model(hf, 129, 300)
    hf.eos_token_id = [2, 5]
    check_model(hf, 128, 300, {"eos_token_id": 5, "bos_token_id": 1})
    with pytest.raises(UserError, match=r"eos_token_id is 3, the model's config says \[2, 5\]"):
        check_model(hf, 128, 300, {"eos_token_id": 3})


def test_a_load_balancing_loss_is_refused_and_not_dropped():
    hf = hf_config(config_of("mixtral", output_router_logits=True, router_aux_loss_coef=0.5).model, VOCAB)
    with pytest.raises(UserError, match=r"output_router_logits is true, router_aux_loss_coef 0.5.*set output_router_logits to false"):
        check_model(hf, 64, VOCAB)
    for values in ({"router_aux_loss_coef": 0.0, "output_router_logits": True}, {"router_aux_loss_coef": 0.5}):
        check_model(hf_config(config_of("mixtral", **values).model, VOCAB), 64, VOCAB)


def test_blocks_that_are_longer_than_the_first_of_two_rotary_tables_are_refused():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 16}
    hf = hf_config(config_of("phi3", original_max_position_embeddings=16, rope_parameters=rope).model, VOCAB)
    check_model(hf, 16, VOCAB)
    with pytest.raises(UserError, match=r"data.seq_len: is 17; this model \(longrope\) has another rotary table for documents over 16 tokens"):
        check_model(hf, 17, VOCAB)


@pytest.mark.parametrize("name", ["gemma3n_text", "gpt_neo"])
def test_buffers_are_those_of_transformers(name):
    """Each module's by the model that it lies in; causal masks of truth values are no rotary tables."""
    ours = dict(tiny_model(config_of(name)).named_buffers())
    values = {"vocab_size": VOCAB, **VALUES[name]}
    theirs = dict(AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **values)).named_buffers())
    assert ours.keys() == theirs.keys() and ours
    assert all(torch.equal(ours[key].float(), buffer.float()) for key, buffer in theirs.items())


def test_what_transformers_cannot_build_or_restore_is_refused_before_ray_starts(blocks, tmp_path):
    config = config_of("falcon_h1", f"data.path={blocks[0].uri}", f"run.path={tmp_path}/runs", max_position_embeddings=8192)
    with pytest.raises(UserError, match=r"falcon_h1 cannot be trained: transformers does not compute its buffer model.layers.0.mamba.mup_vector"):
        prepare_run(config)
    config = config_of("gemma2", f"data.path={blocks[0].uri}", f"run.path={tmp_path}/runs", "model.attention=sdpa", max_position_embeddings=8192)
    with pytest.raises(UserError, match="transformers cannot build gemma2"):
        prepare_run(config)


def test_a_mask_that_nobody_computes_is_refused():
    model = skeleton(config_of("gpt2").model, VOCAB, common.CPU)
    model.transformer.register_buffer("mask", torch.ones(2, 2, dtype=torch.bool), persistent=False)
    with pytest.raises(UserError, match=r"gpt2 cannot be trained: transformers does not compute its buffer transformer.mask"):
        restore_buffers(model, common.CPU)


STRANGERS = [
    ("qwen3_next", "mtp.fc.weight", "model.visual.fc.weight"),
    ("glm4_moe", "model.layers.92.eh_proj.weight", "model.layers.91.eh_proj.weight"),
    ("gpt2", "transformer.h.0.attn.bias", "transformer.h.0.attn.mask"),
    ("gpt2", "h.1.attn.masked_bias", "h.1.attn.c_attn.scale"),
    ("llama", "model.embed_tokens.position_ids", "model.embed_tokens.positions"),
]


@pytest.mark.parametrize(("name", "ignored", "refused"), STRANGERS)
def test_tensors_that_transformers_leaves_out_are_left_out(tmp_path, name, ignored, refused):
    config = config_of(name, "model.precision=fp32") if name in VALUES else random_config()
    model = skeleton(config.model, VOCAB, common.CPU)
    targets = slots_by_name(model)
    known, values = sorted(targets)[0], {"a": torch.ones(1)}
    for key in (ignored, refused):
        save_file({known: values["a"], key: values["a"].clone()}, tmp_path / "model.safetensors")
        if key == ignored:
            assert [target for target, _ in stored_tensors(model, tmp_path, targets)[0]] == [known]
        else:
            with pytest.raises(UserError, match=f"holds 1 tensors that its config.json has no place for, the first is {refused}"):
                stored_tensors(model, tmp_path, targets)


LIBRARIES = [
    ("model.method=qlora", "bitsandbytes", "qlora", "model.method=lora"),
    ("train.optimizer=adamw_8bit", "bitsandbytes", "qlora", "train.optimizer=adamw_bf16"),
    ("model.sharding=zero3", "deepspeed", "deepspeed", "model.sharding=fsdp"),
]


@pytest.mark.parametrize(("override", "library", "extra", "way_out"), LIBRARIES)
def test_a_run_that_needs_a_library_says_so_before_ray_starts(blocks, tmp_path, monkeypatch, override, library, extra, way_out):
    config = compose([f"data.path={blocks[0].uri}", f"run.path={tmp_path}/runs", override])
    if find_spec(library) is not None:
        assert prepare_run(config).config.train.optimizer == config.train.optimizer
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"needs {library}, which is not installed; pip install 'raytune70b\[{extra}\]', or use {way_out}"):
        prepare_run(config)


def test_a_quantised_folder_is_refused(tmp_path):
    folder = reference.write_model(tmp_path, "llama_tied", common.VOCAB)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}))
    with pytest.raises(UserError, match="is quantised already"):
        skeleton(common.config_for(folder).model, common.VOCAB, torch.device("cpu"))
