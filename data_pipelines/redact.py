"""Replaces personal data by placeholders that are consistent in a document: the same address is [EMAIL_1] each time.

One RE2 pass over the bytes finds everything that has the shape of personal data; each find is then judged by its check
digits (Luhn, ISO 13616, the key of a NIR), its lengths and the words around it, in English and French, because a shape
alone does not tell a card number from a table row or an IP address from a section number. Citations, section and docket
numbers, dates and amounts stay as they are.

| kind     | what                                                | needs                                             |
|----------|-----------------------------------------------------|---------------------------------------------------|
| email    | addresses                                           |                                                   |
| phone    | North American, French, international with + or 00  | grouping, or a word such as tel. before bare digits, slashes; no word such as docket, pages |
| sin      | Canadian social insurance numbers                   | check digit; hyphens, or a word such as SIN, NAS  |
| ssn      | US social security numbers                          | a word such as SSN, an area that was given out    |
| nir      | French social security numbers                      | key and grouping, or a word such as NIR           |
| card     | payment cards                                       | check digit, a known issuer, its length           |
| iban     | international account numbers                       | check digits                                      |
| postal   | Canadian postal codes                               | the space, or a province before                   |
| ip       | IPv4 and IPv6                                       | no section or version number around               |
| passport | passport numbers                                    | the word passport, passeport                      |
| account  | bank accounts                                       | a word such as account, compte, transit, or the key and grouping of a RIB |
| name     | names behind a title (Mr., M., Mme, Me, Justice ...) | off by default: finds no name without its title   |

Costs: about 100-150 MB/s a core where personal data is rare; each find costs some microseconds.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from stdnum import iban, luhn
from stdnum.fr import nir
from stdnum.us import ssn

from data_pipelines import cues, shapes

KINDS = ("email", "phone", "sin", "ssn", "nir", "card", "iban", "postal", "ip", "passport", "account", "name")
NO_PHONE = (cues.DOCKETED, cues.SPEAKS_ACCOUNT, cues.SECTION_BEFORE, cues.TABULAR)
LOOK_BACK = 48
RIB_DIGITS = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"12345678912345678923456789")
"""What letters count for the key of a French account."""
SEPARATORS = " .-–".encode()
"""Bytes that numbers of letters and digits are compared without."""
NO_DIGITS = bytes(c for c in range(256) if not 48 <= c <= 57)


@dataclass(slots=True)
class Span:
    """Personal data in UTF-8 bytes [start, end)."""

    start: int
    end: int
    kind: str


@dataclass(slots=True)
class _Find:
    """A shape with its surroundings."""

    data: bytes
    start: int
    end: int

    @property
    def value(self) -> bytes:
        return self.data[self.start : self.end]

    def after(self, words: re.Pattern[bytes], at: int | None = None) -> bool:
        """Whether the text before the find, or before `at`, ends with these words."""
        at = self.start if at is None else at
        return words.search(self.data[max(0, at - LOOK_BACK) : at]) is not None

    def is_money(self, start: int, end: int) -> bool:
        return cues.MONEY_AFTER.match(self.data, end) is not None or cues.MONEY_BEFORE.search(self.data[max(0, start - 5) : start]) is not None


def _email(find: _Find) -> Iterator[Span]:
    text = find.value.decode("utf-8", "replace")
    glued = next(n for n, c in enumerate(text) if c.isalnum() or c in "_%+-")  # a dash or quotation mark before the address
    yield Span(find.start + len(text[:glued].encode()), find.end, "email")


def _name(find: _Find) -> Iterator[Span]:
    title, _, names = find.value.partition(b" ")
    initial = title == b"M." and find.data[max(0, find.start - 1) : find.start] == b"."  # of A.M., LL.M.
    if initial or ((title == b"M." or title.isupper()) and shapes.NO_NAME.match(names)):
        return
    start = find.start + len(title) + 1
    for name in shapes.BETWEEN_NAMES.split(names):
        yield Span(start, start + len(name), "name")
        match = shapes.BETWEEN_NAMES.match(find.data, start + len(name), find.end)
        start = match.end() if match else find.end


def _iban(find: _Find) -> Iterator[Span]:
    value = find.value
    while len(value) >= 15:
        if iban.is_valid(value.decode(), check_country=False):  # a country's list of banks ages
            yield Span(find.start, find.start + len(value), "iban")
            return
        value = value[: max(value.rfind(b" "), value.rfind(b"-"), 0)]  # the shape may have taken the next word along


def _corsican(find: _Find) -> Iterator[Span]:
    """A NIR from the departments 2A and 2B, whose letter the shape of digits has not."""
    if shapes.NIR.fullmatch(find.data, find.start, find.end) and _is_nir(find, find.start, find.end):
        yield Span(find.start, find.end, "nir")


def _slashed(find: _Find) -> Iterator[Span]:
    if 9 <= len(_only_digits(find.value)) <= 11 and find.after(cues.SPEAKS_PHONE):
        yield Span(find.start, find.end, "phone")


def _rib(find: _Find) -> Iterator[Span]:
    """A French account of 23 digits, or with letters in it; what is none may hold other numbers."""
    value = find.value
    bank, branch, account, key = (int(value.translate(RIB_DIGITS, b" -")[a:b]) for a, b in ((0, 5), (5, 10), (10, 21), (21, 23)))
    grouped = len(value) > 23 and (89 * bank + 15 * branch + 3 * account + key) % 97 == 0
    if grouped or find.after(cues.SPEAKS_ACCOUNT):
        yield Span(find.start, find.end, "account")
    else:
        yield from _digits(find)


def _postal(find: _Find) -> Iterator[Span]:
    if find.value[3:4] == b" " or find.after(cues.PROVINCE):
        yield Span(find.start, find.end, "postal")


def _passport(find: _Find) -> Iterator[Span]:
    if find.after(cues.SPEAKS_PASSPORT):
        yield Span(find.start, find.end, "passport")


def _ip6(find: _Find) -> Iterator[Span]:
    text = find.value.decode()
    if len(text) < 4 or not any(c in "0123456789" for c in text):
        return
    if (find.start and find.data[find.start - 1 : find.start].isalnum()) or find.data[find.end : find.end + 1].isalnum():
        return
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return
    yield Span(find.start, find.end, "ip")


def _ip4(find: _Find) -> Iterator[Span]:
    if shapes.FOUR_PARTS.fullmatch(find.data, find.start, find.end) and _is_ip(find, find.start, find.end):
        yield Span(find.start, find.end, "ip")


def _digits(find: _Find) -> Iterator[Span]:
    """Card, NIR, SIN, SSN, phone, IP, passport and account numbers: the first kind that a part of the digits is."""
    taken = [False] * (find.end - find.start)
    digits = len(_only_digits(find.value))
    for kind, least, pattern, is_one in NUMBERS:
        if digits < least:
            continue
        for match in pattern.finditer(find.data, max(0, find.start - 1), min(len(find.data), find.end + 2)):
            start, end = match.span()
            if start < find.start or end > find.end or any(taken[start - find.start : end - find.start]):
                continue
            if is_one(find, start, end):
                taken[start - find.start : end - find.start] = [True] * (end - start)
                digits -= len(_only_digits(find.data[start:end]))
                yield Span(start, end, kind)


def _only_digits(value: bytes) -> bytes:
    return value.translate(None, NO_DIGITS)


def _is_card(find: _Find, start: int, end: int) -> bool:
    value = _only_digits(find.data[start:end])
    plausible = shapes.ISSUERS.match(value) and luhn.is_valid(value.decode())
    return bool(plausible) and (find.after(cues.SPEAKS_CARD, start) or not find.after(cues.NUMBERED, start))


def _is_sin(find: _Find, start: int, end: int) -> bool:
    value = find.data[start:end]
    if not luhn.is_valid(_only_digits(value).decode()) or find.is_money(start, end) or find.after(cues.COMPANY, start):
        return False
    return find.after(cues.SPEAKS_SIN, start) or (b"-" in value and not find.after(cues.NUMBERED, start))


def _is_ssn(find: _Find, start: int, end: int) -> bool:
    return find.after(cues.SPEAKS_SSN, start) and not find.after(cues.COMPANY, start) and ssn.is_valid(_only_digits(find.data[start:end]).decode())


def _is_nir(find: _Find, start: int, end: int) -> bool:
    """Behind a word for it the shape is enough: the key is often left out, or mistyped."""
    value = find.data[start:end]
    number = value.translate(None, SEPARATORS).decode().upper()
    return find.after(cues.SPEAKS_NIR, start) or (len(value) > len(number) == 15 and nir.is_valid(number))


def _is_phone(find: _Find, start: int, end: int) -> bool:
    value = find.data[start:end]
    spoken = find.after(cues.SPEAKS_PHONE, start)
    if value.lstrip(b"(").startswith(b"+"):
        return 8 <= len(_only_digits(value)) <= 15 and (spoken or not _is_increase(value, find.is_money(start, end)))
    if find.is_money(start, end) or (value.startswith((b"00", b"011")) and not 11 <= len(_only_digits(value)) <= 16):
        return False
    if spoken or find.data[max(0, start - 1) : start] == b".":
        return spoken
    return not _is_row(find, start, end) and not any(find.after(words, start) for words in NO_PHONE)


ROW_BYTES = 90
"""So far a row of pairs is followed on either side of a phone's shape: thirty of them are no list of phones."""


