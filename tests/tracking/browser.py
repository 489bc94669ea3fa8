"""Headless Chromium for tests: what a page shows, what its console says, and a picture of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


def visit(url: str, picture: Path, size: str = "1400,1600", patience_ms: int = 1000) -> tuple[str, list[str]]:
    """(the page's DOM when `patience_ms` of virtual time have passed, its console's errors); writes a PNG."""
    base = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", f"--window-size={size}",
            f"--virtual-time-budget={patience_ms}", f"--user-data-dir={picture.parent}/profile", "--enable-logging=stderr"]  # fmt: skip
    shown = subprocess.run([*base, "--dump-dom", url], capture_output=True, text=True, timeout=120)
    subprocess.run([*base, f"--screenshot={picture}", url], capture_output=True, timeout=120, check=True)
    return shown.stdout, [line for line in shown.stderr.splitlines() if re.search(r"CONSOLE.*(error|uncaught)", line, re.IGNORECASE)]


def colours(picture: Path) -> int:
    """Different colours in a picture: one or two for a blank page."""
    from PIL import Image

    with Image.open(picture) as image:
        return len(image.convert("RGB").quantize(256).getcolors() or [])
