"""A Ray cluster of several nodes on this machine, real runs of jobs/finetune.py on it, and the means to hurt them.

Each node has room for two workers of 1.5 CPUs, and one CPU left for reading data. The head has no CPUs, so that every
worker's node can be taken away.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from raytune70b.tracking.journal import lineage, parse_journal

ROOT = Path(__file__).resolve().parents[2]
TINY = ("model.config.hidden_size=16", "model.config.intermediate_size=32", "model.config.num_hidden_layers=1", "model.config.num_attention_heads=2",
        "model.config.num_key_value_heads=1", "model.precision=fp32")  # fmt: skip

Record = dict[str, Any]


class Fleet:
    """The cluster; nodes come and go by `grow` and `lose`."""

    def __init__(self) -> None:
        os.environ["RAY_AUTH_MODE"] = "disabled"
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.nodes: list[Any] = []

    @property
    def address(self) -> str:
        return self.cluster.address

    def size(self, nodes: int) -> None:
        """Brings the cluster to so many nodes."""
        while len(self.nodes) < nodes:
            self.nodes.append(self.cluster.add_node(num_cpus=4, wait=True))
        while len(self.nodes) > nodes:
            self.lose(self.nodes[-1].node_id)

    def lose(self, node_id: str) -> None:
        """Kills a node's raylet and workers with SIGKILL."""
        node = next(n for n in self.nodes if n.node_id == node_id)
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def preempt(self, node_id: str, deadline_s: int) -> None:
        """The notice that a cloud gives before it takes a node back."""
        command = [Path(sys.executable).parent / "ray", "drain-node", "--address", self.address, "--node-id", node_id, "--reason",
                   "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test", "--deadline-remaining-seconds", str(deadline_s)]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)

    def close(self) -> None:
        self.cluster.shutdown()


@dataclass
class Launch:
    """One start of the driver."""

    process: subprocess.Popen
    folder: Path
    output: Path
    begin: float = field(default_factory=time.time)

    def records(self) -> list[Record]:
        journal = self.folder / "journal.jsonl"
        return parse_journal(journal.read_bytes()) if journal.exists() else []

    def until(self, found: Callable[[list[Record]], Any], timeout_s: float = 120.0) -> Any:
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
        raise AssertionError(f"did not come about in {timeout_s} s (exit code {self.process.poll()}):\n{self.output.read_text()[-3000:]}")

    def until_step(self, step: int, timeout_s: float = 120.0) -> None:
        self.until(lambda records: any(r["kind"] == "step" and r["step"] >= step for r in records), timeout_s)

    def workers(self) -> list[Record]:
        """[{rank, host, pid, node}] of the newest worker group."""
        return self.until(lambda records: [r["workers"] for r in records if r["kind"] == "group_start"])[-1]

    def end(self, timeout_s: float = 180.0) -> int:
        """The exit code, when the run has ended by itself."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            raise AssertionError(f"the run did not end in {timeout_s} s:\n{self.output.read_text()[-3000:]}") from None


def launch(name: str, *settings: str, runs: Path, data: Path, address: str, environment: dict[str, str] | None = None) -> Launch:
    """Starts jobs/finetune.py as its own process."""
    output = runs / f"{name}-{time.time_ns()}.txt"
    runs.mkdir(exist_ok=True, parents=True)
    command = [sys.executable, str(ROOT / "jobs/finetune.py"), f"run.name={name}", f"run.path={runs}", f"data.path={data}", f"cluster.address={address}",
               "cluster.cpus_per_worker=1.5", *TINY, *settings]  # fmt: skip
    with output.open("w") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}, cwd=ROOT)
    return Launch(process, runs / name, output)


def pause(records: list[Record], when: float) -> float:
    """Seconds from `when` (unix) to the first step that a later worker group finished."""
    started = next(r["time"] for r in records if r["kind"] == "group_start" and r["time"] > when)
    return next(r["time"] for r in records if r["kind"] == "step" and r["time"] > started) - when


def losses(folder: Path) -> dict[int, float]:
    """The loss of every step of the committed lineage."""
    return {r["step"]: r["loss"] for r in lineage(parse_journal((folder / "journal.jsonl").read_bytes()), "step")}


def steps(records: list[Record]) -> list[int]:
    return [r["step"] for r in records if r["kind"] == "step"]


def to_json(value: Any) -> str:
    return json.dumps(value)
