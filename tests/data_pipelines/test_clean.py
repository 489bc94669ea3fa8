"""Cleaning: equal characters get one form, letters survive, and each rule drops what it names."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipelines.clean import WINDOWS_1252, fault, join_hyphenated, language, normalise, structured
from data_pipelines.dedup import runs, word_hashes

ENGLISH = "The tenant shall pay the rent on the first day of each month, unless the parties agree otherwise in writing. "
FRENCH = "Le locataire doit payer le loyer le premier jour de chaque mois, sauf entente contraire écrite des parties. "


@pytest.mark.parametrize(("raw", "clean"), [
    ("e\u0301 = é", "é = é"),
    ("a\r\nb\rc\u2028d\x85e\x0cf", "a\nb\nc\nd\ne\nf"),
    ("1\xa0234,56\u202f$ \u2009x", "1 234,56 $ x"),
    ("a\u200bb\u00adc\ufeffd\x00e\x07f\u202eg", "abcdefg"),
    ("  two   spaces \t and\ttabs  \n  here  ", "two spaces and tabs\nhere"),
    ("a\n\n\n\n\nb", "a\n\nb"),
    ("le dÃ©biteur lâ€™a reÃ§u", "le débiteur l’a reçu"),
    ("le débiteur l’a reçu", "le débiteur l’a reçu"),
    ("514\u2011555\u20110199", "514-555-0199"),
    ("514\u2010555\u22120199, 514\u2012555, Jean\u2010Roch, \u22125 °C, 5 \u2212 3, 1\u200b\u22122", "514-555-0199, 514-555, Jean-Roch, \u22125 °C, 5 \u2212 3, 1-2"),
    ("L\x92article, l\x92\x9cuvre, 1\xa0000\xa0\x80, \x93oui\x94 \x96 \x8ca", "L’article, l’œuvre, 1 000 €, “oui” – Œa"),
    ("a\x81b\x8dc\x8fd\x90e\x9df\x85g", "abcdef\ng"),
    ("lâ\x80\x99été\nl\x92été", "l’été\nl’été"),
    ("family: 👨\u200d👩\u200d👧", "family: 👨\u200d👩\u200d👧"),
    ("ＡＢＣ ﬁ ①", "ＡＢＣ ﬁ ①"),
    ("\ufffe\uffff\ufffd", "\ufffd"),
])  # fmt: skip
def test_normalise(raw: str, clean: str):
    assert normalise(raw) == clean


def test_a_wrongly_decoded_line_beside_a_right_one():
    assert normalise("déjà vu\ndÃ©jÃ\xa0 vu") == "déjà vu\ndéjà vu"


@given(st.text(st.characters(codec="utf-8")))
def test_normalise_is_idempotent_and_keeps_letters(text: str):
    once = normalise(text)
    if not any(c in text for c in "ÃÂâÐÑ"):  # what starts a wrong decoding
        assert normalise(once) == once
        letters = [c for c in unicodedata.normalize("NFC", text.translate(WINDOWS_1252)) if c.isalpha()]
        assert [c for c in once if c.isalpha()] == letters


def test_words_cut_at_the_end_of_a_line():
    assert join_hyphenated("indem-\nnify the élé-\nments of Smith-\nJones, 12-\n13") == "indemnify the éléments of Smith-\nJones, 12-\n13"


def test_sections_stand_apart_and_boilerplate_goes():
    text = "Title\nArticle 1\nText of it.\nPage 3 of 10\nArticle 2. Objet\nMore; see\narticle of faith.\n- 4 -\nTous droits réservés."
    assert structured(text) == ("Title\n\nArticle 1\nText of it.\n\nArticle 2. Objet\nMore; see\narticle of faith.", 3)


@pytest.mark.parametrize(("text", "code"), [
    (ENGLISH * 4, "en"), (FRENCH * 4, "fr"), (ENGLISH * 20 + FRENCH * 20, "mixed"), (ENGLISH, "en"), (FRENCH, "fr"),
    ("Der Mieter hat die Miete am ersten Tag jedes Monats zu zahlen, sofern nichts anderes vereinbart ist. " * 4, "de"),
    ("El inquilino deberá pagar el alquiler el primer día de cada mes, salvo acuerdo por escrito. " * 4, "es"),
    ("12 345", "unknown"), ("", "unknown"),
])  # fmt: skip
def test_language(text: str, code: str):
    assert language(text, ("en", "fr")) == code


def judged(text: str) -> str:
    words = word_hashes(text)
    shingles = runs(words, 5)
    return fault(text, len(words), 5, len(np.unique(shingles)) / max(1, len(shingles)))


@pytest.mark.parametrize(("text", "rule"), [
    (ENGLISH, ""), (FRENCH, ""), ("Too short here.", "fewer than 5 words"), ("12 34 56 78 90 %% ## -- 11 22 33 a b", "mostly digits and symbols"),
    (ENGLISH * 10, "repeats itself"), ("".join(f"Back\nNext page\nline of words w{n} x{n} y{n} z{n} a{n} b{n} c{n} d{n}\n" for n in range(30)), "repeated lines"),
])  # fmt: skip
def test_quality_rules(text: str, rule: str):
    assert judged(text) == rule
