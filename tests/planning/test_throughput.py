"""The time model: operations against torch's own counter, and the directions in which speed must move."""

from dataclasses import replace

import pytest

from raytune70b.config import compose
from raytune70b.planning.hardware import machine
from raytune70b.planning.parameters import model_shape
from raytune70b.planning.throughput import attention_flops_per_token, model_flops_per_token, predict
from raytune70b.planning.workload import Workload, from_config

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
    assert speed(micro_batch_size=2).likely > here
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


def test_replicas_trade_network_for_memory():
    slow = "hardware.network_gbit_s_per_gpu=25"
    assert speed(slow, "model.replicate=2", "cluster.workers=[8,16]").likely > speed(slow).likely
