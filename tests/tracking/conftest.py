import contextlib
import os
import signal
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


class MlflowServer:
    """An MLflow server of these tests' own, which can be killed and started again at the same address."""

    def __init__(self, folder: Path):
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
            self.port = taken.getsockname()[1]
        self.folder = folder
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--port", str(self.port), "--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/s.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        with open(self.folder / "log", "a") as log:
            environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        wait_for(lambda: can_connect(self.port), 180)

    def stop(self, signal_number: int = signal.SIGTERM) -> None:
        os.killpg(self.process.pid, signal_number)
        self.process.wait(20)


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory):
    """The port of an MLflow server that stays up."""
    server = MlflowServer(tmp_path_factory.mktemp("mlflow-server"))
    yield server.port
    server.stop()
