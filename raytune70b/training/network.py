"""Which network interface the workers' gloo groups use: that of the node's address in the Ray cluster.

Left alone, gloo resolves the host's own name, which on Debian and Ubuntu is 127.0.1.1: workers on other nodes cannot connect to
that. Whoever sets GLOO_SOCKET_IFNAME knows better.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend


def interface_of(address: str, interfaces: Mapping[str, Sequence[Any]]) -> str | None:
    """The name of the interface with this address, out of `psutil.net_if_addrs()`; None where no interface has it."""
    return next((name for name, addresses in interfaces.items() if any(a.address == address for a in addresses)), None)


def bind_gloo() -> None:
    """Runs in each worker before its process group is made."""
    name = interface_of(ray.util.get_node_ip_address(), psutil.net_if_addrs())
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


class BoundTorchBackend(_TorchBackend):
    """Ray Train's own start of the process group, on the interface that the nodes know each other by."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(bind_gloo)
        super().on_start(worker_group, backend_config)


@dataclass
class BoundTorchConfig(TorchConfig):
    """Ray Train's TorchConfig with that backend."""

    @property
    def backend_cls(self) -> type:
        return BoundTorchBackend
