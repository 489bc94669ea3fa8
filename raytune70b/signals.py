"""SIGTERM ends a job within seconds, wherever it waits, with the exit code that says: run the same command again."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

RESUME_ME = 75
"""EX_TEMPFAIL of sysexits.h."""
AT_MOST_S = 10.0
"""How long a process may take to leave what it does and to clear up."""


def end_on_sigterm() -> None:
    """From now on SIGTERM raises SystemExit(75) in the main thread, until somebody sets another handler.

    Python runs a handler only when the main thread comes out of a library's C code (a connection that is tried for minutes, a
    read from storage that hangs). So a thread hears of the signal too, and ends the process after `AT_MOST_S`.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not _end:
        signal.signal(signal.SIGTERM, _end)
    if not any(thread.name == "sigterm" for thread in threading.enumerate()):
        heard, told = os.pipe()
        os.set_blocking(told, False)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        threading.Thread(target=_end_late, args=(heard,), name="sigterm", daemon=True).start()


def _end(*_: object) -> None:
    sys.exit(RESUME_ME)


def _end_late(heard: int) -> None:
    while number := os.read(heard, 1):
        if number[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is _end:
            time.sleep(AT_MOST_S)
            os._exit(RESUME_ME)
