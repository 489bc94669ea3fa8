from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from raytune70b.config import UserError, compose
from raytune70b.model.dryrun import advice, dry_run
from raytune70b.model.loss import loss_sum
from raytune70b.model.shard import make_mesh, require_sharded, sum_gradients
from raytune70b.training.engine import Fsdp
from tests import reference
from tests.distributed import run
from tests.model import common

pytestmark = pytest.mark.timeout(900)
VARIANTS = {
    "plain": (),
    "recomputed": ("model.activation_checkpointing=full",),
    "recomputed by halves": ("model.activation_checkpointing=selective",),
    "parameters in host memory": ("model.offload=params",),
    "eager attention": ("model.attention=eager",),
    "whole logits": ("model.loss_chunk_tokens=0",),
}


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    torch.set_num_threads(1)
    folder = reference.write_model(tmp_path_factory.mktemp("model"), "llama", common.VOCAB)
    return folder, reference.batches(1, rows=8, seq_len=16, vocab_size=common.VOCAB)[0]


def gradients_of_variants(rank: int, world_size: int, folder: Path, batch: dict, replicate: int) -> dict:
    found = {}
    for name, overrides in VARIANTS.items():
        if world_size == 4 and name != "plain":
            continue
        config = common.config_for(folder, "full", "fp32", f"model.replicate={replicate}", f"cluster.workers=[{world_size},{world_size}]", *overrides)
        model, _ = common.build(config)
        shards = {p.to_local().shape[0] for n, p in model.named_parameters() if n.endswith("up_proj.weight")}
        assert shards == {128 // (world_size // replicate)}
        found[name] = common.gradients(model, config, batch)
    return found if rank == 0 else {}


@pytest.fixture(scope="module")
def plain(setting):
    return run(gradients_of_variants, 1, *setting, 1)[0]


def assert_equal(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("variant", list(VARIANTS)[1:])
def test_saving_memory_changes_no_gradient(plain, variant):
    assert_equal(plain[variant], plain["plain"])


def test_hybrid_sharding_sums_gradients_over_shards_and_copies(setting, plain):
    """Two copies of the model over two workers each; a mean over either dimension would halve the gradients."""
    assert_equal(run(gradients_of_variants, 4, *setting, 2)[0]["plain"], plain["plain"])


def test_replicate_must_divide_the_workers():
    with pytest.raises(UserError, match=r"model.replicate: is 2, which does not divide the 3 workers"):
        make_mesh(3, 2, "cpu")


def compiled_gradients(rank: int, world_size: int, folder: Path, batch: dict) -> dict:
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # a pool of compiling processes would take longer to start than it helps
    config = common.config_for(folder, "full", "fp32", "model.compile=true")
    model, _ = common.build(config)
    found = common.gradients(model, config, batch)
    from torch._dynamo.utils import counters

    assert counters["stats"]["unique_graphs"] >= 1, "nothing was compiled"
    return found


def test_compiled_layers_give_the_same_gradients(setting, plain):
    assert_equal(run(compiled_gradients, 1, *setting)[0], plain["plain"])


def lengths_compiled(rank: int, world_size: int, folder: Path, batch: dict) -> list[bool]:
    """Of each graph that a dry run, a validation and a step make, whether it is for any length."""
    dynamic: list[bool] = []

    def spy(graph: Any, inputs: list) -> Any:
        dynamic.append(any(isinstance(value, torch.SymInt) or (torch.is_tensor(value) and any(isinstance(n, torch.SymInt) for n in value.shape)) for value in inputs))
        return graph.forward

    compile_in_place = torch.nn.Module.compile
    torch.nn.Module.compile = lambda self: compile_in_place(self, backend=spy)  # type: ignore[method-assign]
    config = common.config_for(folder, "full", "fp32", "model.compile=true")
    model, _ = common.build(config)
    dry_run(model, config, common.VOCAB, 32, 2, common.CPU)
    longer = {name: values.repeat(1, 2) for name, values in batch.items()}  # 32 tokens, as in the dry run
    model.eval()
    with torch.no_grad():
        loss_sum(model, {name: values[:2] for name, values in longer.items()}, 10)
    Fsdp(model, torch.optim.SGD(model.parameters())).rest()
    common.gradients(model.train(), config, longer)
    return dynamic


def test_a_dry_run_has_layers_compiled_for_the_length_that_is_trained(setting):
    """Else the check's short batch is a length more, after which torch compiles for any length; a resumed run has no dry run, and other kernels."""
    assert run(lengths_compiled, 1, *setting)[0] == [False, False]  # with gradients, and without: nothing for the check


def norm_of_ones(rank: int, world_size: int) -> float:
    model = torch.nn.Linear(2, 2, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    assert isinstance(model, FSDPModule)
    sum_gradients(model)
    (model(torch.ones(1, 2)).sum() / world_size).backward()
    return Fsdp(model, torch.optim.SGD(model.parameters())).grad_norm().item()


def test_the_gradient_norm_of_a_2x2_matrix_of_ones_on_two_ranks_is_2():
    assert run(norm_of_ones, 2) == [2.0, 2.0]


def test_a_trained_parameter_that_is_not_sharded_is_an_error():
    with pytest.raises(RuntimeError, match="2 trained parameters are not sharded, the first is weight"):
        require_sharded(torch.nn.Linear(2, 2))


def dry_runs(rank: int, world_size: int, folder: Path) -> str:
    config = common.config_for(folder)
    model, _ = common.build(config)
    before = {name: common.full(p) for name, p in model.named_parameters()}
    result = dry_run(model, config, common.VOCAB, 32, 2, common.CPU)
    assert result.seconds > 0 and model.training
    assert all(p.grad is None and torch.equal(common.full(p), before[name]) for name, p in model.named_parameters())
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), -1))
    config = common.config_for(folder, "full", "fp32", "model.loss_chunk_tokens=0")
    try:
        dry_run(model, config, common.VOCAB, 128, 8192, common.CPU, plan="the memory plan says 12 GB of 8")
    except UserError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    return "it fitted"


