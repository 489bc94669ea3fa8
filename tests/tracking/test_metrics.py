import itertools
import math
import sys
import time
import types

import numpy as np
import pytest
import torch

from raytune70b.tracking import metrics
from raytune70b.tracking.metrics import WorkerMetrics, memory, probe

CPU = torch.device("cpu")


@pytest.fixture
def no_gauges(monkeypatch):
    """Records what would be shown to Prometheus: these tests start no Ray."""
    shown = {}
    monkeypatch.setattr(metrics.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(metrics.Gauges, "set", lambda self, name, value, **labels: shown.update({(name, *labels.values()): value}))
    return shown


def test_a_sample_holds_the_means_since_the_last_one(no_gauges):
    sent = []
    worker = WorkerMetrics("r", 3, "host", CPU, sent.append, sample_s=1000)
    for step in range(1, metrics.FIRST_PROBE_STEP):
        worker.step(step, 1.0, {})
    assert "probe_seconds" not in worker.sample(), "the first steps are no measure"
    last = metrics.FIRST_PROBE_STEP + 1
    for step, seconds in ((last - 1, 1.0), (last, 2.0)):
        worker.step(step, seconds, {"data": 0.1 * seconds, "optimizer": 0.2})
    record = worker.sample()
    assert (record["rank"], record["host"], record["step"], record["probe"]) == (3, "host", last, 1)
    assert record["step_seconds"] == 1.5 and record["data_seconds"] == pytest.approx(0.15) and record["optimizer_seconds"] == pytest.approx(0.2)
    assert record["probe_seconds"] > 0 and record["memory_reserved"] >= record["memory_allocated"] > 1e7
    assert not {"gpu_use", "power_w", "temperature_c"} & record.keys()
    worker.step(last + 1, 5.0, {})
    worker.close()
    assert sent[-1]["step_seconds"] == 5.0 and no_gauges["worker_step", "3"] == last + 1 and no_gauges["worker_step_seconds", "3"] == 5.0


def test_records_begin_frequent_and_come_once_a_minute_in_a_long_run(no_gauges, monkeypatch):
    now, sent = [1000.0], []
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    worker = WorkerMetrics("r", 0, "h", CPU, sent.append, sample_s=1e6)
    worker._next_probe = math.inf
    for second in range(5, 3600, 5):
        now[0] = 1000.0 + second
        worker.step(second, float(second), {})
        worker._publish(worker._due())
    times = [record["step"] for record in sent]
    assert times[:10] == list(range(5, 55, 5)) and {b - a for a, b in itertools.pairwise(times[-20:])} == {60}
    assert sent[-1]["step_seconds"] == pytest.approx(np.mean(range(times[-1] - 55, times[-1] + 1, 5))), "the mean of the minute"


def test_a_worker_that_has_not_trained_says_nothing_and_one_that_cannot_report_trains_on(no_gauges):
    sent = []
    WorkerMetrics("r", 0, "h", CPU, sent.append, sample_s=1000).close()
    assert sent == []

    def refuse(record):
        raise ConnectionError("the driver is away")

    worker = WorkerMetrics("r", 0, "h", CPU, refuse, sample_s=0.01)
    for step in range(1, 50):
        worker.step(step, 0.01, {})
        time.sleep(0.001)
    worker.close()


def test_a_step_costs_less_than_a_tenth_of_a_millisecond(no_gauges, monkeypatch):
    worker = WorkerMetrics("r", 0, "h", CPU, lambda record: None, sample_s=1000)
    for step in range(1, 101):
        worker.step(step, 0.1, {"data": 0.1})  # the probe among them
    begin = time.thread_time()
    for step in range(101, 5101):
        worker.step(step, 0.1, {"data": 0.1, "forward_backward": 0.2, "optimizer": 0.3, "agree": 0.1})
    spent = (time.thread_time() - begin) / 5000
    worker.close()
    assert spent < 1e-4
    assert metrics.PROBE_EVERY_S >= 60 and min(probe(CPU) for _ in range(3)) < 0.02 * metrics.PROBE_EVERY_S


def test_resident_memory_stands_for_gpu_memory_on_a_cpu():
    import psutil

    before = memory(CPU, psutil.Process())["memory_allocated"]
    block = torch.ones(50_000_000)  # 200 MB
    assert memory(CPU, psutil.Process())["memory_allocated"] - before > 0.8 * 4 * block.numel()


def nvml(**broken):
    """A stand-in for pynvml, whose driver needs a GPU; `broken` names the calls that the driver refuses."""
    fake = types.ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def call(name, value):
        def inner(*args):
            if name in broken:
                raise NVMLError(name)
            return value

        return inner

    fake.NVMLError, fake.NVML_TEMPERATURE_GPU = NVMLError, 0
    fake.asked = []
    fake.nvmlInit, fake.nvmlShutdown = call("nvmlInit", None), call("nvmlShutdown", None)
    fake.nvmlDeviceGetHandleByUUID = lambda uuid: fake.asked.append(uuid)
    fake.nvmlDeviceGetUtilizationRates = call("use", types.SimpleNamespace(gpu=97))
    fake.nvmlDeviceGetPowerUsage, fake.nvmlDeviceGetTemperature = call("power", 689_000), call("temperature", 71)
    return fake


def test_nvml_readings_have_the_documented_units_and_a_refusing_driver_is_silent(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="abc"))
    for broken, readings in (
        ({}, {"gpu_use": 0.97, "power_w": 689.0, "temperature_c": 71.0}), ({"power": 1}, {"gpu_use": 0.97, "temperature_c": 71.0}), ({"nvmlInit": 1}, {}),
    ):  # fmt: skip
        fake = nvml(**broken)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        gpu = metrics.Gpu(torch.device("cuda", 0))
        assert gpu.read() == readings and (fake.asked == [b"GPU-abc"] or not readings)
        gpu.close()
        assert gpu.read() == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert metrics.Gpu(torch.device("cuda", 0)).read() == {}
