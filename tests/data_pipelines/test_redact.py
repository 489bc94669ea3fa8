"""Redaction against a labelled set in both languages, and its promises for any text.

The rules were tuned on the set's first 381 lines. The 98 after them, then the last 79, were written in new contexts and scored
once before any rule was changed: recall 65 of 68 at precision 65 of 67, then, with those mended, 48 of 49 and 48 of 49. What
they showed (a date behind a number abroad, `card no.`, a firmware's version, a bank that a library's list does not know) is mended. The
lines after those are what users found, and the kinds that came later: no measure, but nothing in them may be lost again. The
fresh sets were written whole before they were scored, once each; their first lines say with what result.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipelines.clean import normalise
from data_pipelines.extract import _sample, _shown
from data_pipelines.plain import plain
from data_pipelines.redact import KINDS, Redaction, find
from data_pipelines.sources import Bad

LABELLED = Path(__file__).with_name("pii.txt")
FRESH = sorted(LABELLED.parent.glob("pii_fresh*.txt"))
MARK = re.compile(r"\{([a-z-]+)\|([^}]*)\}")
MENDED = slice(558, None)
DEFAULT = tuple(k for k in KINDS if k != "name")


def labelled(file: Path = LABELLED) -> list[tuple[str, list[tuple[int, int, str]]]]:
    """(plain line, [(start, end, kind) in bytes]); look-alikes have the kind "-"."""
    lines = []
    for line in file.read_text().splitlines():
        if line.startswith("#"):
            continue
        line = line.replace("⏎", "\n")
        plain, spans, position = b"", [], 0
        for match in MARK.finditer(line):
            plain += line[position : match.start()].encode()
            value = match[2].encode()
            spans.append((len(plain), len(plain) + len(value), match[1]))
            plain, position = plain + value, match.end()
        lines.append(((plain + line[position:].encode()).decode(), spans))
    return lines


def score(lines_of: slice = slice(None), file: Path = LABELLED) -> tuple[Counter, Counter, Counter, list[str]]:
    """Right, missed and wrong finds by kind, and the lines in question."""
    right, missed, wrong, lines = Counter(), Counter(), Counter(), []
    for text, spans in labelled(file)[lines_of]:
        wanted = {s for s in spans if s[2] != "-"}
        found = {(s.start, s.end, s.kind) for s in find(text.encode(), DEFAULT)}
        for _, _, kind in wanted & found:
            right[kind] += 1
        for start, end, kind in wanted - found:
            missed[kind] += 1
            lines.append(f"missed {kind} {text.encode()[start:end].decode()!r} in {text!r}")
        for start, end, kind in found - wanted:
            wrong[kind] += 1
            lines.append(f"wrong {kind} {text.encode()[start:end].decode()!r} in {text!r}")
    return right, missed, wrong, lines


def test_recall_and_precision_over_the_labelled_set():
    right, missed, wrong, lines = score()
    spans = [s for _, spans in labelled() for s in spans]
    assert sum(s[2] != "-" for s in spans) >= 300 and sum(s[2] == "-" for s in spans) >= 300
    print("\n".join(lines))
    for kind in sorted({*right, *missed, *wrong}):
        print(f"{kind:10} recall {right[kind]}/{right[kind] + missed[kind]}  precision {right[kind]}/{right[kind] + wrong[kind]}")
    total = sum(right.values())
    assert total / (total + sum(missed.values())) >= 0.98
    assert total / (total + sum(wrong.values())) >= 0.98


def test_every_kind_has_its_spans():
    counts = Counter(kind for _, spans in labelled() for _, _, kind in spans)
    assert all(counts[kind] >= 10 for kind in DEFAULT), counts


def test_what_was_mended_stays_mended():
    assert score(MENDED)[3] == []


@pytest.mark.parametrize("file", FRESH, ids=lambda f: f.stem)
def test_the_fresh_sets_are_found_by_now(file: Path):
    spans = [s for _, spans in labelled(file) for s in spans]
    assert sum(s[2] != "-" for s in spans) >= 100 and sum(s[2] == "-" for s in spans) >= 100
    assert score(file=file)[3] == []


@pytest.mark.parametrize(("text", "redacted"), [
    ("Ｔéｌ. ５１４-５５５-１２３４、ＯＫ！", "Ｔéｌ. [PHONE_1]、ＯＫ！"),
    ("tél. ٥١٤-٥٥٥-١٢٣٤, 514-555-1234, 𝟓𝟏𝟒-𝟓𝟓𝟓-𝟏𝟐𝟑𝟒 (²) ﬁn", "tél. [PHONE_1], [PHONE_1], [PHONE_1] (²) ﬁn"),
    ("a@b.ca, a%40b.ca, a [at] b [dot] ca, ａ＠ｂ．ｃａ, a&#64;b.ca; 5 %20 &#39;", "[EMAIL_1], [EMAIL_1], [EMAIL_1], [EMAIL_1], [EMAIL_1]; 5 %20 &#39;"),
    ("fax 514-555-\n1234\nou 514-555-1235\n514-555-1236", "fax [PHONE_1]\nou [PHONE_2]\n[PHONE_3]"),
    ("電話０３−１２３４−５６７８、+８１ ３−３２２４−９９９９", "電話０３−１２３４−５６７８、[PHONE_1]"),
    ("514-555-1234²; CO₂ ½ ① ﷺ", "[PHONE_1]²; CO₂ ½ ① ﷺ"),
    ("Bill %32%30 and \n2019\n2020\n", "Bill %32%30 and \n2019\n2020\n"),
])  # fmt: skip
def test_other_scripts_and_escapes(text: str, redacted: str):
    assert Redaction(DEFAULT).apply(text) == redacted


WRITINGS = [str, lambda c: chr(ord(c) + 0xFEE0), lambda c: chr(0x660 + int(c)), lambda c: chr(0x966 + int(c)), lambda c: chr(0x1D7CE + int(c)), lambda c: f"%3{c}"]


@given(st.lists(st.sampled_from(range(len(WRITINGS))), min_size=10, max_size=10), st.text(st.characters(categories=["L", "Zs"]), max_size=20))
def test_a_number_in_any_digits_is_one_find_of_its_own_characters(writings: list[int], around: str):
    written = "".join(WRITINGS[w](c) for w, c in zip(writings, "4165550199", strict=True))
    text = f"{around}; tel. {written}; {around}"
    (span,) = [s for s in find(text.encode(), ("phone",)) if s.kind == "phone"]
    assert text.encode()[span.start : span.end].decode() == written and span.value == b"4165550199"


@given(st.lists(st.sampled_from(["１", "2", "٣", "%34", "&#53;", "ﬁ", "é", "-", "\n", " ", "＠", "a", "．ca", "%", "🂡", "6️⃣"]), max_size=40))
def test_what_is_read_otherwise_finds_its_way_back(parts: list[str]):
    data = "".join(parts).encode()
    read = plain(data)
    assert read.data.isascii() or any(p in ("é", "🂡") for p in parts)
    for start in range(len(read.data)):
        a, b = read.original(start, start + 1)
        assert 0 <= a < b <= len(data) and plain(data[a:b]).data in (read.data[start : start + 1], b"fi", data[a:b])
    assert read.original(0, len(read.data)) == (0, len(data))


def test_plain_text_is_read_as_it_is(monkeypatch):
    monkeypatch.setattr("data_pipelines.plain.plain", None)
    assert Redaction(DEFAULT).apply("Écrivez à l’œuvre « été » — 5 % de 10 000 €, n° 3, a@b.ca…") == "Écrivez à l’œuvre « été » — 5 % de 10 000 €, n° 3, [EMAIL_1]…"


def test_a_long_row_of_pairs_is_no_list_of_phones():
    for count in (12, 33, 400, 20_000):
        row = " ".join(f"{n % 100:02}" for n in range(1, 7 * count, 7))
        assert Redaction(("phone",)).apply(row) == row


def test_equal_values_get_equal_placeholders_and_others_do_not():
    redaction = Redaction(DEFAULT)
    text = redaction.apply("a@b.ca, A@B.CA, c@d.ca; 416-555-0199, (416) 555-0199, 514-555-0100")
    assert text == "[EMAIL_1], [EMAIL_1], [EMAIL_2]; [PHONE_1], [PHONE_1], [PHONE_2]"
    assert redaction.apply("again c@d.ca") == "again [EMAIL_2]"
    assert redaction.counts == {"email": 4, "phone": 3}


def test_only_the_kinds_asked_for():
    assert Redaction(("phone",)).apply("a@b.ca 416-555-0199") == "a@b.ca [PHONE_1]"


def test_names_behind_titles_are_an_option():
    text = "Mr. John Smith and Me Hélène Côté met Justice Roy; Mme Tremblay-Gagnon left. The Minister stayed."
    assert Redaction(DEFAULT).apply(text) == text
    assert Redaction(KINDS).apply(text) == "Mr. [NAME_1] and Me [NAME_2] met Justice [NAME_3]; Mme [NAME_4] left. The Minister stayed."


@pytest.mark.parametrize(("text", "redacted"), [
    ("M. Tremblay c. Mme Roy", "M. [NAME_1] c. Mme [NAME_2]"),
    ("MM. Roy et Côté; MM. Roy, Jean Roy et Diallo ont signé", "MM. [NAME_1] et [NAME_2]; MM. [NAME_1], [NAME_3] et [NAME_4] ont signé"),
    ("MONSIEUR JEAN TREMBLAY, MADAME ROY", "MONSIEUR [NAME_1], MADAME [NAME_2]"),
    ("9 A.M. Monday; LL.M. Harvard; M. Sc. in law; MADAME LA JUGE; MONSIEUR LE PRÉSIDENT; MM. les juges; 5 M. of", ""),
])  # fmt: skip
def test_names_behind_french_titles(text: str, redacted: str):
    assert Redaction(KINDS).apply(text) == (redacted or text)


def test_the_same_number_written_otherwise_is_the_same():
    text = "IBAN GB82-WEST-1234-5698-7654-32, gb82west12345698765432; NIR 2 88 04 2A 004 117 18, 288042A00411718, NIR 2 88 04 2B 004 117 18"
    assert Redaction(DEFAULT).apply(text) == "IBAN [IBAN_1], [IBAN_1]; NIR [NIR_1], [NIR_1], NIR [NIR_2]"
    ribs = "RIB 20041010050500013M02606; RIB 20041 01005 0500013M026 06; RIB 20041 01005 0500013N026 06"
    assert Redaction(DEFAULT).apply(ribs) == "RIB [ACCOUNT_1]; RIB [ACCOUNT_1]; RIB [ACCOUNT_2]"


def test_samples_for_the_data_card_show_shapes_and_nothing_else():
    line = "Secret plan of Jane Doe, 12 Elm Street: write to a.b@c.ca or [EMAIL_7] or c@d.ca, then a.b@c.ca; " + "Jane Doe lives here. " * 4
    before, after = _sample("nothing here\n" + line + "\ne@f.ca", DEFAULT)
    assert before == "xx xxxxxx: xxxxx xx x.x@x.xx xx [EMAIL_7] xx x@x.xx, xxxx x.x@x.xx; xxxx xxx xxxxx xxx"
    assert after == "xx xxxxxx: xxxxx xx [EMAIL_1] xx [EMAIL_7] xx [EMAIL_2], xxxx [EMAIL_1]; xxxx xxx xxxxx xxx"
    assert _sample("a@b.ca" + " w1" * 30 + " c@d.ca", DEFAULT)[1] == "[EMAIL_1]" + " x0" * 6 + " x…" + "0" + " x0" * 6 + " [EMAIL_2]"


@pytest.mark.parametrize(("text", "redacted"), [
    ("tél. 514\u2010555\u20101234, cell 514\u2212555\u22121234, fax 514\u2012555\u20121235", "tél. [PHONE_1], cell [PHONE_1], fax [PHONE_2]"),
    ("NAS 046\u2212454\u2212286; IBAN\u00a0: FR76\u202f30006\u00a000001 12345678901 89", "NAS [SIN_1]; IBAN : [IBAN_1]"),
    ("de \u22125 \u2212 3 à 1998\u20132004, 1\u00a0234\u202f567 €", "de \u22125 \u2212 3 à 1998\u20132004, 1 234 567 €"),
])  # fmt: skip
def test_numbers_set_with_other_dashes_and_blanks(text: str, redacted: str):
    assert Redaction(DEFAULT).apply(normalise(text)) == redacted


WRITTEN = {
    "JSON": lambda row: json.dumps(row, ensure_ascii=False).encode(),
    "ASCII JSON": lambda row: json.dumps(row).encode(),
    "repr": lambda row: repr(row).encode(),
    "cut off JSON": lambda row: json.dumps(row).encode()[:-2],
    "Latin-1": lambda row: json.dumps(row, ensure_ascii=False).encode("latin-1"),
}


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize(("text", "redacted"), [
    ("Tél. 06\xa012\xa034\xa056\xa078", "Tél. [PHONE_1]"),
    ("Coordonnées:\nFR7630006000011234567890189\nTéléphone 0612345678", "Coordonnées:\n[IBAN_1]\nTéléphone [PHONE_1]"),
    ("né\t1850578006084\xa091\ttél.\t\"514-555-1234\" et é0612345678", 'né [NIR_1] tél. "[PHONE_1]" et é[PHONE_2]'),
    ("12\xa0345\xa0678 $ à l'article\n172.2.1; C:\\new", "12 345 678 $ à l'article\n172.2.1; C:\\new"),
])  # fmt: skip
def test_the_quarantine_shows_no_personal_data(text: str, redacted: str, written: str):
    bad = Bad("a.jsonl", 3, "message 0 has role 'a@b.ca'", WRITTEN[written]({"texte": text, "tel": 5145551234}))
    shown = json.loads(_shown(bad, DEFAULT))
    assert redacted in shown["raw"] and "5145551234" not in shown["raw"]
    assert shown["reason"] == "message 0 has role '[EMAIL_1]'" and shown["line"] == 3


def test_the_quarantine_shows_any_bytes():
    raw = json.loads(_shown(Bad("a.txt", 1, "", b"\\ud83d\\ude00 \\ud83d \\U99999999 \\x \xff \\"), DEFAULT))["raw"]
    assert raw == "\U0001f600 \ufffd \U0010ffff x ÿ \\"


@pytest.mark.parametrize("digits", ["4111111111111111", "5500005555555559", "378282246310005"])
def test_one_wrong_digit_is_no_card(digits: str):
    assert Redaction(("card",)).apply(f"card {digits}") == "card [CARD_1]"
    for position in range(len(digits)):
        wrong = digits[:position] + str((int(digits[position]) + 1) % 10) + digits[position + 1 :]
        assert Redaction(("card",)).apply(f"card {wrong}") == f"card {wrong}"


@given(st.text(st.characters(codec="utf-8"), max_size=200))
def test_any_text_comes_through_and_is_stable(text: str):
    redaction = Redaction(KINDS)
    once = redaction.apply(text)
    assert not redaction.counts or once != text
    spans = find(text.encode(), KINDS)
    assert all(a.end <= b.start for a, b in pairwise(spans))
    assert sum(redaction.counts.values()) == len(spans)


@given(st.lists(st.sampled_from(["a@b.ca", "416-555-0199", " ", "x", "é", "\n", "[EMAIL_1]", "4111 1111 1111 1111", "12", "-", "H2X 1Y4"])))
def test_redacting_twice_changes_nothing(parts: list[str]):
    once = Redaction(DEFAULT).apply(" ".join(parts))
    again = Redaction(DEFAULT)
    assert again.apply(once) == once and not again.counts
