"""Judges finds of digits: by check digits, groups, and the words and numbers around them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator

from stdnum import luhn
from stdnum.be import ssn as belgian
from stdnum.ch import ssn as ahv
from stdnum.de import idnr
from stdnum.fr import nir
from stdnum.us import ssn

from data_pipelines import cues, shapes
from data_pipelines.finds import FAR_BACK, LOOK_BACK, SEPARATORS, Find, Span, only_digits
from data_pipelines.plain import Plain
from data_pipelines.postcodes import is_french

NO_PHONE = (cues.DOCKETED, cues.SPEAKS_ACCOUNT, cues.SECTION_BEFORE, cues.TABULAR)
RIB_DIGITS = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"12345678912345678923456789")
"""What letters count for the key of a French account."""
RVNR_WEIGHTS = (2, 1, 2, 5, 7, 1, 2, 1, 2, 1, 2, 1)
CHECKED = frozenset({"card", "nir", "ahv", "nrn", "idnr", "ohip", "sin", "ssn"})
"""Kinds that are sure enough to go on in the next line without a hyphen."""
GLUE = (b"-", b".", b")", b"\x93")
"""What ends a line within a number, the last an en dash's last byte."""


def corsican(find: Find) -> Iterator[Span]:
    """A NIR from the departments 2A and 2B, whose letter the shape of digits has not."""
    if shapes.NIR.fullmatch(find.data, find.start, find.end) and _is_nir(find, find.start, find.end):
        yield Span(find.start, find.end, "nir")


def slashed(find: Find) -> Iterator[Span]:
    if 9 <= len(only_digits(find.value)) <= 11 and find.after(cues.SPEAKS_PHONE):
        yield Span(find.start, find.end, "phone")


def rib(find: Find) -> Iterator[Span]:
    """A French account of 23 digits, or with letters in it; what is none may hold other numbers."""
    value = find.value
    bank, branch, account, key = (int(value.translate(RIB_DIGITS, b" -\n")[a:b]) for a, b in ((0, 5), (5, 10), (10, 21), (21, 23)))
    grouped = len(value) > 23 and (89 * bank + 15 * branch + 3 * account + key) % 97 == 0
    if grouped or find.after(cues.SPEAKS_ACCOUNT):
        yield Span(find.start, find.end, "account")
    else:
        yield from _lines(find)


def rvnr(find: Find) -> Iterator[Span]:
    """A German pension insurance number (VKVV, section 2), of which stdnum knows nothing; other digits may begin with it."""
    value = find.value.translate(None, SEPARATORS).decode()
    parts = map(int, f"{value[:8]}{ord(value[8]) - 64:02}{value[9:11]}")
    sums = sum(sum(divmod(digit * weight, 10)) for digit, weight in zip(parts, RVNR_WEIGHTS, strict=True))
    right = sums % 10 == int(value[11:]) and shapes.BIRTHDAY_DE.match(value, 2) is not None
    if find.after(cues.SPEAKS_RVNR, back=FAR_BACK) or (right and not find.after(cues.CODED)):
        yield Span(find.start, find.end, "rvnr")
    else:
        yield from digits(find)


def ip4(find: Find) -> Iterator[Span]:
    if shapes.FOUR_PARTS.fullmatch(find.data, find.start, find.end) and _is_ip(find, find.start, find.end):
        yield Span(find.start, find.end, "ip")


def digits(find: Find) -> Iterator[Span]:
    is_rib = find.end - find.start >= 23 and shapes.RIB.fullmatch(find.data, find.start, find.end)
    return rib(find) if is_rib else _lines(find)


def _lines(find: Find) -> Iterator[Span]:
    """Numbers of digits in one line, or broken over two."""
    if b"\n" not in find.value:
        yield from _numbers(find)
        return
    taken = list(_broken(find))
    yield from taken
    start = find.start
    for line in find.value.split(b"\n"):
        whole = Find(find.data, start, start + len(line))
        yield from (s for s in _numbers(whole) if all(s.end <= t.start or s.start >= t.end for t in taken))
        start += len(line) + 1


