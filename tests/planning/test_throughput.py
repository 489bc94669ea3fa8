"""The time model: operations against torch's own counter, and the directions in which speed must move."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from raytune70b.config import compose
from raytune70b.planning.hardware import machine
from raytune70b.planning.offload import cpu_step_seconds
from raytune70b.planning.parameters import model_shape
from raytune70b.planning.throughput import FITTED, attention_flops_per_token, model_flops_per_token, predict, weight_gathers
from raytune70b.planning.workload import Workload, from_config
from tests import distributed

TINY = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 128}  # fmt: skip


def test_operations_are_those_that_torch_counts():
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    seq = 32
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY), attn_implementation="eager")
    ids = torch.zeros(1, seq, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids, use_cache=False).loss.backward()
    workload = Workload(model_shape(TINY), seq_len=seq)
    masked_half = 3.0 * attention_flops_per_token(workload)  # torch computes the whole square, forward and twice backward
    fused_backward = 0.5 * attention_flops_per_token(workload)  # FlashAttention's backward pass computes the scores once more
    planned = model_flops_per_token(workload) + masked_half - fused_backward
    assert counter.get_total_flops() / seq == pytest.approx(planned, rel=0.02)


def speed(*overrides, **changes):
    config = compose(["conf/recipe/cognistream.yaml", *overrides])
    place = machine(config.hardware)
    return predict(replace(from_config(config, place.gpus), **changes), place)


def test_band_and_parts():
    here = speed()
    assert here.low < here.likely < here.high
    assert here.step_seconds > max(here.seconds.values())
    assert here.bound in here.seconds
    assert 0 < here.mfu < 0.6


def test_published_fsdp_runs_point_to_this():
    assert 700 < speed().likely < 900  # full fine-tuning of 70B on 16 H100 with FSDP


def test_speed_moves_the_way_it_must():
    here = speed().likely
    assert speed("hardware.gpu=A100-SXM-80GB").likely < here
    assert speed("hardware.network_gbit_s_per_gpu=10").likely < 0.5 * here
    assert speed("hardware.network_gbit_s_per_gpu=10").bound == "network"
    assert speed("train.micro_batch_size=2").likely > here
    assert speed(activation_checkpointing="none").likely > here
    assert speed(fused_norm=True, fused_mlp=True).likely > here
    assert speed("model.method=lora").likely > here
    assert speed("hardware.gpus_per_node=1", "hardware.network_gbit_s_per_gpu=10").likely < here
    pairs = speed("hardware.gpu=H100-PCIe-80GB", "hardware.nodes=1")
    assert "PCIe" in pairs.seconds and "NVLink" not in pairs.seconds  # its bridges join pairs only


def test_one_stream_of_data_bounds_thousands_of_gpus():
    tiny = ("model.config.num_hidden_layers=1", "hardware.nodes=512", "train.global_batch_size=65536", "train.micro_batch_size=16")
    fed = speed(*tiny)
    assert fed.bound == "data"
    assert fed.likely * 512 * 8 == pytest.approx(2e7)


def test_a_place_that_no_block_fills_is_no_trained_token():
    full, third = speed("hardware.nodes=2"), speed("hardware.nodes=3")  # 128 blocks: 8 on each of 16 GPUs, on 24 GPUs 6 with room for 144
    for here, gpus in ((full, 16), (third, 24)):
        assert here.likely == pytest.approx(128 * 4096 / here.step_seconds / gpus)
        assert here.mfu == pytest.approx(here.likely * here.flops_per_token / 989.4e12, rel=1e-3)
    assert third.likely == pytest.approx(full.likely * 8 / 9, rel=0.01)
    assert third.high / third.likely == pytest.approx(full.high / full.likely)


def test_replicas_trade_network_for_memory():
    slow = "hardware.network_gbit_s_per_gpu=25"
    assert speed(slow, "model.replicate=2", "cluster.workers=[8,16]").likely > speed(slow).likely


HALF = ("conf/recipe/legalfin.yaml", "hardware.nodes=1", "cluster.workers=[8,8]")
MASTERS = ("model.precision=bf16_mixed", "model.gradients=fp32")
ZERO3 = (*MASTERS, "model.sharding=zero3")


def half(*overrides, **changes):
    """(workload, speed, PCIe's bytes a second) of legalfin on 8 GPUs: 8.6 billion elements a worker, 16 micro-batches a step."""
    config = compose([*HALF, *overrides])
    place = machine(config.hardware)
    workload = replace(from_config(config, place.gpus), **changes)
    return workload, predict(workload, place), place.gpu.pcie * FITTED.link


def test_offloaded_parameters_are_stepped_by_the_cpu_and_cross_in_every_micro_batch():
    workload, here, pcie = half("model.offload=params")
    elements, resident = workload.trained_shard, half()[1]
    assert workload.steps_on_cpu and elements == pytest.approx(8.62e9, rel=0.01)
    assert cpu_step_seconds(workload, 1) == pytest.approx(elements * (25 + 4.4) * 1e-9)  # measured: bf16 weights, fp32 states, and their norm
    assert cpu_step_seconds(workload, 8) < 0.3 * cpu_step_seconds(workload, 1)
    assert here.seconds["optimizer"] == cpu_step_seconds(workload) > 30
    assert here.seconds["PCIe"] == pytest.approx((16 * 2 * 2 + 2) * elements / pcie)  # weights of 2 bytes before two passes; the first gradients
    assert here.seconds["gradients to host memory"] == pytest.approx(15 * elements * (2 / 1e10 + 6 / 5e10))
    assert here.likely < 0.6 * resident.likely
    assert half("model.offload=params", micro_batches=1)[1].seconds["gradients to host memory"] == 0
    assert half("model.offload=params", *MASTERS)[1].seconds["optimizer"] < here.seconds["optimizer"]  # torch's fused AdamW


@pytest.mark.parametrize(("optimizer", "state"), [("adamw", 8), ("adamw_bf16", 4), ("adamw_8bit", 2)])
def test_offloaded_states_cross_both_ways_in_a_step(optimizer, state):
    workload, here, pcie = half("model.offload=optimizer", f"train.optimizer={optimizer}")
    resident = half(f"train.optimizer={optimizer}")[1]
    assert not workload.steps_on_cpu
    assert here.seconds["optimizer"] - resident.seconds["optimizer"] == pytest.approx(2 * state * workload.trained_shard / pcie)
    assert here.seconds["PCIe"] == here.seconds["gradients to host memory"] == 0


def test_zero3_offloads_gradients_in_every_micro_batch_and_steps_on_the_cpu():
    workload, here, pcie = half(*ZERO3, "model.offload=optimizer")
    elements = workload.trained_shard
    assert workload.steps_on_cpu
    assert here.seconds["PCIe"] == pytest.approx(16 * 8 * elements / pcie)
    assert here.seconds["optimizer"] == pytest.approx(cpu_step_seconds(workload) + 2 * elements / pcie)
    assert half(*ZERO3, "model.offload=params")[1].seconds["PCIe"] == pytest.approx(16 * (8 + 2 * 2) * elements / pcie)


def test_an_offloaded_base_crosses_though_it_is_frozen():
    workload, here, pcie = half("model.method=lora", "model.offload=params")
    assert here.seconds["PCIe"] > 0.95 * 16 * 2 * 2 * workload.model.parameters / 8 / pcie
    assert here.seconds["optimizer"] < 1


def test_offloading_costs_nothing_where_the_gpu_is_a_cpu():
    config = compose(["model.offload=params"])
    workload, place = from_config(config, 2), machine(config.hardware)
    assert predict(workload, place) == predict(replace(workload, offload="none"), place)


LAYERED = ("model.sharding=zero3", "model.precision=fp32", "model.config.num_hidden_layers=8", "model.config.tie_word_embeddings=false",
           "model.loss_chunk_tokens=8", "model.lora.rank=1")  # fmt: skip


def elements_gathered(rank, world_size, cases):
    """By case, what DeepSpeed gathers in a micro-batch as a multiple of the model; its limits are to this model's layers as to those of 70B."""
    import torch

    from raytune70b.model.dryrun import random_batch
    from raytune70b.model.loss import loss_sum
    from raytune70b.model.zero3 import import_deepspeed
    from raytune70b.planning import memory
    from raytune70b.training.engine import build_engine

    layer, cpu = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192, torch.device("cpu")
    import_deepspeed(cpu)
    import deepspeed.runtime.zero.partition_parameters as partition

    memory.ZERO3_LIVE_PARAMETERS, memory.ZERO3_PREFETCH_BUCKET, memory.ZERO3_PERSISTENT = round(layer / 0.856), round(layer * 0.05 / 0.856), 64
    gathered, gather, found = [0], partition._dist_allgather_fn, {}

    def counted(part, whole, *rest):
        gathered[0] += whole.numel()
        return gather(part, whole, *rest)

    partition._dist_allgather_fn = counted
    for method, checkpointing in cases:
        config = compose([*LAYERED, f"model.method={method}", f"model.activation_checkpointing={checkpointing}"])
        engine = build_engine(config, 96, cpu)
        for _ in range(3):  # DeepSpeed learns the order of modules in the first
            gathered[0] = 0
            engine.backward(loss_sum(engine.model, random_batch(96, 16, 2, cpu), 8))
            engine.update(engine.grad_norm(), 1.0, 1e-3)
        found[method, checkpointing] = gathered[0] / sum(p.ds_numel for p in engine.model.parameters())
    return found


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="the extra deepspeed is not installed")
def test_the_gathers_of_zero3_are_those_that_deepspeed_makes():
    cases = [(method, checkpointing) for method in ("full", "lora") for checkpointing in ("none", "full")]
    for (method, checkpointing), found in distributed.run(elements_gathered, 2, cases)[0].items():
        planned = weight_gathers(replace(from_config(compose([*LAYERED]), 2), method=method, activation_checkpointing=checkpointing))
        assert planned - 0.35 < found < planned + 0.05, (method, checkpointing)  # what lies at the turn of the passes is gathered once
