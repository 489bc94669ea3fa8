"""A Ray cluster of several nodes on this machine, real runs of jobs/finetune.py on it, and the means to hurt them.

A node has room for two workers of 1.5 CPUs and one CPU left to read data. The head has no CPUs, so that every worker's node
can be taken away.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from raytune70b.storage import Folder
from raytune70b.tracking.journal import read_journal

ROOT = Path(__file__).resolve().parents[2]
MODEL = ("model.config.hidden_size=16", "model.config.intermediate_size=32", "model.config.num_hidden_layers=1", "model.config.num_attention_heads=2",
         "model.config.num_key_value_heads=1", "model.precision=fp32")  # fmt: skip
PATIENCE_S = 240.0
"""How long a test waits for what takes seconds on a quiet machine."""

Record = dict[str, Any]


class Fleet:
    """The cluster, and the file that tells its workers how to misbehave. Nodes come and go by `size`, `join` and `lose`."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None):
        self.faults = folder / "faults.json"
        self.misbehave()
        self._environment = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0", "FAULTS_FILE": str(self.faults), "PYTHONPATH": f"{Path(__file__).parent / 'injected'}{os.pathsep}{ROOT}", **(environment or {})}
        self._before = {name: os.environ.get(name) for name in self._environment}
        os.environ.update(self._environment)  # the nodes' processes inherit it
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.nodes: list[Any] = []
        self._noticed: set[str] = set()

    def misbehave(self, **faults: Any) -> None:
        """What the workers do from their next step on; see injected/sitecustomize.py."""
        new = self.faults.with_suffix(".new")
        new.write_text(json.dumps(faults))
        new.replace(self.faults)

    def join(self, cpus: int = 4) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=cpus, wait=True))

    def size(self, nodes: int) -> None:
        """Brings the cluster to so many nodes of two workers; what is not like that, or has had its notice, goes."""
        for node in sorted(self.nodes, key=lambda node: node.node_id not in self._noticed):
            if node._ray_params.num_cpus != 4 or node.node_id in self._noticed or len(self.nodes) > nodes:
                self.lose(node.node_id)
        while len(self.nodes) < nodes:
            self.join()

    def lose(self, node_id: str) -> None:
        """Kills a node's raylet and workers with SIGKILL."""
        node = next(n for n in self.nodes if n.node_id == node_id)
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def preempt(self, node_id: str, deadline_s: int) -> None:
        """The notice that a cloud gives before it takes a node back."""
        command = [Path(sys.executable).parent / "ray", "drain-node", "--address", self.cluster.address, "--node-id", node_id, "--reason",
                   "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test", "--deadline-remaining-seconds", str(deadline_s)]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)
        self._noticed.add(node_id)

    def start(self, name: str, runs: Path | str, data: Path | str, outputs: Path, *settings: str) -> Launch:
        """Starts jobs/finetune.py as its own process."""
        output = outputs / f"{name}-{time.time_ns()}.txt"
        command = [sys.executable, str(ROOT / "jobs/finetune.py"), f"run.name={name}", f"run.path={runs}", f"data.path={data}",
                   f"cluster.address={self.cluster.address}", "cluster.cpus_per_worker=1.5", *MODEL, *settings]  # fmt: skip
        with output.open("w") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, cwd=ROOT)
        return Launch(process, Folder(runs) / name, output)

    def close(self) -> None:
        self.cluster.shutdown()
        for name, value in self._before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@dataclass
class Launch:
    """One start of the driver."""

    process: subprocess.Popen
    folder: Folder
    output: Path

    def records(self, kind: str | None = None) -> list[Record]:
        return [r for r in read_journal(self.folder) if kind in (None, r["kind"])]

    def until(self, found: Callable[[list[Record]], Any], timeout_s: float = PATIENCE_S) -> Any:
        """Waits for `found(records)` to be true, and returns it. Fails when the driver ends before."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            ended = self.process.poll() is not None
            value = found(self.records())
            if value:
                return value
            if ended:
                break
            time.sleep(0.05)
        raise AssertionError(f"did not come about in {timeout_s} s (exit code {self.process.poll()}):\n{self.text()[-3000:]}")

    def until_steps(self, more: int) -> None:
        """Waits for so many more steps."""
        seen = len(self.records("step"))
        self.until(lambda records: sum(r["kind"] == "step" for r in records) >= seen + more)

    def until_world(self, size: int, since: float = 0.0) -> float:
        """Waits for a step of a group of so many workers that started after `since`; returns the step's time."""
        found = self.until(lambda records: [r for r in records if r["kind"] == "step" and r["world_size"] == size and r["time"] > started(records, since)])
        return found[0]["time"]

    def workers(self) -> list[Record]:
        """[{rank, host, pid, node}] of the newest worker group."""
        return self.until(lambda records: [r["workers"] for r in records if r["kind"] == "group_start"])[-1]

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit code, when the run has ended by itself."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end in {timeout_s} s:\n{self.text()[-3000:]}") from None
        finally:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGKILL)

    def stop(self) -> None:
        """Ends what still runs, in good order if it can be: a killed driver's reservation holds the machines for three minutes."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def text(self) -> str:
        return self.output.read_text()


def started(records: list[Record], since: float) -> float:
    """When the first worker group after `since` started; infinity while none has."""
    return next((r["time"] for r in records if r["kind"] == "group_start" and r["time"] > since), float("inf"))
