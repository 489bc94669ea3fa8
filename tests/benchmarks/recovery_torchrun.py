"""Another side of recovery.py: torchrun's elastic agent, two agents of two workers (`--nnodes 1:2`), the same model and pace.

It does what torchrun's guide shows: the script loads the newest snapshot when it starts, rank 0 writes one every ten steps.
Run by torchrun itself, `recovery_torchrun.py FOLDER` is that script.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

PACE_S = 0.1


class Agents:
    """Two torchrun agents as two nodes."""

    def __init__(self, folder: Path):
        self._folder = folder
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self._port = s.getsockname()[1]
        self._agents = [self._start(0), self._start(1)]

    def _start(self, number: int) -> subprocess.Popen:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=100", "--rdzv-backend=c10d",
                   f"--rdzv-endpoint=127.0.0.1:{self._port}", "--rdzv-id=recovery", f"--rdzv-conf=is_host={int(number == 0)},last_call_timeout=2",
                   "--local-addr=127.0.0.1", __file__, str(self._folder)]  # fmt: skip
        # an agent that shares its store publishes the address in its first round only, so in torch 2.13 one that joins waits for it in vain
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self._folder / f"agent{number}-{time.time_ns()}.txt").open("w") as sink:
            return subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True, env=environment)

    def lose(self) -> None:
        """SIGKILL of the second agent and its workers."""
        agent = self._agents.pop()
        for process in [*psutil.Process(agent.pid).children(recursive=True), psutil.Process(agent.pid)]:
            process.kill()
        agent.wait()

    def join(self) -> None:
        self._agents.append(self._start(1))

    def close(self) -> None:
        for agent in self._agents:
            for process in psutil.Process(agent.pid).children(recursive=True):
                process.kill()
            agent.send_signal(signal.SIGKILL)
            agent.wait()


def train(folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from transformers import LlamaConfig, LlamaForCausalLM

    dist.init_process_group("gloo")
    shape = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=64)
    bare = LlamaForCausalLM(shape)
    model, snapshot, step = DistributedDataParallel(bare), folder / "snapshot.pt", 0
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3)
    if snapshot.exists():
        state = torch.load(snapshot, weights_only=True)
        bare.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while True:
        ids = torch.randint(1, 64, (4, 16))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        time.sleep(PACE_S)
        if dist.get_rank() == 0:
            with (folder / "steps.jsonl").open("a") as log:
                log.write(json.dumps({"step": step, "time": time.time(), "world_size": dist.get_world_size(), "pid": os.getpid()}) + "\n")
            if step % 10 == 0:
                torch.save({"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, folder / "new.pt")
                (folder / "new.pt").replace(snapshot)


if __name__ == "__main__":
    train(Path(sys.argv[1]))
