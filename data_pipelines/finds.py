"""What the scan of a text for personal data gives to those who judge it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from data_pipelines import cues

LOOK_BACK = 48
FAR_BACK = 72
"""So far before a find its word may end, and for numbers that a sentence introduces."""
SEPARATORS = " .-–\n".encode()
"""Bytes that numbers of letters and digits are compared without."""
NO_DIGITS = bytes(c for c in range(256) if not 48 <= c <= 57)


@dataclass(slots=True)
class Span:
    """Personal data in UTF-8 bytes [start, end)."""

    start: int
    end: int
    kind: str
    value: bytes = b""
    """The same in the form that was read: ASCII digits, no escapes."""


@dataclass(slots=True)
class Find:
    """A shape with its surroundings."""

    data: bytes
    start: int
    end: int

    @property
    def value(self) -> bytes:
        return self.data[self.start : self.end]

    def after(self, words: re.Pattern[bytes], at: int | None = None, back: int = LOOK_BACK) -> bool:
        """Whether the text before the find, or before `at`, ends with these words."""
        at = self.start if at is None else at
        return words.search(self.data[max(0, at - back) : at]) is not None

    def is_money(self, start: int, end: int) -> bool:
        return (
            cues.MONEY_AFTER.match(self.data, end) is not None or cues.MONEY_BEFORE.search(self.data[max(0, start - 5) : start]) is not None
        )


def only_digits(value: bytes) -> bytes:
    return value.translate(None, NO_DIGITS)