def _broken(find: Find) -> Iterator[Span]:
    """The numbers that go on in the next line: behind a hyphen, or where words tell that the line is no row of a table."""
    first, last = max(0, find.start - 2 * LOOK_BACK), find.end + 2 * LOOK_BACK
    breaks = [m.start() for m in re.finditer(rb"\n", find.value)]
    window = find.data[first:last]
    ends = [(find.start - first + n, find.start - first + n + 1, b"" if find.value[n - 1 : n] in GLUE else b" ") for n in breaks]
    joined = Plain(window, ends)
    for span in _numbers(Find(joined.data, find.start - first, len(joined.data) - (len(window) - (find.end - first)))):
        start, end = (first + n for n in joined.original(span.start, span.end))
        value = find.data[start:end]
        if value.count(b"\n") != 1:
            continue
        line = find.data[find.data.rfind(b"\n", 0, start) + 1 : start]
        glued = value[value.find(b"\n") - 1 : value.find(b"\n")] in (b"-", b")", b"\x93")
        if (
            glued
            or (span.kind in CHECKED and any(chr(c).isalpha() for c in line))
            or (span.kind == "phone" and find.after(cues.SPEAKS_PHONE, start))
        ):
            yield Span(start, end, span.kind)


def _numbers(find: Find) -> Iterator[Span]:
    """Card, NIR, SIN, SSN, phone, IP, passport and account numbers: the first kind that a part of the digits is."""
    if find.data.startswith(b"0.", find.start) and find.value[2:].isdigit():  # a decimal: tables are full of them
        return
    taken = [False] * (find.end - find.start)
    left = len(only_digits(find.value))
    bare = left if left == find.end - find.start else 0
    first, last = max(0, find.start - 1), min(len(find.data), find.end + 2)
    for kind, least, bares, pattern, is_one in NUMBERS:
        if left < least or (bare and bare not in bares):
            continue
        for match in pattern.finditer(find.data, first, last):
            start, end = match.span()
            if start < find.start or end > find.end or any(taken[start - find.start : end - find.start]):
                continue
            if is_one(find, start, end):
                taken[start - find.start : end - find.start] = [True] * (end - start)
                left -= len(only_digits(find.data[start:end]))
                version = shapes.VERSION.match(find.data, end) if kind == "ohip" else None
                yield Span(start, version.end() if version else end, kind)
    if shapes.FRENCH.match(find.data, find.end - 5) and is_french(find, find.end - 5, find.end):
        yield Span(find.end - 5, find.end, "postal")


def _is_card(find: Find, start: int, end: int) -> bool:
    value = only_digits(find.data[start:end])
    plausible = shapes.ISSUERS.match(value) and luhn.is_valid(value.decode())
    return bool(plausible) and (find.after(cues.SPEAKS_CARD, start) or not find.after(cues.NUMBERED, start))


def _is_sin(find: Find, start: int, end: int) -> bool:
    value = find.data[start:end]
    if not luhn.is_valid(only_digits(value).decode()) or find.is_money(start, end) or find.after(cues.COMPANY, start):
        return False
    return find.after(cues.SPEAKS_SIN, start) or (b"-" in value and not find.after(cues.NUMBERED, start))


def _is_ssn(find: Find, start: int, end: int) -> bool:
    return (
        find.after(cues.SPEAKS_SSN, start)
        and not find.after(cues.COMPANY, start)
        and ssn.is_valid(only_digits(find.data[start:end]).decode())
    )


def _is_nir(find: Find, start: int, end: int) -> bool:
    """Behind a word for it the shape is enough: the key is often left out, or mistyped. Without groups it must not follow a word such as parcel."""
    value = find.data[start:end]
    number = value.translate(None, SEPARATORS).decode().upper()
    if find.after(cues.SPEAKS_NIR, start):
        return True
    return len(number) == 15 and nir.is_valid(number) and (len(value) > 15 or not find.after(cues.CODED, start))


def _is_phone(find: Find, start: int, end: int) -> bool:
    value = find.data[start:end]
    spoken = find.after(cues.SPEAKS_PHONE, start)
    if value.lstrip(b"(").startswith(b"+"):
        return 8 <= len(only_digits(value)) <= 15 and (spoken or not _is_increase(value, find.is_money(start, end)))
    if find.is_money(start, end) or (value.startswith((b"00", b"011")) and not 11 <= len(only_digits(value)) <= 16):
        return False
    if spoken or find.data[max(0, start - 1) : start] == b".":
        return spoken
    return not _is_row(find, start, end) and not any(find.after(words, start) for words in NO_PHONE)


