"""SIGTERM to real processes that wait."""

import subprocess
import sys

import pytest

from tests.running import ROOT

WAITS = f"""
import ctypes, sys, time
sys.path.insert(0, {str(ROOT)!r})
from raytune70b import signals
signals.AT_MOST_S = 0.5
signals.end_on_sigterm()
print("waits", flush=True)
"""
DEADLOCK = "c, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)\nc.pthread_mutex_lock(lock)\nc.pthread_mutex_lock(lock)"


@pytest.mark.parametrize("how", ["time.sleep(60)", DEADLOCK, "try:\n    time.sleep(60)\nfinally:\n    time.sleep(60)"],
                         ids=["in Python", "in a library that no signal wakes", "and clears up for long"])  # fmt: skip
def test_sigterm_ends_any_wait_with_75(how):
    process = subprocess.Popen([sys.executable, "-c", WAITS + how], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "waits\n"
    process.terminate()
    assert process.wait(30) == 75


def test_who_sets_a_handler_of_his_own_keeps_his_time():
    how = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('heard', flush=True))\nprint('set', flush=True)\ntime.sleep(1.5)"
    process = subprocess.Popen([sys.executable, "-c", WAITS + how], stdout=subprocess.PIPE, text=True)
    assert [process.stdout.readline() for _ in range(2)] == ["waits\n", "set\n"]
    process.terminate()
    assert (process.wait(30), process.stdout.read()) == (0, "heard\n")