def _is_row(find: _Find, start: int, end: int) -> bool:
    """Whether digits in the groups of a phone are numbers of a table: 12 345 678 2021, 01 02 03 04 05, 0031 2044 0039 0031."""
    value, before = find.data[start:end], find.data[max(find.start, start - ROW_BYTES) : start]
    if value.translate(None, b" 0123456789"):
        return False
    if value.startswith(b"00"):
        return len({len(group) for group in value.split()}) == 1
    if value[2:3] != b" ":
        return shapes.BEFORE_THOUSANDS.search(before) is not None or shapes.AMOUNT_AND_YEAR.fullmatch(value) is not None
    pairs = [int(pair) for pair in value.split()]
    around = [len(m[0]) for m in (shapes.PAIRS_BEFORE.search(before), shapes.PAIRS_AFTER.match(find.data, end, end + ROW_BYTES)) if m]
    numbers = sum(around) // 3
    return pairs == list(range(pairs[0], pairs[0] + 5)) or max(around, default=0) >= ROW_BYTES - 2 or (numbers > 1 and numbers % 5 > 0)


def _is_increase(value: bytes, money: bool) -> bool:
    """Whether +12 345 678 is a sum: in thousands, and too short, too round or (+1 takes eleven digits) no number of a country."""
    if money and value[1:].isdigit():
        return True
    odd = len(_only_digits(value)) < 9 or value.startswith(b"+1") or value.endswith(b" 000")
    return shapes.THOUSANDS.fullmatch(value) is not None and (money or odd)