ROW_BYTES = 90
"""So far a row of pairs is followed on either side of a phone's shape: thirty of them are no list of phones."""


def _is_row(find: Find, start: int, end: int) -> bool:
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
    odd = len(only_digits(value)) < 9 or value.startswith(b"+1") or value.endswith(b" 000")
    return shapes.THOUSANDS.fullmatch(value) is not None and (money or odd)


def _is_spoken_phone(find: Find, start: int, end: int) -> bool:
    most = 16 if find.data.startswith((b"00", b"011"), start) else 11
    return 9 <= len(only_digits(find.data[start:end])) <= most and find.after(cues.SPEAKS_PHONE, start)


def _is_ip(find: Find, start: int, end: int) -> bool:
    parts = find.data[start:end].split(b".")
    octets = [int(p) for p in parts]
    if max(octets) > 255 or any(p[0] == ord("0") and len(p) > 1 for p in parts) or find.after(cues.SECTION, start):
        return False
    return find.after(cues.SPEAKS_IP, start) or (max(octets) >= 100 and octets[0] > 0)


def _is_ohip(find: Find, start: int, end: int) -> bool:
    """Behind a word for it, groups or check digit are enough; without one, hyphens, check digit and the version of the card."""
    value = find.data[start:end]
    right = luhn.is_valid(only_digits(value).decode())
    if find.after(cues.CODED, start):
        return False
    if find.after(cues.SPEAKS_HEALTH, start, FAR_BACK):
        return right or len(value) > 10
    return right and b"-" in value and shapes.VERSION.match(find.data, end) is not None


def _is_nrn(find: Find, start: int, end: int) -> bool:
    value, speaks = find.data[start:end], find.after(cues.SPEAKS_NRN, start, FAR_BACK)
    if speaks and shapes.NRN_SET.fullmatch(value):
        return True
    return (speaks or (len(value) > 11 and not find.after(cues.CODED, start))) and belgian.is_valid(only_digits(value).decode())


def _is_ahv(find: Find, start: int, end: int) -> bool:
    speaks = find.after(cues.SPEAKS_AHV, start, FAR_BACK)
    return speaks or (ahv.is_valid(only_digits(find.data[start:end]).decode()) and not find.after(cues.CODED, start))


def _is_idnr(find: Find, start: int, end: int) -> bool:
    return (
        find.after(cues.SPEAKS_IDNR, start, FAR_BACK)
        and not find.after(cues.CODED, start)
        and idnr.is_valid(only_digits(find.data[start:end]).decode())
    )


def _is_passport(find: Find, start: int, end: int) -> bool:
    return find.after(cues.SPEAKS_PASSPORT, start)


def _is_account(find: Find, start: int, end: int) -> bool:
    value = find.data[start:end]
    if not find.after(cues.SPEAKS_ACCOUNT, start) or find.is_money(start, end) or shapes.PERIOD.match(value):
        return False
    return not shapes.THOUSANDS.fullmatch(value) or find.after(cues.LABEL, start)


NUMBERS: tuple[tuple[str, int, Collection[int], re.Pattern[bytes], Callable[[Find, int, int], bool]], ...] = (
    ("card", 13, (13, 15, 16), shapes.CARD, _is_card), ("nir", 13, (13, 15), shapes.NIR, _is_nir), ("sin", 9, (9,), shapes.SIN, _is_sin),
    ("account", 7, range(7, 24), shapes.ACCOUNT, _is_account), ("phone", 8, (), shapes.PHONE, _is_phone), ("ssn", 9, (9,), shapes.SSN, _is_ssn),
    ("phone", 9, range(9, 17), shapes.SPOKEN_PHONE, _is_spoken_phone), ("ip", 4, (), shapes.FOUR_PARTS, _is_ip), ("passport", 9, (9,), shapes.NINE_DIGITS, _is_passport),
    ("ahv", 13, (13,), shapes.AHV, _is_ahv), ("nrn", 11, (11,), shapes.NRN, _is_nrn), ("idnr", 11, (11,), shapes.IDNR, _is_idnr), ("ohip", 10, (10,), shapes.OHIP, _is_ohip),
)  # fmt: skip
"""Kind, least digits, how many digits it has without anything between them, shape and judge of numbers, in the order in which they are tried."""
