"""GPUs and machines: figures that come from dated input files, never from code.

`gpus.csv` holds one GPU a row with its source; `conf/hardware/*.yaml` names one and says how many, and may correct the
network, the host memory and the disk. All figures here are SI: bytes, bytes/s, FLOP/s.
"""

from __future__ import annotations

import csv
import difflib
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from raytune70b import schema
from raytune70b.config import UserError

GPUS = Path(__file__).with_name("gpus.csv")
GIB = 2**30

USABLE_MEMORY = 0.985
"""Share of the advertised memory, read as GiB, that a process can allocate: torch reports 79.1 GiB of an "80 GB" H100 and A100,
139.8 of "141 GB" H200, 23.6 of "24 GB" RTX 4090; the rest is the driver's and the error correction's."""


CPUS_PER_GPU = 12
"""Cores that a worker of a full machine has for offloaded states: 8-GPU machines of this class have 96 to 128, as two sockets of 48 to 64."""


class HardwareError(UserError):
    """A machine that does not exist."""


@dataclass(frozen=True)
class Gpu:
    """One accelerator. Link figures are bytes/s in one direction."""

    name: str
    memory: float
    memory_bandwidth: float
    peak_flops: float
    sustained_flops: float
    fp8_sustained_flops: float
    flash_attention_share: float
    nvlink: float
    nvlink_gpus: int
    pcie: float
    network: float
    source: str


@dataclass(frozen=True)
class Machine:
    """`nodes` machines of `gpus_per_node` GPUs. `network`: bytes/s per GPU and direction between machines."""

    gpu: Gpu
    nodes: int
    gpus_per_node: int
    network: float
    host_memory: float
    disk: float
    storage_bandwidth: float

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def node_link(self) -> float:
        """Bytes/s per GPU and direction inside a machine: NVLink where it joins all GPUs, else the slower PCIe hops bound the ring."""
        if self.gpus_per_node == 1:
            return self.gpu.memory_bandwidth
        return self.gpu.nvlink if self.gpu.nvlink_gpus >= self.gpus_per_node else self.gpu.pcie


@cache
def gpus() -> dict[str, Gpu]:
    """Every GPU of gpus.csv by its name and by its aliases."""
    found: dict[str, Gpu] = {}
    with GPUS.open(newline="") as file:
        for row in csv.DictReader(file):
            gpu = _gpu(row)
            found.update({name: gpu for name in [row["gpu"], *row["aliases"].split()]})
    return found


def _gpu(row: dict[str, str]) -> Gpu:
    peak = float(row["bf16_dense_tflops"]) * 1e12
    return Gpu(
        name=row["gpu"],
        memory=float(row["hbm_gb"]) * GIB * USABLE_MEMORY,
        memory_bandwidth=float(row["hbm_tb_s"]) * 1e12,
        peak_flops=peak,
        sustained_flops=float(row["bf16_sustained_tflops"]) * 1e12,
        fp8_sustained_flops=float(row["fp8_sustained_tflops"] or 0) * 1e12,
        flash_attention_share=float(row["flash_attention_share"]),
        nvlink=float(row["nvlink_gb_s"]) * 1e9 / 2,  # data sheets add both directions
        nvlink_gpus=int(row["nvlink_gpus"]),
        pcie=float(row["pcie_gb_s"]) * 1e9,
        network=float(row["network_gbit_s_per_gpu"]) * 1e9 / 8,
        source=row["source"],
    )


def find_gpu(name: str) -> Gpu:
    """The GPU of that name. Raises HardwareError with the nearest name."""
    if name == "cpu":
        return _this_machine()
    if name not in gpus():
        near = difflib.get_close_matches(name, gpus(), 1, cutoff=0.3)
        raise HardwareError(
            f"hardware.gpu: is {name!r}, which {GPUS.name} does not hold; did you mean {near[0] if near else 'H100-SXM-80GB'}?"
        )
    return gpus()[name]


def _this_machine() -> Gpu:
    """One worker's share of this host, so that a tiny run can be planned too: an order of magnitude, not a measurement."""
    cores = os.cpu_count() or 1
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return Gpu(
        name="cpu",
        memory=memory,
        memory_bandwidth=10e9 * cores,
        peak_flops=5e10 * cores,
        sustained_flops=2e10 * cores,
        fp8_sustained_flops=0.0,
        flash_attention_share=0.2,
        nvlink=0.0,
        nvlink_gpus=0,
        pcie=5e9,
        network=1e9,
        source="this host, roughly",
    )


def machine(hardware: schema.Hardware) -> Machine:
    """The machines of a configuration. Raises HardwareError for an unknown GPU."""
    gpu = find_gpu(hardware.gpu)
    if gpu.name == "cpu":  # the workers share one host's memory
        gpu = Gpu(**{**gpu.__dict__, "memory": gpu.memory / hardware.gpus_per_node})
    gbit = hardware.network_gbit_s_per_gpu
    return Machine(
        gpu=gpu,
        nodes=hardware.nodes,
        gpus_per_node=hardware.gpus_per_node,
        network=gpu.network if gbit is None else gbit * 1e9 / 8,
        host_memory=hardware.host_memory_gb * 1e9,
        disk=hardware.disk_gb * 1e9,
        storage_bandwidth=hardware.storage_gb_s * 1e9,
    )