def _is_spoken_phone(find: _Find, start: int, end: int) -> bool:
    most = 16 if find.data.startswith((b"00", b"011"), start) else 11
    return 9 <= len(_only_digits(find.data[start:end])) <= most and find.after(cues.SPEAKS_PHONE, start)


def _is_ip(find: _Find, start: int, end: int) -> bool:
    parts = find.data[start:end].split(b".")
    octets = [int(p) for p in parts]
    if max(octets) > 255 or any(p[0] == ord("0") and len(p) > 1 for p in parts) or find.after(cues.SECTION, start):
        return False
    return find.after(cues.SPEAKS_IP, start) or (max(octets) >= 100 and octets[0] > 0)


def _is_passport(find: _Find, start: int, end: int) -> bool:
    return find.after(cues.SPEAKS_PASSPORT, start)


def _is_account(find: _Find, start: int, end: int) -> bool:
    value = find.data[start:end]
    if not find.after(cues.SPEAKS_ACCOUNT, start) or find.is_money(start, end) or shapes.PERIOD.match(value):
        return False
    return not shapes.THOUSANDS.fullmatch(value) or find.after(cues.LABEL, start)


NUMBERS: tuple[tuple[str, int, re.Pattern[bytes], Callable[[_Find, int, int], bool]], ...] = (
    ("card", 13, shapes.CARD, _is_card), ("nir", 13, shapes.NIR, _is_nir), ("sin", 9, shapes.SIN, _is_sin), ("account", 7, shapes.ACCOUNT, _is_account),
    ("phone", 8, shapes.PHONE, _is_phone), ("ssn", 9, shapes.SSN, _is_ssn), ("phone", 9, shapes.SPOKEN_PHONE, _is_spoken_phone), ("ip", 4, shapes.FOUR_PARTS, _is_ip),
    ("passport", 9, shapes.NINE_DIGITS, _is_passport),
)  # fmt: skip
"""Kind, least digits, shape and judge of numbers, in the order in which they are tried."""
JUDGES: dict[str, Callable[[_Find], Iterator[Span]]] = {
    "email": _email, "iban": _iban, "postal": _postal, "passport": _passport, "ip6": _ip6, "ip4": _ip4, "digits": _digits, "name": _name,
    "rib": _rib, "slashed": _slashed, "corsican": _corsican, "lower_iban": _iban,
}  # fmt: skip


@cache
def _scanner(with_names: bool) -> tuple[Any, list[str]]:
    """The RE2 program of all shapes, and the shape of each of its groups."""
    import re2

    names = {**({"name": shapes.NAME_SHAPE} if with_names else {}), **shapes.SHAPES}
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1  # the text is bytes; non-ASCII is spelled out in the shapes
    options.max_mem = 64 << 20
    return re2.compile(b"|".join(b"(" + s + b")" for s in names.values()), options), list(names)


def find(data: bytes, kinds: Sequence[str]) -> list[Span]:
    """The personal data of these kinds in UTF-8 text, in order, without overlaps."""
    pattern, names = _scanner("name" in kinds)
    found: list[Span] = []
    for match in pattern.finditer(data):
        shape = names[match.lastindex - 1]
        spans = JUDGES[shape](_Find(data, *match.span()))
        found += [s for s in spans if s.kind in kinds]
    return sorted(found, key=lambda s: s.start)


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
            parts += [data[position : span.start], self.placeholder(span.kind, data[span.start : span.end])]
            position = span.end
        return b"".join([*parts, data[position:]]).decode()

    def placeholder(self, kind: str, value: bytes) -> bytes:
        """What stands for a value in all of this document."""
        self.counts[kind] += 1
        if kind in ("phone", "sin", "ssn", "card"):
            same = _only_digits(value)
        else:
            same = value.translate(None, SEPARATORS if kind in ("iban", "nir", "postal", "account") else b" ").lower()
        number = self._numbers.get((kind, same))
        if number is None:
            self._last[kind] += 1
            number = self._numbers[kind, same] = self._last[kind]
        return f"[{kind.upper()}_{number}]".encode()
