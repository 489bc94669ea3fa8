"""What the trainer asks the plan before it starts: how few workers are enough, how large a micro-batch may be, and what to say when
memory does not suffice. Bytes of one GPU come from the device itself, so that the answer holds for the machine at hand."""

from __future__ import annotations

from raytune70b.planning.hardware import GIB, find_gpu, machine
from raytune70b.planning.memory import plan_memory
from raytune70b.planning.plan import PlanError, resolve_micro_batch
from raytune70b.planning.throughput import Throughput, predict
from raytune70b.planning.workload import Workload, config_shape, from_config, with_micro_batch
from raytune70b.schema import Config


def workload_of(config: Config, world_size: int, gpu_memory_bytes: float, vocab_size: int | None = None) -> Workload:
    """The workload on so many workers, its micro-batch resolved. Raises UserError."""
    workload = from_config(config, world_size, config_shape(config, vocab_size))
    return resolve_micro_batch(workload, config, gpu_memory_bytes)


def auto_micro_batch(config: Config, world_size: int, gpu_memory_bytes: float, vocab_size: int | None = None) -> int:
    """The largest micro-batch that divides the global batch, leaves every worker one and keeps a reserve free. Raises PlanError when
    not even one block fits."""
    workload = workload_of(config, world_size, gpu_memory_bytes, vocab_size)
    if plan_memory(workload, gpu_memory_bytes).total > gpu_memory_bytes:
        raise PlanError(f"train.micro_batch_size: not even 1 fits: {memory_line(workload, gpu_memory_bytes)}")
    return workload.micro_batch_size


def minimum_workers(config: Config, gpu_memory_bytes: float, vocab_size: int | None = None, most: int = 4096) -> int | None:
    """The fewest workers, in steps of `model.replicate`, on which the run fits; None when not even `most` are enough.

    What rests shrinks with every worker, so halving finds it. With `auto` the micro-batch is 1 there.
    """
    step = config.model.replicate
    shape = config_shape(config, vocab_size)

    def fits(copies: int) -> bool:
        return plan_memory(from_config(config, copies * step, shape), gpu_memory_bytes).total <= gpu_memory_bytes

    low, high = 1, max(1, most // step)
    if not fits(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low * step


def memory_line(workload: Workload, gpu_memory_bytes: float) -> str:
    """One line for a log or an error: what is needed by part, and what is there."""
    plan = plan_memory(workload, gpu_memory_bytes)
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.parts.items() if size >= 0.05 * GIB)
    need = f"{plan.total / GIB:.1f} of {gpu_memory_bytes / GIB:.1f} GiB"
    return f"the plan needs {need} a worker at {workload.world_size} workers ({parts}; worst at the {plan.moment})"


def expected_throughput(config: Config, world_size: int, vocab_size: int | None = None) -> Throughput:
    """Speed by the plan on `hardware.gpu` with so many workers: the step's seconds, the band, and FLOPs per token for the MFU."""
    place = machine(config.hardware)
    workload = resolve_micro_batch(
        from_config(config, world_size, config_shape(config, vocab_size)), config, find_gpu(config.hardware.gpu).memory
    )
    return predict(with_micro_batch(workload, workload.micro_batch_size, config.train.global_batch_size), place)
