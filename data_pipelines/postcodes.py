"""Postcodes of Canada, Britain and France, told from codes of the same shape by the address that they end."""

from __future__ import annotations

from collections.abc import Iterator

from data_pipelines import cues, shapes
from data_pipelines.finds import Find, Span

ADDRESS_BACK = 112
"""So far before a postcode its street may begin."""


def canadian(find: Find) -> Iterator[Span]:
    value = find.value
    beside = (
        find.after(cues.PROVINCE) or find.after(cues.POSTCODE) or _is_addressed(find) or cues.CANADA.match(find.data, find.end) is not None
    )
    if (value.isupper() and value[3:4] == b" ") or beside:
        yield Span(find.start, find.end, "postal")


def _is_addressed(find: Find) -> bool:
    return find.after(cues.CITY) or find.after(cues.ADDRESS, back=ADDRESS_BACK)


def british(find: Find) -> Iterator[Span]:
    if find.data[find.end : find.end + 1] != b"-" and (
        find.after(cues.POSTCODE) or cues.BRITAIN.match(find.data, find.end) or _is_addressed(find)
    ):
        yield Span(find.start, find.end, "postal")


def french(find: Find) -> Iterator[Span]:
    match = shapes.FIVE_DIGITS.search(find.data, find.start, find.end + 2)
    if match and (find.value[:1] in b"cC" or is_french(find, *match.span())):
        yield Span(*match.span(), "postal")


def is_french(find: Find, start: int, end: int) -> bool:
    if not shapes.DEPARTMENT.match(find.data, start) or cues.NO_CITY.match(find.data, end + 1) or find.after(cues.CODED, start):
        return False
    return find.after(cues.FRENCH_ADDRESS, start, ADDRESS_BACK) or cues.CEDEX.match(find.data, end) is not None
