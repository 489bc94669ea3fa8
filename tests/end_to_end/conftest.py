import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import run_job


def pytest_collection_modifyitems(items):
    """Whole jobs on a busy machine: a generous limit against hangs."""
    for item in items:
        if "end_to_end" in str(item.path):
            item.add_marker(pytest.mark.timeout(900))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="package")
def head(tmp_path_factory):
    """A Ray cluster started as a user starts one, shared by these tests; its dashboard's address."""
    port, dashboard = free_port(), free_port()
    binaries = os.path.dirname(sys.executable)
    command = [os.path.join(binaries, "ray")]
    active = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}"}  # as in an activated environment: jobs run `python` by name
    subprocess.run(
        [*command, "start", "--head", f"--port={port}", f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1", "--num-cpus=6",
         "--object-store-memory=300000000", "--disable-usage-stats"], check=True, capture_output=True, timeout=120, env=active,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        if (Path.home() / ".ray" / "auth_token").is_file():
            patch.setenv("RAY_AUTH_MODE", "token")  # for Ray's own commands, as the README says
        yield f"http://127.0.0.1:{dashboard}"
    subprocess.run([*command, "stop", "--force"], capture_output=True, timeout=120)


@pytest.fixture(scope="package")
def sample(head, tmp_path_factory):
    """The token blocks of the sample corpus."""
    folder = tmp_path_factory.mktemp("sample") / "data"
    code, output = run_job("prepare", f"data.path={folder}")
    assert code == 0, output
    return folder
