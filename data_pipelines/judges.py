"""Judges what has the shape of personal data: by its check digits, its lengths and the words around it.

A judge takes a find of one of the shapes and gives the spans in it that are personal data, none where it only looks so.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator

from stdnum import iban

from data_pipelines import cues, digits, postcodes, shapes
from data_pipelines.finds import FAR_BACK, Find, Span, only_digits


def _email(find: Find) -> Iterator[Span]:
    text = find.value.decode("utf-8", "replace")
    glued = next(n for n, c in enumerate(text) if c.isalnum() or c in "_%+-")  # a dash or quotation mark before the address
    foreign = [] if text.isascii() else [n for n, c in enumerate(text.partition("@")[0]) if c >= "\u2e80"]  # text without blanks before an address in Latin letters
    if foreign and text[foreign[-1] + 1] != "@":
        glued = foreign[-1] + 1
    yield Span(find.start + len(text[:glued].encode()), find.end, "email")


def _said_email(find: Find) -> Iterator[Span]:
    """`tom at example.com` is an address where a word says so, by its form, or at a mailbox provider's; `look at example.com` is none."""
    before, _, host = re.split(rb" (at|AT|arr?obase) ", find.value, maxsplit=1)
    certain = shapes.SAID.search(find.value) or find.after(cues.MAIL) or shapes.MAILBOX.search(before) or cues.MAILBOXES.match(host)
    if certain and not cues.NOBODY.match(before) and not host.lower().startswith(before.lower()):
        yield Span(find.start, find.end, "email")


def _name(find: Find) -> Iterator[Span]:
    title, _, names = find.value.partition(b" ")
    initial = title == b"M." and find.data[max(0, find.start - 1) : find.start] == b"."  # of A.M., LL.M.
    if initial or ((title == b"M." or title.isupper()) and shapes.NO_NAME.match(names)):
        return
    start = find.start + len(title) + 1
    for name in shapes.BETWEEN_NAMES.split(names):
        yield Span(start, start + len(name), "name")
        match = shapes.BETWEEN_NAMES.match(find.data, start + len(name), find.end)
        start = match.end() if match else find.end


def _iban(find: Find) -> Iterator[Span]:
    value = find.value
    rest = shapes.IBAN_REST.match(find.data, find.end, find.end + 40)
    if (rest and find.data[find.end : find.end + 1] == b"\n") or b"\n" in value:
        value += rest[0] if rest else b""
    while len(value) >= 15:
        if value.count(b"\n") < 2 and iban.is_valid(
            value.decode().replace("\n", ""), check_country=False
        ):  # a country's list of banks ages
            yield Span(find.start, find.start + len(value), "iban")
            return
        value = value[: max(value.rfind(b" "), value.rfind(b"-"), value.rfind(b"\n"), 0)]  # the shape may have taken the next word along


def _document(find: Find) -> Iterator[Span]:
    """Numbers of passports and identity cards."""
    if find.after(cues.SPEAKS_PASSPORT):
        yield Span(find.start, find.end, "passport")
    elif find.after(cues.SPEAKS_IDCARD, back=FAR_BACK) and shapes.IDCARD.fullmatch(find.value):
        yield Span(find.start, find.end, "idcard")


def _ramq(find: Find) -> Iterator[Span]:
    name = find.value[:4]
    if not shapes.BIRTHDAY.match(only_digits(find.value)):
        return
    if find.after(cues.SPEAKS_HEALTH, back=FAR_BACK) or (name.isupper() and not cues.NO_PATIENT.match(name) and not find.after(cues.CODED)):
        yield Span(find.start, find.end, "ramq")


def _nino(find: Find) -> Iterator[Span]:
    if find.after(cues.SPEAKS_IDCARD, back=FAR_BACK):
        yield from _document(find)
    elif not shapes.PREFIX.match(find.value.upper()):
        return
    elif find.after(cues.SPEAKS_NINO, back=FAR_BACK) or (find.value.isupper() and (find.after(cues.STAFF) or not find.after(cues.CODED))):
        yield Span(find.start, find.end, "nino")


def _ip6(find: Find) -> Iterator[Span]:
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


JUDGES: dict[str, Callable[[Find], Iterator[Span]]] = {
    "email": _email, "iban": _iban, "said_email": _said_email, "postal": postcodes.canadian, "british": postcodes.british, "french": postcodes.french, "passport": _document,
    "idcard": _document, "ramq": _ramq, "nino": _nino, "rvnr": digits.rvnr, "ip6": _ip6, "ip4": digits.ip4, "digits": digits.digits, "name": _name,
    "rib": digits.rib, "slashed": digits.slashed, "corsican": digits.corsican, "lower_iban": _iban,
}  # fmt: skip