def test_a_dry_run_leaves_no_trace_and_turns_out_of_memory_into_advice(setting):
    message = run(dry_runs, 1, setting[0])[0]
    assert "8192 blocks of 128 tokens do not fit in memory" in message and "the memory plan says 12 GB of 8; try model.loss_chunk_tokens=1024, then" in message
    assert "\n" not in message and "train.micro_batch_size=4096" in message


def test_advice_leaves_out_what_is_set_already():
    config = compose(["model.activation_checkpointing=full", "model.loss_chunk_tokens=512", "model.method=lora", "model.offload=params", "train.optimizer=adamw_8bit"])
    assert advice(config, 64, 1, "out").endswith("try more workers (cluster.workers)")


def tables_in_layers(rank: int, world_size: int) -> dict[str, set[torch.dtype]]:
    """Types of what a decoder layer is given: rotary tables, and everything else."""
    found: dict[str, set[torch.dtype]] = {}
    for name in ("olmo2", "llama"):
        config = compose(["model.precision=bf16_mixed"])
        config.model.config = reference.config_values(name)
        model, _ = common.build(config)

        def look(layer, args, kwargs, name=name):
            found.setdefault(name, set()).update(t.dtype for t in kwargs["position_embeddings"])
            found.setdefault("else", set()).update(t.dtype for t in [*args, *kwargs.values()] if torch.is_tensor(t) and t.is_floating_point())

        model.get_decoder().layers[1].self_attn.register_forward_pre_hook(look, with_kwargs=True)
        batch = {key: values[:2] for key, values in reference.batches(1, 2, 16, common.VOCAB)[0].items()}
        loss_sum(model, batch, 0).backward()
    return found


def test_rotary_tables_that_an_architecture_keeps_in_fp32_reach_its_layers_so():
    assert run(tables_in_layers, 1) == [{"olmo2": {torch.float32}, "llama": {torch.bfloat16}, "else": {torch.bfloat16}}]
