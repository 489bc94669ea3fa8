"""Two launches of one run: real processes, one folder."""

import json
import socket
import subprocess
import sys

import psutil
import pytest

from raytune70b.config import UserError
from raytune70b.storage import Folder
from raytune70b.training import lease
from raytune70b.training.lease import LEASE, Lease
from tests.running import ROOT, wait_for

HOLDS = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from raytune70b.storage import Folder
from raytune70b.training.lease import Lease
with Lease(Folder(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(run: Folder) -> subprocess.Popen:
    """Another process that holds the run until its input ends."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(run.local)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_launch_is_refused_until_the_first_has_ended(tmp_path):
    run = Folder(tmp_path)
    first = holder(run)
    with pytest.raises(UserError, match=rf"{tmp_path}: .*another launch \(process {first.pid} on "), Lease(run):
        pass
    assert run.size(LEASE) is not None, "the refused one takes nothing away"
    first.communicate()
    with Lease(run):
        pass
    assert run.size(LEASE) is None


def test_after_a_kill_the_same_command_goes_on_at_once(tmp_path):
    first = holder(Folder(tmp_path))
    first.kill()
    first.wait()
    with Lease(Folder(tmp_path)):
        assert json.loads(Folder(tmp_path).read(LEASE))["pid"] != first.pid
    first.communicate()


def test_a_dead_process_that_nobody_has_asked_after_holds_nothing(tmp_path):
    """In a container whose first process does not reap, a killed driver stays in the list of processes for ever."""
    first = holder(Folder(tmp_path))
    first.kill()
    wait_for(lambda: psutil.Process(first.pid).status() == psutil.STATUS_ZOMBIE, 10)
    with Lease(Folder(tmp_path)):
        pass
    first.communicate()


@pytest.mark.parametrize("alive", [True, False])
def test_a_launch_on_another_machine_is_judged_by_its_beats(tmp_path, monkeypatch, alive):
    run, there = Folder(tmp_path), {"host": "elsewhere", "pid": 7, "started": 1.0, "count": 3}
    run.write(LEASE, json.dumps(there).encode())
    monkeypatch.setattr(lease, "BEAT_S", 0.1)
    monkeypatch.setattr(lease.time, "sleep", lambda _: alive and run.write(LEASE, json.dumps({**there, "count": 4}).encode()))
    if alive:
        with pytest.raises(UserError, match="elsewhere"), Lease(run):
            pass
    else:
        with Lease(run):
            wait_for(lambda: json.loads(run.read(LEASE))["count"] > 3, 10)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"host": 1}', b"\xff", b'{"host": "' + socket.gethostname().encode() + b'", "pid": "x", "started": null}'])
def test_a_file_that_says_nothing_holds_nobody_up(tmp_path, content):
    Folder(tmp_path).write(LEASE, content)
    with Lease(Folder(tmp_path)):
        pass


def test_storage_that_refuses_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(Folder, "write", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with Lease(Folder(tmp_path)):
        pass
