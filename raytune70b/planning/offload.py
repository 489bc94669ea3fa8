"""What `model.offload` costs in time: bytes that cross PCIe in every micro-batch, waits for them, and an optimizer step on the CPU.

What crosses when was traced in torch 2.13 and DeepSpeed 0.19.8; what a core does in a second was measured on one. No published run
tells how offloading fares, so nothing here is fitted to any, and a plan that offloads is less sure than its band says.
"""

from __future__ import annotations

from raytune70b.planning.hardware import CPUS_PER_GPU, Machine
from raytune70b.planning.memory import frozen_bytes
from raytune70b.planning.workload import Workload

HOST_BYTES_PER_S = 5e10
"""Host memory bandwidth of one worker of eight: two sockets of eight DDR5-4800 channels reach about two thirds of 614 GB/s together."""

PAGEABLE_BYTES_PER_S = 1e10
"""A copy from the GPU into memory that is not pinned: the driver passes it through a small buffer, and one thread copies it out."""

CORE_BYTES_PER_S = 1.1e10
"""Memory traffic of one core in the steps below: 278 bytes an element in 25 ns. So a worker's bandwidth feeds no more than five cores."""

CPU_STEP_NS = 10.0
CPU_WEIGHT_NS = 15.0
CPU_STATE_NS = {"adamw": 0.0, "adamw_bf16": 11.0, "adamw_8bit": 16.0}
CPU_NORM_NS = 4.4
"""Nanoseconds of one core for an element (AMD EPYC, tensors of 33 M elements): `CompactAdamW`'s arithmetic, more for a bf16 weight
(rounded stochastically), more for small states; and for the gradient norm in fp64 with the clipping."""

FUSED_BYTES = 28.0
"""Traffic of torch's fused AdamW in fp32 for an element: weight and two moments read and written, the gradient read. A core keeps up with it."""


def offloads(workload: Workload, machine: Machine) -> bool:
    """Whether anything crosses: on a CPU host memory is where all lies anyway."""
    return workload.offload != "none" and machine.gpu.name != "cpu"


def pcie_bytes(workload: Workload, gathers: int) -> float:
    """Bytes of one micro-batch over PCIe, behind the computation where that is long enough.

    Before each of a layer's `gathers` its shard is copied to the GPU: FSDP2 copies the resting type, and casts there. ZeRO-3 adds gradients
    up on the GPU, in fp32: the sum goes there and back. FSDP2's first gradients of a step are copied beside the backward pass.
    """
    elements, zero3 = workload.trained_shard, workload.sharding == "zero3"
    gradients = 8.0 * elements if zero3 else 0.0
    if workload.offload != "params":
        return gradients
    weights = elements * float(workload.compute_bytes if zero3 else workload.weight_bytes) + frozen_bytes(workload)
    return gathers * weights + (gradients or elements * float(workload.gradient_bytes) / workload.micro_batches)


def waiting_seconds(workload: Workload) -> float:
    """Seconds of one micro-batch in which the worker waits for host memory: FSDP2 copies a further gradient to it and adds it there, one
    after the other, before it goes on with the backward pass."""
    if workload.sharding == "zero3" or workload.offload != "params":
        return 0.0
    size = workload.trained_shard * float(workload.gradient_bytes)
    return (1 - 1 / workload.micro_batches) * size * (1 / PAGEABLE_BYTES_PER_S + 3 / HOST_BYTES_PER_S)


def cpu_step_seconds(workload: Workload, cores: int = CPUS_PER_GPU) -> float:
    """An optimizer step on `cores` cores: norm and clipping of the gradients, AdamW, and with ZeRO-3 the masters' copy in the computing type."""
    elements, zero3 = workload.trained_shard, workload.sharding == "zero3"
    if zero3 or (workload.optimizer == "adamw" and workload.weight_bytes == 4):
        update = FUSED_BYTES / min(HOST_BYTES_PER_S, cores * 4 * CORE_BYTES_PER_S)
    else:
        each = CPU_STEP_NS + (CPU_WEIGHT_NS if workload.weight_bytes == 2 else 0.0) + CPU_STATE_NS[workload.optimizer]
        update = each * 1e-9 / min(float(cores), HOST_BYTES_PER_S / CORE_BYTES_PER_S)
    written = (4.0 + workload.compute_bytes) / HOST_BYTES_PER_S if zero3 else 0.0
    return elements * (CPU_NORM_NS * 1e-9 / cores + update + written)
