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

BREAK = rb"(?:[ \-]|-?\n|)"
"""The same between letters and digits, where a line may end."""
DOT = rb"(?:\.| ?[\[({<] ?(?:dot|DOT|point|POINT|\.) ?[\])}>] ?)"
AT = rb"(?:@| ?[\[({<] ?(?:at|At|AT|arobase|arrobase|\xc3\xa0|@) ?[\])}>] ?)"
LABEL = rb"[A-Za-z0-9\x80-\xff](?:[A-Za-z0-9\-\x80-\xff]*[A-Za-z0-9\x80-\xff])?"

SHAPES = {
    "email": rb"[A-Za-z0-9_%+\-\x80-\xff][A-Za-z0-9._%+'\-\x80-\xff]*(?: ?[\[({<] ?(?:dot|DOT|point|POINT|\.) ?[\])}>] ?[A-Za-z0-9._%+'\-\x80-\xff]+)*" + AT
    + rb"[A-Za-z0-9\x80-\xff](?:[A-Za-z0-9.\-\x80-\xff]*[A-Za-z0-9\x80-\xff])?(?:" + DOT + LABEL + rb")*" + DOT + rb"[A-Za-z]{2,24}",
    "iban": rb"\b(?:FR|MC)[ \-]?\d{2}(?:[ \-]?\d){10}(?:[ \-]?[A-Z0-9]){11}(?:[ \-]?\d){2}\b"
    rb"|\b(?:AT|BE|CH|DE|ES|FR|GB|IE|IT|LU|NL|PT) \d{2}(?: [A-Z0-9]{4}){3,7}(?: [A-Z0-9]{1,4})?\b"
    rb"|\b[A-Z]{2}\d{2}(?:[ \-]?[A-Z0-9]{4}){2,7}(?:[ \-]?[A-Z0-9]{1,4})?\b|\b[A-Z]{2}\d{2}(?:[ \-]?[A-Z0-9]{4})?\n[A-Z0-9]{4}\b",
    "postal": rb"\b[ABCEGHJ-NPRSTVXYabceghj-nprstvxy]\d[ABCEGHJ-NPRSTV-Zabceghj-nprstv-z][ \-]?\d[ABCEGHJ-NPRSTV-Zabceghj-nprstv-z]\d\b",
    "british": rb"\b[A-Za-z]{1,2}\d[A-Za-z0-9]? ?\d[ABD-HJLNP-UW-Zabd-hjlnp-uw-z]{2}\b",
    "french": rb"\b\d{5} (?:[A-Z]|\xc3[\x80-\x9e])|\b[Cc][Oo][Dd][Ee] [Pp][Oo][Ss][Tt][Aa][Ll] ?:? ?\d{5}\b",
    "nino": rb"\b[A-Za-z]{2}(?:" + BREAK + rb"\d{2}){3}" + BREAK + rb"[A-Da-d]\b",
    "passport": rb"\b(?:[A-Z]{1,2}\d{6,8}|\d{2}[A-Z]{2}\d{5})\b",
    "idcard": rb"\b[B-DF-HJ-NP-TV-Z][B-DF-HJ-NP-TV-Z0-9]{8}\d?\b",
    "ramq": rb"\b[A-Za-z]{4}" + BREAK + rb"\d{4}" + BREAK + rb"\d{4}\b",
    "rvnr": rb"\b\d{2}" + BREAK + rb"\d{6}" + BREAK + rb"[A-Z]" + BREAK + rb"\d{2} ?\d\b",
    "ip6": rb"[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,8}",
    "rib": rb"\b\d{5}" + BREAK + rb"\d{5}" + BREAK + rb"[A-Z0-9]{11}" + BREAK + rb"\d{2}\b",
    "digits": rb"[+(]{0,2}\d(?:(?:[ .\-]|\)(?:[ .\-]| - )?| ?\(| (?:-|\xe2\x80\x93) |\xe2\x80[\x93\xa2]|\xc2\xb7|[.\-)]?\n|\xe2\x80\x93\n)?\d){6,}",
    "ip4": rb"(?:\d{1,3}\.){3}\d{1,3}",
    "slashed": rb"\b(?:[2-9]\d{2}/[2-9]\d{2}[ .\-/]?\d{4}|0[1-9](?:/\d{2}){4}|0\d{1,3}/\d{2,3}(?:[ .\-]\d{2,3}){1,3})\b",
    "corsican": rb"\b[1-478](?:[ .\-]?\d{2}){2}[ .\-]?2[ABab](?:[ .\-]?\d{3}){2}(?:[ .\-]?\d{2})?\b",
    "lower_iban": rb"\b[a-z]{2}\d{2}[ \-]?[a-z0-9]{4}(?:[ \-]?\d[a-z0-9]{3}|[a-z0-9]{4}){1,6}(?:[ \-]?\d[a-z0-9]{0,3}|[a-z0-9]{1,3})?\b",
    "said_email": rb"[A-Za-z0-9\x80-\xff][A-Za-z0-9._%+\-\x80-\xff]*(?:(?: dot [A-Za-z0-9._%+\-\x80-\xff]+)* (?:at|AT) " + LABEL + rb"(?:(?:\.| dot )" + LABEL + rb")*(?:\.| dot )"
    rb"|(?: point [A-Za-z0-9._%+\-\x80-\xff]+)* arr?obase " + LABEL + rb"(?:(?:\.| point )" + LABEL + rb")*(?:\.| point ))"
    rb"(?:com|org|net|edu|gov|gc|info|biz|io|ca|qc|fr|be|ch|de|uk|eu|us|ie|lu|it|es|nl|pt|example)\b",
}
"""Tried in this order where several begin at one place: what is common stands first, for each find pays for those before it."""
GROUPED = frozenset({"postal", "british", "french", "ramq", "nino", "rvnr", "idcard", "passport", "said_email"})
"""Shapes that may have taken the next number along: where one is nothing, the search goes on behind its first word."""
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
END = rb"(?![\d]|[.\-]\d)"
OHIP = re.compile(rb"(?<![\d.\-])[1-9]\d{3}" + SAME + rb"\d{3}\1\d{3}" + END)
VERSION = re.compile(rb"[ \-]?[A-Z]{2}(?![A-Za-z0-9\x80-\xff])")
"""The two letters behind an Ontario card's number."""
NRN = re.compile(rb"(?<![\d.\-])\d\d(?:" + SAME + rb"\d\d\1\d\d[ .\-]?\d{3}[ .\-]?\d\d|" + rb"\d{4}-\d{3}[ .\-]\d\d)" + END)
NRN_SET = re.compile(rb"\d\d\.\d\d\.\d\d-\d{3}[.\-]\d\d")
AHV = re.compile(rb"(?<![\d.\-])756" + SAME + rb"\d{4}\1\d{4}\1\d\d" + END)
IDNR = re.compile(rb"(?<![\d.\-])[1-9]\d([ /\-]?)\d{3}\1\d{3}\1\d{3}" + END)
FRENCH = re.compile(rb"(?<!\d)\d{5}(?= (?:[A-Z]|\xc3))")
DEPARTMENT = re.compile(rb"0[1-9]|[1-8]\d|9[0-578]")
BIRTHDAY = re.compile(rb"\d\d(?:0[1-9]|1[0-2]|5[1-9]|6[0-2])(?:0[1-9]|[12]\d|3[01])")
"""Year, month (50 more for women) and day in a health card of Quebec."""
BIRTHDAY_DE = re.compile(r"(?:0[1-9]|[12]\d|3[01]|5[1-9]|[67]\d|8[01])(?:0[1-9]|1[0-2])\d\d")
PREFIX = re.compile(rb"(?!BG|GB|KN|NK|NT|TN|ZZ)[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z]")
IBAN_REST = re.compile(rb"\n?(?:[ \-]?[A-Z0-9]{1,4}(?![A-Za-z0-9])){1,7}|\n[A-Z0-9]{1,27}\b")
MAILBOX = re.compile(rb"[A-Za-z][._][A-Za-z0-9]|_|[A-Za-z]\d")
"""A name before `at` that is no word."""
SAID = re.compile(rb" (?:dot|point|arr?obase) ")
RIB = re.compile(SHAPES["rib"])
FIVE_DIGITS = re.compile(rb"\d{5}(?!\d)")
IDCARD = re.compile(rb"(?=[A-Z]*\d)[B-DF-HJ-NP-TV-Z][B-DF-HJ-NP-TV-Z0-9]{8}\d?")
