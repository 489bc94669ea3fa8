"""What one worker reports about itself: step times by part, memory, its GPU, and how fast it is beside the others.

The training loop calls `WorkerMetrics.step` once a step, which adds a few numbers (about a microsecond). A thread reads memory
and NVML every `SAMPLE_S`, sets the Prometheus gauges and hands a `worker` record on. Only the probe runs in the loop: the
same small computation on every worker, `PROBE_EVERY_S` apart, about 10 ms each, not in a group's first steps, when machines
are busy with starting. In synchronous training all workers show the same step time, so the slow one can only be told by
what it does alone.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import ray
import torch

from raytune70b.tracking.gauges import WORKER, Gauges
from raytune70b.tracking.journal import Record

SAMPLE_S = 5.0
RECORD_S = 60.0
"""Seconds between two records of a worker in a long run: 16 workers would else fill most of the journal. They begin as frequent as samples."""
PROBE_EVERY_S = 60.0
FIRST_PROBE_STEP = 10
"""Of the worker group."""
PROBE_SIZE = {"cuda": 4096, "cpu": 256}
PROBE_REPEATS = {"cuda": 8, "cpu": 4}


class WorkerMetrics:
    """Measures one worker. `send` takes `worker` records ({kind, rank, host, step, ...}) from a thread; it must not block long."""

    def __init__(self, run: str, rank: int, host: str, device: torch.device, send: Callable[[Record], None], sample_s: float = SAMPLE_S):
        self._rank, self._host, self._device, self._send, self._sample_s = rank, host, device, send, sample_s
        self._gauges = Gauges(WORKER, run)
        self._gpu = Gpu(device) if device.type == "cuda" else None
        self._process = psutil.Process()
        self._lock = threading.Lock()
        self._step = self._count = self._steps = self._probes = 0
        self._sums: dict[str, float] = {}
        self._probe_s: float | None = None
        self._next_probe = 0.0
        self._begin = self._sent = time.monotonic()
        self._told_probes = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="worker-metrics", daemon=True)
        self._thread.start()

    def step(self, step: int, seconds: float, seconds_by: dict[str, float]) -> None:
        """Counts a finished step with this worker's own times."""
        with self._lock:
            self._step = step
            self._count += 1
            self._steps += 1
            self._sums["step"] = self._sums.get("step", 0.0) + seconds
            for part, value in seconds_by.items():
                self._sums[part] = self._sums.get(part, 0.0) + value
        if self._steps >= FIRST_PROBE_STEP and time.monotonic() >= self._next_probe:
            self._probe_s = probe(self._device)
            self._probes += 1
            self._next_probe = time.monotonic() + PROBE_EVERY_S

    def close(self) -> None:
        """Sends a last sample and ends the thread."""
        self._closing.set()
        self._thread.join(2.0)
        self._gauges.close()
        if self._gpu is not None:
            self._gpu.close()

    def sample(self, begin_anew: bool = True) -> Record:
        """A `worker` record of the time since the last one; without `begin_anew` the next one is of that time too."""
        with self._lock:
            step, count, sums = self._step, self._count, dict(self._sums)
            if begin_anew:
                self._count, self._sums = 0, {}
        means = {f"{part}_seconds": total / count for part, total in sums.items()} if count else {}
        record: Record = {"kind": "worker", "time": time.time(), "rank": self._rank, "host": self._host, "step": step, **means}
        record |= memory(self._device, self._process) | (self._gpu.read() if self._gpu is not None else {})
        return record | ({"probe_seconds": self._probe_s, "probe": self._probes} if self._probe_s is not None else {})

    def _loop(self) -> None:
        while not self._closing.wait(self._sample_s):
            self._publish(self._due())
        self._publish(True)

    def _due(self) -> bool:
        """Whether a record goes to the driver: about twenty in the time since the start, at least one a minute, and each new probe."""
        now = time.monotonic()
        return self._probes > self._told_probes or now - self._sent >= min(RECORD_S, (now - self._begin) / 20)

    def _publish(self, due: bool) -> None:
        with contextlib.suppress(Exception):  # a worker that cannot report trains on; the driver sees the silence
            record = self.sample(begin_anew=due)
            if record["step"]:
                if due:
                    self._send(record)
                    self._sent, self._told_probes = time.monotonic(), record.get("probe", 0)
                if ray.is_initialized():
                    set_gauges(self._gauges, record)


def set_gauges(gauges: Gauges, record: Record) -> None:
    """A worker record as Prometheus gauges."""
    rank = str(record["rank"])
    for name, field in (
        ("worker_step", "step"), ("worker_step_seconds", "step_seconds"), ("worker_memory_allocated_bytes", "memory_allocated"),
        ("worker_memory_reserved_bytes", "memory_reserved"), ("worker_probe_seconds", "probe_seconds"), ("gpu_use_ratio", "gpu_use"),
        ("gpu_power_watts", "power_w"), ("gpu_temperature_celsius", "temperature_c"),
    ):  # fmt: skip
        gauges.set(name, record.get(field), rank=rank)
    for field, value in record.items():
        if field.endswith("_seconds") and field not in ("step_seconds", "probe_seconds"):
            gauges.set("worker_part_seconds", value, rank=rank, part=field.removesuffix("_seconds"))


def memory(device: torch.device, process: psutil.Process) -> dict[str, float]:
    """memory_allocated and memory_reserved in bytes: the GPU's, or without one the process's resident memory now and at most."""
    if device.type == "cuda":
        return {"memory_allocated": torch.cuda.max_memory_allocated(device), "memory_reserved": torch.cuda.memory_reserved(device)}
    now = process.memory_info().rss
    import resource

    return {"memory_allocated": now, "memory_reserved": max(now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)}


def probe(device: torch.device) -> float:
    """Seconds of a fixed chain of matrix products on the device; the best of three on a CPU, which others use too."""
    size, repeats = PROBE_SIZE[device.type], PROBE_REPEATS[device.type]
    matrix = torch.full((size, size), 1.0 / size, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    times = []
    for _ in range(3):
        _synchronize(device)
        begin = time.perf_counter()
        product = matrix
        for _ in range(repeats):
            product = product @ matrix
        _synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Gpu:
    """NVML's readings of one CUDA device; {} where NVML is not installed or refuses."""

    def __init__(self, device: torch.device):
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID((uuid if uuid.startswith("GPU-") else f"GPU-{uuid}").encode())
            self._nvml = pynvml
        except Exception:  # no package, no driver, no permission: GPUs are silent then
            self._nvml = None

    def read(self) -> dict[str, float]:
        """gpu_use (0 to 1), power_w, temperature_c, as far as the driver tells them."""
        n, handle = self._nvml, self._handle
        if n is None:
            return {}
        readings: dict[str, Callable[[], float]] = {
            "gpu_use": lambda: n.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "power_w": lambda: n.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature_c": lambda: n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU),
        }
        values: dict[str, float] = {}
        for name, read in readings.items():
            with contextlib.suppress(n.NVMLError):
                values[name] = float(read())
        return values

    def close(self) -> None:
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
            self._nvml = None
