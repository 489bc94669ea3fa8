"""What watching costs: training speed with every tracker on, in turns with none, on the same worker. Promised: 0.98 of the speed.

usage: python tests/benchmarks/watching.py [sqlite] [down] [slow] [pairs, default 8]

A worker process trains a small model on one core and sends its records to the watch in this process, as workers of a run do
to the driver. Stretches of `STRETCH_S` seconds alternate between on (journal, console, MLflow, TensorBoard, worker metrics, costs)
and off, which begins when MLflow has what it was sent; each pair yields a ratio of their speeds. `down` is a tracking server
that refuses, `slow` one that takes 5 s for each answer. The share of a core is what the watch took in the driver. Steps take about
as long as those of the default run on CPUs; a large model's take seconds, and watching costs by the step.
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

STRETCH_S = 6.0
MODES = ("sqlite", "down", "slow")


def work(pipe: Any) -> None:
    """The worker: for each (on, first step) trains for a stretch and answers with (steps, its seconds, its CPU seconds)."""
    import torch

    from raytune70b.tracking.metrics import WorkerMetrics

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)], torch.nn.Linear(512, 1000))
    optimizer = torch.optim.AdamW(model.parameters())
    data, target = torch.randn(512, 512), torch.randint(1000, (512,))
    metrics = WorkerMetrics("bench", 0, "here", torch.device("cpu"), lambda record: pipe.send(record), sample_s=2.0)
    while (order := pipe.recv()) is not None:
        on, step = order
        first, begin, spent = step, time.perf_counter(), time.process_time()
        while time.perf_counter() - begin < STRETCH_S:
            started = time.perf_counter()
            loss = torch.nn.functional.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            value, seconds = loss.item(), time.perf_counter() - started
            if on:
                metrics.step(step, seconds, {"forward_backward": seconds})
                pipe.send({"kind": "step", "step": step, "loss": value, "grad_norm": 1.0, "learning_rate": 1e-3, "trained_tokens": 512, "tokens": 512,
                           "seconds": seconds, "seconds_by": {"forward_backward": seconds}, "world_size": 1, "skipped": False})  # fmt: skip
            step += 1
        pipe.send((step - first, time.perf_counter() - begin, time.process_time() - spent))
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


def settle(watch: Any, seconds: float = 10.0) -> None:
    """Waits until MLflow has what it was sent, where it can be reached."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and watch._mlflow._points and watch._mlflow._trouble is None:
        time.sleep(0.1)


def measure(mode: str, pairs: int, folder: str) -> dict[str, Any]:
    """Runs the pairs; returns the ratios (steps/s of on by those of off), the same by the worker's processor time, which other work on the
    machine does not disturb, seconds of a step, and the share of a core that watching took in the driver."""
    from raytune70b.config import compose
    from raytune70b.storage import Folder
    from raytune70b.tracking.watch import Watch

    uri = slow_server() if mode == "slow" else {"sqlite": "sqlite", "down": "http://127.0.0.1:9"}[mode]
    config = compose([f"run.path={folder}", f"tracking.mlflow={uri}", "tracking.tensorboard=true", "budget.usd=100", "budget.price_per_gpu_hour=2", "tracking.close_timeout_s=5"])
    watch = Watch(config, Folder(folder) / "bench", 1, 10**6)
    watch.record({"kind": "run_start", "total_steps": 10**6})
    watch.record({"kind": "group_start", "attempt": 1, "world_size": 1, "hosts": ["here"]})
    watch.record({"kind": "group_ready", "attempt": 1, "world_size": 1, "resumed_step": 0})
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(theirs,))
    worker.start()
    step, ratios, cpu_ratios, times, shares = 1, [], [], [], []
    for pair in range(pairs + 1):  # the first one warms up: MLflow is imported, its database made
        rates, cpu_rates = {}, {}
        for on in (True, False) if pair % 2 else (False, True):
            settle(watch)
            ours.send((on, step))
            spent = time.process_time()
            while not isinstance(answer := ours.recv(), tuple):
                watch.record(answer)
            steps, seconds, cpu = answer
            rates[on], cpu_rates[on] = steps / seconds, steps / cpu
            step += steps if on else 0
            if on and pair:
                times.append(seconds / steps)
                shares.append((time.process_time() - spent) / seconds)
        if pair:
            ratios.append(rates[True] / rates[False])
            cpu_ratios.append(cpu_rates[True] / cpu_rates[False])
    ours.send(None)
    worker.join()
    watch.close("finished")
    return {"ratios": ratios, "cpu_ratios": cpu_ratios, "step_s": statistics.median(times), "share_of_a_core": statistics.median(shares)}


def main() -> int:
    modes = [a for a in sys.argv[1:] if not a.isdigit()] or list(MODES)
    pairs = next((int(a) for a in sys.argv[1:] if a.isdigit()), 8)
    found, rows = {}, []
    for mode in modes:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, open(os.devnull, "w") as nowhere:
            shown, sys.stdout = sys.stdout, nowhere
            try:
                one = measure(mode, pairs, folder)
            finally:
                sys.stdout = shown
        spread = {k: f"{statistics.median(one[k]):.3f} ({min(one[k]):.3f}-{max(one[k]):.3f})" for k in ("ratios", "cpu_ratios")}
        rows.append((mode, spread["ratios"], spread["cpu_ratios"], f"{1e3 * one['step_s']:.1f}", f"{one['share_of_a_core']:.1%}"))
        found[mode] = {"ratio": statistics.median(one["ratios"]), "worker_cpu_ratio": statistics.median(one["cpu_ratios"]), **one}
    print(f"speed with everything on by that with everything off, median (least to most) of {pairs} pairs of {STRETCH_S:.0f} s\n")
    head = ("tracking server", "speed", "by the worker's CPU time", "ms a step", "share of a core in the driver")
    print("\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)))
    print(json.dumps(found))
    return 0 if all(f["ratio"] >= 0.98 for f in found.values()) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    raise SystemExit(main())
