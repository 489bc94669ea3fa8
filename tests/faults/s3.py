"""An S3 server for tests (moto's, on loopback), behind a door that can be shut: then connections are refused."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

from moto.server import ThreadedMotoServer

BUCKET = "bucket"


class Door(threading.Thread):
    """Passes connections on to the server while it is open; shut, it closes what there is and accepts nothing."""

    def __init__(self, port: int):
        super().__init__(daemon=True)
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open = threading.Event()
        self._open.set()
        self._connections: set[socket.socket] = set()
        self.refused = 0

    def run(self) -> None:
        while True:
            ours, _ = self._listener.accept()
            if not self._open.is_set():
                self.refused += 1
                ours.close()
                continue
            theirs = socket.create_connection(("127.0.0.1", self._port))
            self._connections |= {ours, theirs}
            for a, b in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._connections -= {source, sink}

    def shut(self, seconds: float) -> None:
        self._open.clear()
        for connection in [*self._connections]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        time.sleep(seconds)
        self._open.set()


class _Requests(logging.Handler):
    """Notes the lines that the server writes of its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def counted(action: Callable[[], object]) -> int:
    """The requests that reach the server while `action` runs."""
    log, handler = logging.getLogger("werkzeug"), _Requests()
    before, log.propagate = (log.level, log.propagate), False
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        action()
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]
    if not handler.lines:
        raise AssertionError("no request was seen")
    return len(handler.lines)


@contextlib.contextmanager
def server() -> Iterator[Door]:
    """The door of a server, which pyarrow finds by this process's environment."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    port = moto.get_host_and_port()[1]
    door = Door(port)
    door.start()
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{door.port}", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        import pyarrow.fs

        files, _ = pyarrow.fs.FileSystem.from_uri("s3://bucket/x?allow_bucket_creation=true")
        files.create_dir(BUCKET)
        yield door
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        moto.stop()
