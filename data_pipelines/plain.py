"""The form in which redaction reads a text, and the way back from it to the text's own bytes.

Digits of any script become 0-9, letters and signs that are ASCII by NFKC (full-width, mathematical, ligatures) become that,
percent-encoding and numeric character references are decoded. Superscripts stay what they are: behind a number they are notes.
Costs: nothing for texts without such characters, which the scanner of `redact` notices on its way; else about half a microsecond for each.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from itertools import accumulate
from typing import Any

DASHES = "\u2010\u2011\u2012\u2212"
"""What stands between full-width digits; `clean.normalise` has replaced them between those of ASCII."""
ESCAPED = rb"%(?:25)?[2-7][0-9A-Fa-f]|&#(?:\d{2,3}|x[0-9A-Fa-f]{2});|[0-9](?:\xef\xb8\x8f)?\xe2\x83\xa3"
"""Percent-encoded ASCII, also if it was encoded twice; character references; digits on key caps."""


class Plain:
    """A text with pieces of it replaced: `pieces` are (start, end, what stands there), in order and apart."""

    def __init__(self, data: bytes, pieces: Iterable[tuple[int, int, bytes]]) -> None:
        pieces = list(pieces)
        self._starts, self._ends = [p[0] for p in pieces], [p[1] for p in pieces]
        lengths = [len(p[2]) for p in pieces]
        gained = [0, *accumulate(new - (end - start) for (start, end, _), new in zip(pieces, lengths, strict=True))]
        self._new_starts = [start + before for start, before in zip(self._starts, gained, strict=False)]
        self._new_ends = [start + length for start, length in zip(self._new_starts, lengths, strict=True)]
        kept = [data[a:b] for a, b in zip([0, *self._ends], [*self._starts, len(data)], strict=True)]
        self.data = kept[0] + b"".join(new + after for (_, _, new), after in zip(pieces, kept[1:], strict=True))

    def original(self, start: int, end: int) -> tuple[int, int]:
        """The bytes of the original text that data[start:end] stands for: a replaced piece is in it whole or not at all."""
        first, last = bisect_right(self._new_starts, start) - 1, bisect_left(self._new_starts, end) - 1
        if first >= 0:
            start = self._starts[first] if start < self._new_ends[first] else self._ends[first] + start - self._new_ends[first]
        if last >= 0:
            end = self._ends[last] + max(0, end - self._new_ends[last])
        return start, end


@cache
def equals() -> dict[bytes, bytes]:
    """Characters of which redaction reads another form: UTF-8 bytes to ASCII."""
    found = {}
    for code in [*range(0xA0, 0xD800), *range(0xF900, 0x20000)]:
        char = chr(code)
        plain = _plain(char)
        if plain != char:
            found[char.encode()] = plain.encode()
    return found


def _plain(char: str) -> str:
    digit = unicodedata.decimal(char, None)
    if digit is not None:
        return str(digit)
    shown = unicodedata.decomposition(char)
    if not shown.startswith(("<wide>", "<narrow>", "<font>", "<small>", "<compat>")):
        return char
    equal = unicodedata.normalize("NFKC", char)
    return equal if equal.isascii() and (equal.isalnum() or (not shown.startswith("<compat>") and equal in "@.-()+/_% ")) else char


def pattern() -> bytes:
    """What of a text must be replaced before it is read, for RE2 in bytes."""
    last_bytes: dict[bytes, set[int]] = defaultdict(set)
    for char in equals():
        last_bytes[char[:-1]].add(char[-1])
    chars = (re.escape(first) + b"[" + b"".join(b"\\x%02x" % c for c in sorted(last)) + b"]" for first, last in sorted(last_bytes.items()))
    return b"|".join([ESCAPED, *chars])


@cache
def _replaced() -> tuple[Any, dict[bytes, bytes]]:
    import re2

    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    dashes = {c.encode(): b"-" for c in DASHES}
    return re2.compile(b"|".join([pattern(), *dashes]), options), {**equals(), **dashes}


def plain(data: bytes) -> Plain:
    """The text in the form that is read."""
    program, form = _replaced()
    pieces = []
    for match in program.finditer(data):
        start, end = match.span()
        value = data[start:end]
        new = form.get(value) or _unescaped(value)
        if new:
            pieces.append((start, end, new))
    return Plain(data, pieces)


def _unescaped(value: bytes) -> bytes:
    """The ASCII character that an escape stands for; nothing for a control character and what is beyond."""
    if value[:1] == b"%":
        code = int(value[-2:], 16)
    elif value[:1] == b"&":
        code = int(value[3:-1], 16) if value[2:3] == b"x" else int(value[2:-1])
    else:
        code = value[0]
    return bytes([code]) if 32 <= code < 127 else b""
