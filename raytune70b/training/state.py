"""What a checkpoint must hold of model and optimizer, as live sharded tensors.

`state_dict` returns the tensors themselves, not copies: `dcp.save` (or `async_save`) writes them, `dcp.load` into the same
dictionary restores them in place, whatever number of workers wrote them. Frozen weights are left out: they come from the
base model again, so a LoRA or QLoRA checkpoint is as small as its adapters and their optimizer states.

torch's own `get_state_dict`/`set_state_dict` would cast 8-bit states to the parameters' dtype and pull offloaded ones onto the
device when they load.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raytune70b.model.weights import is_adapter

State = dict[str, dict[str, Tensor]]
"""{"model": {name: tensor}, "optimizer": {name.state: tensor}}."""


def state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Everything that training changes."""
    return {"model": model_state(model), "optimizer": optimizer_state(model, optimizer)}


@torch.no_grad()
def load_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Puts a state of the same names and sharding in place; tensors that are in place already (after `dcp.load`) are left alone.

    Raises KeyError with the names that only one side has.
    """
    live = state_dict(model, optimizer)
    for part, tensors in live.items():
        if tensors.keys() != state[part].keys():
            raise KeyError(f"{part}: {sorted(tensors.keys() ^ state[part].keys())[:5]} are in one of checkpoint and model only")
        for name, tensor in tensors.items():
            if local_tensor(tensor).data_ptr() != local_tensor(state[part][name]).data_ptr():
                tensor.copy_(state[part][name])


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of the model by name, tied weights once: all of it, or beside adapters what is trained."""
    return {name: p.detach() for name, p in saved_parameters(model).items()} | buffer_state(model)


def saved_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter, with those that an architecture freezes itself (a router's bias): an export wants them; beside adapters the trained ones."""
    adapted = has_adapters(model)
    return {name: p for name, p in model.named_parameters() if p.requires_grad or not adapted}


def buffer_state(model: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers; none beside adapters, where the base is frozen."""
    if has_adapters(model):
        return {}
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def has_adapters(model: nn.Module) -> bool:
    return any(is_adapter(name) for name, _ in model.named_parameters())


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every state tensor as `<parameter name>.<state name>`; makes the states first where the optimizer has not stepped yet."""
    create_states(optimizer)
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {f"{names[p]}.{key}": value for p, values in optimizer.state.items() for key, value in values.items() if isinstance(value, Tensor)}


def create_states(optimizer: torch.optim.Optimizer) -> None:
    """Makes the states of an optimizer that makes them at its first step, without changing a weight."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if all(p in optimizer.state for p in parameters):
        return
    if optimizer.state:
        raise RuntimeError("the optimizer has states for some of its parameters only")
    gradients, rates = [p.grad for p in parameters], [group["lr"] for group in optimizer.param_groups]
    for p in parameters:
        p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for values in optimizer.state.values():
        for value in values.values():
            local_tensor(value).zero_()


def local_tensor(value: Any) -> Tensor:
    """The part of a tensor that this worker holds."""
    return value.to_local() if isinstance(value, DTensor) else value
