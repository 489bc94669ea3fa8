"""Normalises text."""

from __future__ import annotations

import unicodedata


def normalise(text: str) -> str:
    """NFC, line ends as `\\n`."""
    return unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n")).strip()
