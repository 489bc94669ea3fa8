"""What personal data looks like, as patterns of UTF-8 bytes: `SHAPES` for the one RE2 pass over a text, the others for parts of its finds.

A shape alone tells little: `redact` judges what has it.
"""

from __future__ import annotations

import re

DASH = rb"(?:[ .\-]|\xe2\x80[\x93\xa2]|\xc2\xb7)"
"""What stands between the groups of a number: a space, a dot, a hyphen, an en dash, a bullet, a middle dot."""
GAP = rb"(?:" + DASH + rb"| (?:-|\xe2\x80\x93) )"
"""The same, or a dash with a space on either side."""
SAME = rb"([ .\-]|\xe2\x80\x93|)"
"""What stands between two groups and, as \\1, between all others: a space, a dot, a hyphen, an en dash or nothing."""

SHAPES = {
    "email": rb"[A-Za-z0-9_%+\-\x80-\xff][A-Za-z0-9._%+'\-\x80-\xff]*@[A-Za-z0-9\x80-\xff](?:[A-Za-z0-9.\-\x80-\xff]*[A-Za-z0-9\x80-\xff])?\.[A-Za-z]{2,24}",
    "iban": rb"\b(?:FR|MC)[ \-]?\d{2}(?:[ \-]?\d){10}(?:[ \-]?[A-Z0-9]){11}(?:[ \-]?\d){2}\b"
    rb"|\b(?:AT|BE|CH|DE|ES|FR|GB|IE|IT|LU|NL|PT) \d{2}(?: [A-Z0-9]{4}){3,7}(?: [A-Z0-9]{1,4})?\b"
    rb"|\b[A-Z]{2}\d{2}(?:[ \-]?[A-Z0-9]{4}){2,7}(?:[ \-]?[A-Z0-9]{1,4})?\b",
    "postal": rb"\b[ABCEGHJKLMNPRSTVXY]\d[ABCEGHJKLMNPRSTVWXYZ][ \-]?\d[ABCEGHJKLMNPRSTVWXYZ]\d\b",
    "passport": rb"\b(?:[A-Z]{1,2}\d{6,8}|\d{2}[A-Z]{2}\d{5})\b",
    "ip6": rb"[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,8}",
    "rib": rb"\b\d{5}[ \-]?\d{5}[ \-]?[A-Z0-9]{11}[ \-]?\d{2}\b",
    "digits": rb"[+(]{0,2}\d(?:(?:[ .\-]|\)(?:[ .\-]| - )?| ?\(| (?:-|\xe2\x80\x93) |\xe2\x80[\x93\xa2]|\xc2\xb7)?\d){6,}",
    "ip4": rb"(?:\d{1,3}\.){3}\d{1,3}",
    "slashed": rb"\b(?:[2-9]\d{2}/[2-9]\d{2}[ .\-/]?\d{4}|0[1-9](?:/\d{2}){4}|0\d{1,3}/\d{2,3}(?:[ .\-]\d{2,3}){1,3})\b",
    "corsican": rb"\b[1-478](?:[ .\-]?\d{2}){2}[ .\-]?2[ABab](?:[ .\-]?\d{3}){2}(?:[ .\-]?\d{2})?\b",
    "lower_iban": rb"\b[a-z]{2}\d{2}[ \-]?[a-z0-9]{4}(?:[ \-]?\d[a-z0-9]{3}|[a-z0-9]{4}){1,6}(?:[ \-]?\d[a-z0-9]{0,3}|[a-z0-9]{1,3})?\b",
}
"""Tried in this order where several begin at one place: what is common stands first, for each find pays for those before it."""
NAME = rb"(?:[A-Z]|\xc3[\x80-\x9e])[\w.'\x80-\xff\-]*(?: (?:[A-Z]|\xc3[\x80-\x9e])[\w.'\x80-\xff\-]+){0,2}"
NAME_SHAPE = (
    rb"\b(?:(?:Mr|Mrs|Ms|Dr|Me|Mme|Mlle|Justice|Judge|Monsieur|Madame|Mademoiselle|Ma\xc3\xaetre"
    rb"|MONSIEUR|MADAME|MADEMOISELLE|MA\xc3\x8eTRE)\.?|M\.) " + NAME
    + rb"|\b(?:Messrs\.?|MM\.) " + NAME + rb"(?:(?:, " + NAME + rb"){0,4} (?:et|and) " + NAME + rb")?"
)  # fmt: skip
BETWEEN_NAMES = re.compile(rb", | et | and ")
NO_NAME = re.compile(rb"(?:LE|LA) |L'|(?:Sc|Ed|Eng|Ing|Arch|Phil|Fisc|Env|Adm|Mus|Urb)\b")
"""Behind a title in capitals, an office (MADAME LA JUGE); behind M., a degree (M. Sc.)."""
COUNTRY = (
    rb"(?:20|21[236]|22[1-9]|23[0-9]|24[0-3]|26[12]|27|3[0-469]|35[1-9]|377|4[013-9]|42[01]|5[245]|509|590|594|596|6[145]|687|689|8[126]|852|9[01]|96[156]|97[12])"
)
"""Codes of countries that a number with 00 or 011 in front may go on with; others need a word before them."""
PHONE = re.compile(
    rb"(?<![\d\-])(?<!\d\.)(?:\+?1" + DASH + rb"?)?(?:\([2-9]\d{2}\)" + GAP + rb"?|[2-9]\d{2}" + GAP + rb")[2-9]\d{2}" + GAP + rb"\d{4}(?![\d]|[.\-]\d)"
    rb"|(?<![\d\-])(?<!\d\.)0[1-9](?:" + GAP + rb"\d{2}){4}(?![\d]|[.\-]\d)"
    rb"|(?<!\d)\(?\+\d{1,3}\)?(?:" + DASH + rb"?\(\d{1,4}\))?(?:" + DASH + rb"?\d){4,14}(?!\d)"
    rb"|(?<![\d.\-])0(?:0|11)" + DASH + rb"?(?:" + COUNTRY + rb"(?:" + DASH + rb"?\(0\)" + DASH + rb"?|" + DASH + rb")\d{1,4}|33[1-9]|1" + DASH + rb"[2-9]\d\d)"
    rb"(?:" + DASH + rb"\d{2,4}){2,5}(?![\d]|[.\-]\d)"
)
SPOKEN_PHONE = re.compile(
    rb"(?<!\d)1?[2-9]\d{2}[2-9]\d{6}(?!\d)|(?<!\d)0[1-9]\d{8}(?!\d)|(?<!\d)0(?:0|11)[1-9]\d{8,12}(?!\d)"
    rb"|(?<![\d\-])(?<!\d\.)(?:\(?0\d{2,4}\)?(?:" + DASH + rb"?\d{2,4}){2,4}|\(?0[2-9]\)?(?:" + DASH + rb"\d{4}){2}"
    rb"|(?!\d\d.\d\d.(?:19|20)\d\d)0[1-9](?:" + DASH + rb"\d{2,3}){3}|\(?[2-9]\d{2}(?:\)" + DASH + rb"?|" + DASH + rb")[2-9]\d{6})(?![\d]|[.\-]\d)"
)
"""What is a phone only behind a word for it: ten bare digits, and national numbers from elsewhere, such as 020 7946 0958."""
SIN = re.compile(rb"(?<![\d.\-])\d{3}" + SAME + rb"\d{3}\1\d{3}(?![\d]|[.\-]\d)")
SSN = re.compile(rb"(?<![\d.\-])\d{3}" + SAME + rb"\d{2}\1\d{4}(?![\d]|[.\-]\d)")
NIR = re.compile(rb"(?<![\d.\-])[1-478]" + SAME + rb"\d{2}\1(?:0[1-9]|1[0-2]|[2-9]\d)\1\d[\dABab]\1\d{3}\1\d{3}(?:(?:\1|[ \-])\d{2})?(?![\d]|[.\-]\d)")
CARD = re.compile(rb"(?<![\d.\-])(?:\d{4}" + SAME + rb"\d{4}\1\d{4}\1\d{4}|\d{4}" + SAME + rb"\d{6}\2\d{5}|4\d{12})(?![\d]|[.\-]\d)")
ISSUERS = re.compile(rb"4\d{12}(?:\d{3})?$|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}$|3[47]\d{13}$|(?:6011|64[4-9]\d|65\d\d)\d{12}$")
ACCOUNT = re.compile(rb"(?<![\d.\-])\d(?:[ \-]?\d){6,22}(?!\d)")
PERIOD = re.compile(
    rb"(?:(?:19|20)\d\d[ \-](?:[01]\d[ \-][0-3]\d|(?:19|20)\d\d(?:[ \-](?:19|20)\d\d)*)|[0-3]?\d[ \-][0-3]?\d[ \-](?:19|20)\d\d)(?![\d\-])"
)
THOUSANDS = re.compile(rb"\+?\d{1,3}(?: \d{3})+")
BEFORE_THOUSANDS = re.compile(rb"(?<!\d)\d{1,3} $")
AMOUNT_AND_YEAR = re.compile(rb"1 \d{3} \d{3} (?:19|20)\d\d")
PAIRS_BEFORE = re.compile(rb"(?<!\d)(?:\d\d )+$")
PAIRS_AFTER = re.compile(rb"(?: \d\d)+(?!\d)")
FOUR_PARTS = re.compile(rb"(?<![\d.\-])(?:\d{1,3}\.){3}\d{1,3}(?![\d]|[.\-]\d)")
NINE_DIGITS = re.compile(rb"(?<!\d)\d{9}(?!\d)")
