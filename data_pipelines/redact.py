"""Replaces personal data by placeholders that are consistent in a document: the same address is [EMAIL_1] each time.

One RE2 pass over the bytes finds everything that has the shape of personal data (`shapes`); each find is then judged (`judges`, `digits`, `postcodes`) by its check
digits (Luhn, ISO 13616, the key of a NIR), its lengths and the words around it (`cues`), in English and French, because a shape
alone does not tell a card number from a table row or an IP address from a section number. Citations, section and docket
numbers, dates and amounts stay as they are. Digits and letters of other scripts that mean ASCII are read as such (`plain`); what is
kept keeps its own characters. A number may be broken over two lines.

| kind     | what                                                | needs                                             |
|----------|-----------------------------------------------------|---------------------------------------------------|
| email    | addresses, also `a [at] b [dot] ca`, `a%40b.ca`     | for `a at b.ca`: a word such as e-mail, a mailbox provider, or a name with a dot, digit or `_` |
| phone    | North American, French, international with + or 00  | grouping, or a word such as tel. before bare digits, slashes; no word such as docket, pages |
| sin      | Canadian social insurance numbers                   | check digit; hyphens, or a word such as SIN, NAS  |
| ssn      | US social security numbers                          | a word such as SSN, an area that was given out    |
| nir      | French social security numbers                      | key, or a word such as NIR                        |
| card     | payment cards                                       | check digit, a known issuer, its length           |
| iban     | international account numbers                       | check digits                                      |
| postal   | Canadian, British and French postcodes              | Canadian: the space, a province, or an address; the others: an address, a city, a word such as postcode |
| ip       | IPv4 and IPv6                                       | no section or version number around               |
| passport | passport numbers                                    | the word passport, passeport                      |
| account  | bank accounts                                       | a word such as account, compte, transit, or the key and grouping of a RIB |
| ramq     | Quebec health cards                                 | a birthday; capitals, or a word such as RAMQ      |
| ohip     | Ontario health cards                                | a word such as OHIP; or check digit, hyphens and version |
| nino     | British national insurance numbers                  | a prefix that is given out; capitals, or a word such as NINO |
| nrn      | Belgian national register numbers                   | check digits and birthday; grouping, or a word such as NISS |
| ahv      | Swiss AHV/AVS numbers                               | check digit, or a word such as AVS                |
| idnr     | German tax identification numbers                   | check digit, a word such as Steuer-ID, tax ID     |
| rvnr     | German pension insurance numbers                    | check digit and birthday, or a word such as Rentenversicherungsnummer |
| idcard   | German and French identity cards of nine characters | a word such as Personalausweis, identity card     |
| name     | names behind a title (Mr., M., Mme, Me, Justice ...) | off by default: finds no name without its title   |

Costs: about 100-150 MB/s a core where personal data is rare; each find costs some microseconds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from data_pipelines import plain, shapes
from data_pipelines.finds import NO_DIGITS, SEPARATORS, Find, Span
from data_pipelines.judges import JUDGES

KINDS = (
    "email", "phone", "sin", "ssn", "nir", "card", "iban", "postal", "ip", "passport", "account",
    "ramq", "ohip", "nino", "nrn", "ahv", "idnr", "rvnr", "idcard", "name",
)  # fmt: skip
WORD = re.compile(rb"[(+]+|[A-Za-z0-9]+")
HIDDEN = re.compile(rb"[ \[({<]")
HIDDEN_AT, HIDDEN_DOT = re.compile(rb" (?:at|AT|arr?obase) |" + shapes.AT), re.compile(rb" (?:dot|point) |" + shapes.DOT)


@cache
def _scanner(with_names: bool, read: bool) -> tuple[Any, list[tuple[str, Callable[..., Any]]]]:
    """The RE2 program that finds all shapes, and what tells which it is, the common ones first; groups in the program would halve its speed.

    Unless the text was `read` already, the program also stops at what must be read otherwise.
    """
    import re2

    names = {**({"name": shapes.NAME_SHAPE} if with_names else {}), **shapes.SHAPES}
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1  # the text is bytes; non-ASCII is spelled out in the shapes
    options.max_mem = 64 << 20
    program = re2.compile(b"|".join([*names.values(), *([] if read else [plain.pattern()])]), options)
    return program, [(name, re.compile(names[name]).fullmatch) for name in dict.fromkeys(("digits", "ip6", *names))]


def find(data: bytes, kinds: Sequence[str]) -> list[Span]:
    """The personal data of these kinds in UTF-8 text, in order, without overlaps."""
    spans = _found(data, kinds, False)
    if spans is not None:
        return spans
    text = plain.plain(data)
    spans = _found(text.data, kinds, True) or []
    for span in spans:
        span.start, span.end = text.original(span.start, span.end)
    return spans


def _found(data: bytes, kinds: Sequence[str], read: bool) -> list[Span] | None:
    """The spans of a text, or None where some of it must be read otherwise first."""
    program, patterns = _scanner("name" in kinds, read)
    found: list[Span] = []
    position = 0
    matches = program.finditer(data)
    while match := next(matches, None):
        start, end = match.span()
        shape = _shape(patterns, data, start, end)
        if not shape:
            return None
        spans = list(JUDGES[shape](Find(data, start, end)))
        if not spans and (shape in shapes.GROUPED or data[start] in b"(+") and (first := WORD.match(data, start)):
            matches = program.finditer(data, first.end())
        for span in sorted(spans, key=lambda s: s.start):
            if span.start >= position:
                position = span.end
                span.value = data[span.start : position]
                found.append(span)
        if position > end:
            matches = program.finditer(data, position)
    return [s for s in found if s.kind in kinds]


def _shape(patterns: list[tuple[str, Callable[..., Any]]], data: bytes, start: int, end: int) -> str:
    """Which shape a find has; "" for what is none but must be read otherwise."""
    for name, fullmatch in patterns:
        if fullmatch(data, start, end):
            return name
    return ""


@dataclass
class Redaction:
    """Redacts the texts of one document: equal values get equal placeholders."""

    kinds: Sequence[str]
    counts: Counter[str] = field(default_factory=Counter)
    _numbers: dict[tuple[str, bytes], int] = field(default_factory=dict)
    _last: Counter[str] = field(default_factory=Counter)

    def apply(self, text: str) -> str:
        """The text with placeholders; `counts` grows by what was found."""
        data = text.encode()
        spans = find(data, self.kinds)
        if not spans:
            return text
        parts, position = [], 0
        for span in spans:
            parts += [data[position : span.start], self.placeholder(span)]
            position = span.end
        return b"".join([*parts, data[position:]]).decode()

    def placeholder(self, span: Span) -> bytes:
        """What stands for the value of a span in all of this document."""
        self.counts[span.kind] += 1
        key = span.kind, _same(span)
        number = self._numbers.get(key)
        if number is None:
            self._last[span.kind] += 1
            number = self._numbers[key] = self._last[span.kind]
        return f"[{span.kind.upper()}_{number}]".encode()


def _same(span: Span) -> bytes:
    """What two ways to write one value have in common."""
    if span.kind in ("phone", "sin", "ssn", "card"):
        return span.value.translate(None, NO_DIGITS)
    value = span.value
    if span.kind == "email" and HIDDEN.search(value):
        value = HIDDEN_DOT.sub(b".", HIDDEN_AT.sub(b"@", value))
    return value.translate(None, b" " if span.kind in ("email", "ip", "name", "passport") else SEPARATORS).lower()
