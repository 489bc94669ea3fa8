"""Sharding over the workers with FSDP2: parameters, gradients and optimizer states are cut along their first dimension.

One decoder layer is gathered at a time, and freed after its forward pass. Gradients come out as the SUM over all workers:
the loop divides by the trained tokens of the global batch, which no worker's mean could replace. One worker takes the same
path as many.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from raytune70b import schema
from raytune70b.config import UserError


def make_mesh(world_size: int, replicate: int, device_type: str) -> DeviceMesh:
    """The workers as a mesh: one dimension `shard`, or `replicate` x `shard` for hybrid sharding. Raises UserError.

    Neighbouring ranks share a copy, so with `replicate` = nodes every copy lies within one node.
    """
    if world_size % replicate:
        raise UserError(f"model.replicate: is {replicate}, which does not divide the {world_size} workers; change cluster.workers or model.replicate")
    if replicate == 1:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (replicate, world_size // replicate), mesh_dim_names=("replicate", "shard"))


def mixed_precision(precision: str) -> MixedPrecisionPolicy:
    """bf16 compute gathers in bf16 and sums gradients over the workers in fp32; fp32 does both in fp32."""
    if precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@torch.compiler.disable  # FSDP2's own hooks are not compiled either: a layer stays one graph
def cast_but_tables(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Casts a layer's inputs to bf16, as FSDP2 would, but for rotary tables: some architectures turn queries and keys by fp32 ones."""

    def cast(value: Any) -> Any:
        return value.to(torch.bfloat16) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return tuple(cast(a) for a in args), {key: cast(value) for key, value in kwargs.items()}


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a transformers model, in order."""
    names = set(model._no_split_modules or ())  # type: ignore[arg-type]
    return [module for module in model.modules() if type(module).__name__ in names]


def shard(model: nn.Module, mesh: DeviceMesh, config: schema.Model) -> None:
    """Applies `fully_shard` to every layer, the embedding, the head and the root, in place; the model is on `meta` before and after."""
    offload = config.offload == "params"
    policies: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": mixed_precision(config.precision),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy(),
    }
    for layer in decoder_layers(model):
        fully_shard(layer, **{**policies, "mp_policy": replace(policies["mp_policy"], cast_forward_inputs=False)})
        if config.precision != "fp32":
            layer.register_forward_pre_hook(cast_but_tables, with_kwargs=True)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    shared = {id(p) for p in embedding.parameters()} & {id(p) for p in head.parameters()}
    if not shared:  # tied weights must lie in one group: the root's
        fully_shard(embedding, **policies)
        fully_shard(head, reshard_after_forward=False, **policies)  # its backward pass follows at once
    fully_shard(model, **policies)
    sum_gradients(model)
    require_sharded(model)


def sum_gradients(model: nn.Module) -> None:
    """Makes gradients sums over the workers. The setters act on one module, and NCCL's scaled sum loses bf16, hence the plain sum."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def sum_in_fp32(model: Any) -> None:
    """Gradients of bf16 weights add up in fp32. Call it when the model has its memory.

    FSDP2 sums over the workers in fp32, but then rounds to the weight's type, and adds the next micro-batch to that: with many
    micro-batches small gradients are lost, and what is lost follows the number of workers. It has no setting for it.
    """
    model._get_fsdp_state()._lazy_init()  # it reads the weights' types once, here, or else at the first forward pass
    for module in model.modules():
        for group in module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ():
            if group._orig_dtype is not None:
                group._orig_dtype = torch.float32
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = torch.float32


def require_sharded(model: nn.Module) -> None:
    """Raises RuntimeError when a trained parameter is not sharded: it would drift apart between workers without an error."""
    loose = [name for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if loose:
        raise RuntimeError(f"{len(loose)} trained parameters are not sharded, the first is {loose[0]}")


def local_rows(parameter: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This worker's rows of a sharded parameter (a view of its memory) and the number of its first row."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(parameter, DTensor)
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), offset[0] if offset else 0


def reshard(model: nn.Module) -> None:
    """Frees every gathered parameter, so that the model's parameters are its shards again. Needed after a forward pass without a backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
