"""The memory plan: exact against what a sharded run really allocates, and its properties over a grid."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from raytune70b.config import compose
from raytune70b.planning.advice import auto_micro_batch, memory_line, minimum_workers, workload_of
from raytune70b.planning.host import host_bytes, pinned, sub_groups
from raytune70b.planning.memory import MemoryPlan, activation_bytes, loss_bytes, plan_memory, resting_bytes, saved_bytes_per_token
from raytune70b.planning.parameters import model_shape
from raytune70b.planning.plan import PlanError
from raytune70b.planning.workload import Workload, config_shape, from_config, shard_numel, with_micro_batch
from tests import distributed

VOCAB = 97  # no number of workers divides it
TINY = ("data.seq_len=16", "train.global_batch_size=8", "train.micro_batch_size=2")
METHODS = {
    "full": ("model.method=full",),
    "full-untied": ("model.method=full", "model.config.tie_word_embeddings=false"),
    "full-bf16": ("model.method=full", "model.precision=bf16", "model.gradients=bf16"),
    "full-bf16-fp32-gradients": ("model.method=full", "model.precision=bf16"),
    "full-bf16-states": ("model.method=full", "train.optimizer=adamw_bf16"),
    "full-8bit-states": ("model.method=full", "train.optimizer=adamw_8bit"),
    "lora": ("model.method=lora", "model.lora.rank=3"),
    "lora-targets": ("model.method=lora", "model.lora.targets=[q_proj,down_proj]", "model.precision=fp32"),
    "lora-saved": ("model.method=lora", "model.lora.modules_to_save=[lm_head]", "model.config.tie_word_embeddings=false"),
    "qlora": ("model.method=qlora", "model.config.intermediate_size=192"),
    "qlora-bf16": ("model.method=qlora", "model.config.intermediate_size=192", "model.precision=bf16"),
}


def allocated(rank, world_size, overrides):
    """Bytes of every parameter, gradient and optimizer state on this rank, after one real backward pass and update, by method."""
    import torch
    from torch.distributed.tensor import DTensor

    from raytune70b.model.dryrun import random_batch
    from raytune70b.model.load import build_model
    from raytune70b.model.loss import loss_sum
    from raytune70b.model.shard import make_mesh
    from raytune70b.training.optimizer import build_optimizer

    def size(tensors):
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        return sum(t.numel() * t.element_size() for t in local)

    torch.set_num_threads(1)
    found = {}
    for name, settings in overrides.items():
        config = compose([*TINY, *settings])
        model = build_model(config, VOCAB, make_mesh(world_size, 1, "cpu"), torch.device("cpu"))
        optimizer = build_optimizer(model, config)
        loss_sum(model, random_batch(VOCAB, 16, 2, torch.device("cpu")), 8).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
        found[name] = {"parameters": size(model.parameters()), "gradients": size(gradients), "optimizer states": size(states)}
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_what_rests_equals_what_a_run_allocates(world_size):
    methods = METHODS if world_size == 2 else {name: METHODS[name] for name in ("full", "lora", "qlora")}
    ranks = distributed.run(allocated, world_size, methods)
    for name, settings in methods.items():
        config = compose([*TINY, *settings])
        workload = from_config(config, world_size, config_shape(config, VOCAB))
        for rank, found in enumerate(ranks):
            assert resting_bytes(workload, rank) == found[name], (name, rank)


def allocated_by_zero3(rank, world_size, overrides):
    """The same under DeepSpeed."""
    import torch

    from raytune70b.training.engine import build_engine

    def size(tensors):
        memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(memory.values())

    torch.set_num_threads(1)
    found = {}
    for name, settings in overrides.items():
        engine = build_engine(compose([*TINY, "model.sharding=zero3", *settings]), VOCAB, torch.device("cpu"))
        masters = engine.zero.fp32_partitioned_groups_flat
        states = [state[key] for state in engine.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        found[name] = {
            "parameters": size([*masters, *(p.ds_tensor for p in engine.model.parameters())]),
            "gradients": size([engine.zero.grad_partitions_flat_buffer]), "optimizer states": size(states),
            "the step's gradients": size([flat.grad for flat in masters if flat.grad is not None]),
        }  # fmt: skip
    return found


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="the extra deepspeed is not installed")
def test_what_rests_under_zero3_equals_what_a_run_allocates():
    methods = {name: METHODS[name] for name in ("full", "lora", "lora-targets", "lora-saved", "qlora")}
    methods |= {"fp32": ("model.precision=fp32",), "offload": ("model.offload=optimizer",)}
    for rank, found in enumerate(distributed.run(allocated_by_zero3, 2, methods)):
        for name, settings in methods.items():
            config = compose([*TINY, "model.sharding=zero3", *settings])
            workload = from_config(config, 2, config_shape(config, VOCAB))
            again = found[name].pop("the step's gradients")
            assert resting_bytes(workload, rank) == found[name], (name, rank)
            assert again == (4 * sum(sub_groups(workload)) if name == "offload" else 0), "DeepSpeed holds offloaded gradients twice"


@pytest.mark.parametrize(("share", "verdict"), [(0.5, "fits"), (0.91, "fits"), (0.93, "tight"), (1.0, "tight"), (1.001, "does not fit")])
def test_a_plan_is_tight_from_92_per_cent_of_the_memory_on(share, verdict):
    assert MemoryPlan({"parameters": 60e9 * share, "activations": 20e9 * share}, "forward pass", 80e9).verdict == verdict


def test_pinned_memory_is_rounded_to_powers_of_two():
    assert [pinned(n) for n in (0, 1, 4096, 4097, 3 * 2**30)] == [0, 1, 4096, 8192, 2**32]


def offloaded(*settings):
    """(bytes of host memory that offloading adds, elements of a worker) of a run of 8 workers: most shards of 70B are 7/8 of a power of two."""
    here, there = (from_config(compose(["conf/recipe/legalfin.yaml", *settings, *more]), 8) for more in ([], ["model.offload=none"]))
    return host_bytes(here) - host_bytes(there), here.trained_shard


MASTERS = ("model.precision=bf16_mixed", "model.gradients=fp32")


@pytest.mark.parametrize(
    ("settings", "plain", "rounded"),
    [
        (["model.offload=params"], 8, 2 + 2),  # states; weights and gradients
        (["model.offload=params", *MASTERS], 8, 4 + 4),
        (["model.offload=optimizer"], 0, 8),
        (["model.offload=optimizer", "train.optimizer=adamw_bf16"], 0, 4),
        (["model.offload=optimizer", "train.optimizer=adamw_8bit"], 0, 2 + 8 / 256),
        (["model.sharding=zero3", "model.offload=optimizer", *MASTERS], 4 + 8, 4 + 4),  # masters and states; gradients, twice
        (["model.sharding=zero3", "model.offload=params", *MASTERS], 4 + 8, 4 + 4 + 2 + 2),  # the weights flat, and the pieces they were
    ],
)
def test_offloaded_host_memory_counts_what_is_pinned_as_it_is_rounded(settings, plain, rounded):
    added, elements = offloaded(*settings)
    assert (plain + rounded) * elements < added <= (plain + 2 * rounded) * elements


def test_sub_groups_are_whole_tensors_and_hold_all():
    workload = from_config(compose(["conf/recipe/legalfin.yaml", "model.sharding=zero3", *MASTERS]), 8)
    sizes = list(sub_groups(workload))
    assert sum(sizes) == workload.trained_shard
    assert all(1e9 <= n < 1.1e9 for n in sizes[:-2]) and sizes[-1] < 1e6, "the vectors have one of their own"


@pytest.mark.parametrize("shards", range(1, 9))
@pytest.mark.parametrize("rows", [1, 3, 8, 97])
def test_shards_add_up_and_the_first_is_the_largest(rows, shards):
    sizes = [shard_numel((rows, 5), shards, rank) for rank in range(shards)]
    assert sum(sizes) == rows * 5
    assert sizes == sorted(sizes, reverse=True)


def gigabytes_at_rest(*overrides):
    """Decimal GB of weights, gradients and states on each of 16 GPUs, before any activation."""
    config = compose(["conf/recipe/compliance.yaml", "model.sharding=fsdp", *overrides])
    return sum(resting_bytes(from_config(config, 16)).values()) / 1e9


def test_bytes_per_parameter_of_the_case_studies():
    assert gigabytes_at_rest() == pytest.approx(70.6, abs=0.05)  # 16 bytes: fp32 master weights, moments and gradients
    assert gigabytes_at_rest("train.optimizer=adamw_bf16") == pytest.approx(52.9, abs=0.05)  # 12: bf16 moments
    assert gigabytes_at_rest("train.optimizer=adamw_bf16", "model.precision=bf16", "model.gradients=bf16") == pytest.approx(35.3, abs=0.05)  # 8: all bf16


GRID = [(method, checkpointing) for method in ("full", "lora", "qlora") for checkpointing in ("none", "selective", "full")]


@pytest.mark.parametrize(("method", "checkpointing"), GRID)
def test_memory_moves_the_way_it_must(method, checkpointing):
    recipe = ["conf/recipe/cognistream.yaml", f"model.method={method}", f"model.activation_checkpointing={checkpointing}"]
    base = from_config(compose(recipe), 16)

    def total(**changes):
        return plan_memory(replace(base, **changes), 80e9).total

    here = total()
    assert total(world_size=32) < here < total(world_size=8)
    assert total(micro_batch_size=2) > here
    assert total(replicate=2) > here
    assert loss_bytes(replace(base, loss_chunk_tokens=0, micro_batch_size=8)) > loss_bytes(replace(base, micro_batch_size=8))
    assert total(flash_attention=False) > here
    assert total(offload="params") < here
    if checkpointing != "none":
        assert total(activation_checkpointing="none") > here
    if method == "full":
        assert total(sharding="zero3", precision="bf16_mixed") > total(precision="bf16_mixed")


SHAPE = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}


def kept_by_autograd(layers, dtype, tokens):
    """Bytes of every tensor that a decoder of so many layers saves for its backward pass, parameters left out."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = AutoConfig.for_model(**SHAPE, num_hidden_layers=layers)
    model = AutoModelForCausalLM.from_config(hf, attn_implementation="sdpa", dtype=dtype)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    ids, positions = torch.zeros(1, tokens, dtype=torch.long), torch.arange(tokens).unsqueeze(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        hidden = model.get_decoder()(ids, use_cache=False, position_ids=positions).last_hidden_state
    assert hidden.requires_grad
    return sum(t.untyped_storage().nbytes() for t in saved.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_are_what_autograd_keeps(precision):
    import torch

    tokens, dtype = 128, torch.float32 if precision == "fp32" else torch.bfloat16
    a_layer = (kept_by_autograd(5, dtype, tokens) - kept_by_autograd(2, dtype, tokens)) / 3
    planned = saved_bytes_per_token(Workload(model_shape({**SHAPE, "num_hidden_layers": 2}), precision=precision)) * tokens
    assert planned == pytest.approx(a_layer, rel=0.02)  # the rest is attention's row sums


def test_checkpointing_keeps_one_hidden_state_a_layer():
    base = from_config(compose(["conf/recipe/cognistream.yaml"]), 16)
    kept, _ = activation_bytes(base)
    assert kept == 80 * 4096 * 8192 * 2  # layers x tokens x hidden x bf16
    assert activation_bytes(replace(base, activation_checkpointing="none"))[0] == 80 * 4096 * saved_bytes_per_token(base)


def test_auto_micro_batch_is_the_largest_that_fits():
    config = compose(["conf/recipe/synergy.yaml", "train.micro_batch_size=auto"])
    size = auto_micro_batch(config, 16, 80e9)
    workload = workload_of(config, 16, 80e9)
    batch = config.train.global_batch_size
    assert workload.micro_batch_size == size
    larger = [n for n in range(size + 1, batch // 16 + 1) if batch % n == 0]
    assert all(plan_memory(with_micro_batch(workload, n, batch), 80e9).total > 0.92 * 80e9 for n in larger)
    assert plan_memory(workload, 80e9).total <= 0.92 * 80e9
    assert batch % size == 0
    with pytest.raises(PlanError, match=r"train.micro_batch_size: not even 1 fits: the plan needs .* GiB a worker at 16 workers"):
        auto_micro_batch(config, 16, 4e9)


def test_minimum_workers_is_the_first_that_fits():
    config = compose(["conf/recipe/cognistream.yaml"])
    shape = config_shape(config)
    fits = [n for n in range(1, 40) if plan_memory(from_config(config, n, shape), 80e9).total <= 80e9]
    assert minimum_workers(config, 80e9) == fits[0] > 8
    assert minimum_workers(config, 80e9, most=fits[0] - 1) is None
    assert minimum_workers(compose(["conf/finetune.yaml"]), 8e9) == 1
    replicated = minimum_workers(compose(["conf/recipe/cognistream.yaml", "model.replicate=2", "cluster.workers=[8,16]"]), 80e9)
    assert replicated is not None and replicated % 2 == 0 and replicated >= 2 * fits[0]


def test_the_line_for_an_error_names_the_parts():
    line = memory_line(from_config(compose(["conf/recipe/cognistream.yaml"]), 16), 80e9)
    assert line.startswith("the plan needs 6") and "optimizer states 32.1" in line and "\n" not in line
