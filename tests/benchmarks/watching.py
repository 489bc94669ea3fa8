"""What watching costs: training speed with every tracker on, in turns with none, on the same worker.

    python tests/benchmarks/watching.py [sqlite|down|slow] [pairs]

A worker process trains a small model on one core and sends its records to the watch in this process, as workers of a run do
to the driver. Segments of `STEPS` steps alternate between on (journal, console, MLflow, TensorBoard, worker metrics, costs) and off,
and each pair yields a ratio of their times; printed are the median ratio and the processor time that watching took. `down`
is a tracking server that refuses, `slow` one that takes 5 s for each answer.
"""

from __future__ import annotations

import http.server
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

STEPS = 12


def work(pipe: Any) -> None:
    """The worker: for each (on, first step) trains a segment and answers with its seconds."""
    import torch

    from raytune70b.tracking.metrics import WorkerMetrics

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)], torch.nn.Linear(512, 1000))
    optimizer = torch.optim.AdamW(model.parameters())
    data, target = torch.randn(128, 512), torch.randint(1000, (128,))
    metrics = WorkerMetrics("bench", 0, "here", torch.device("cpu"), lambda record: pipe.send(record), sample_s=2.0)
    while (order := pipe.recv()) is not None:
        on, first = order
        begin, spent = time.perf_counter(), time.process_time()
        for step in range(first, first + STEPS):
            started = time.perf_counter()
            loss = torch.nn.functional.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - started
            if on:
                metrics.step(step, seconds, {"forward_backward": seconds})
                pipe.send({"kind": "step", "step": step, "loss": loss.item(), "grad_norm": 1.0, "learning_rate": 1e-3, "trained_tokens": 128, "tokens": 128,
                           "seconds": seconds, "seconds_by": {"forward_backward": seconds}, "world_size": 1, "skipped": False})  # fmt: skip
        pipe.send((on, time.perf_counter() - begin, time.process_time() - spent))
    metrics.close()


def slow_server() -> str:
    """The address of a server that answers nothing but errors, each after 5 s."""

    class Slow(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(5)
            self.send_error(503)

        do_POST = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


def measure(mode: str, pairs: int, folder: str) -> dict[str, float]:
    """Runs the pairs; returns ratio (off / on time: the tokens/s of on by that of off), the same of the worker's processor time (which other
    work on the machine does not disturb), seconds of a step, and the share of a core that watching took in the driver."""
    from raytune70b.config import compose
    from raytune70b.storage import Folder
    from raytune70b.tracking.watch import Watch

    uri = {"sqlite": "sqlite", "down": "http://127.0.0.1:9", "slow": slow_server()}[mode]
    config = compose([f"run.path={folder}", f"tracking.mlflow={uri}", "tracking.tensorboard=true", "budget.usd=100", "budget.price_per_gpu_hour=2", "tracking.close_timeout_s=5"])
    watch = Watch(config, Folder(folder) / "bench", 1, 10**6)
    watch.record({"kind": "run_start", "total_steps": 10**6})
    watch.record({"kind": "group_start", "attempt": 1, "world_size": 1, "hosts": ["here"]})
    watch.record({"kind": "group_ready", "attempt": 1, "world_size": 1, "resumed_step": 0})
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(theirs,))
    worker.start()
    step, ratios, cpu_ratios, times, cpu = 1, [], [], [], 0.0
    for pair in range(pairs + 3):  # the first ones warm up: MLflow is imported, its database made
        seconds, work_cpu = {}, {}
        for on in (True, False) if pair % 2 else (False, True):
            ours.send((on, step))
            spent = time.process_time()
            while not isinstance(answer := ours.recv(), tuple):
                watch.record(answer)
            seconds[on], work_cpu[on] = answer[1:]
            cpu += (time.process_time() - spent) if on and pair >= 3 else 0.0
            step += STEPS if on else 0
        if pair >= 3:
            ratios.append(seconds[False] / seconds[True])
            cpu_ratios.append(work_cpu[False] / work_cpu[True])
            times.append(seconds[True])
    ours.send(None)
    worker.join()
    watch.close("finished")
    return {"ratio": statistics.median(ratios), "worker_cpu_ratio": statistics.median(cpu_ratios), "step_s": statistics.median(times) / STEPS, "share_of_a_core": cpu / sum(times)}


def main() -> int:
    modes = [a for a in sys.argv[1:] if not a.isdigit()] or ["sqlite", "down", "slow"]
    pairs = next((int(a) for a in sys.argv[1:] if a.isdigit()), 40)
    found = {}
    for mode in modes:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, open(os.devnull, "w") as nowhere:
            shown, sys.stdout = sys.stdout, nowhere
            try:
                found[mode] = measure(mode, pairs, folder)
            finally:
                sys.stdout = shown
        print(json.dumps({mode: found[mode]}), flush=True)
    return 0 if all(f["ratio"] >= 0.98 for f in found.values()) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    raise SystemExit(main())
