import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def can_connect(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory):
    """The port of an MLflow server of these tests' own."""
    folder: Path = tmp_path_factory.mktemp("mlflow-server")
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/s.db"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}, start_new_session=True)
    try:
        wait_for(lambda: can_connect(port), 180)
        yield port
    finally:
        os.killpg(process.pid, 15)
        process.wait(20)
