"""The words around personal data that tell it from what has the same shape, in English and French: `redact` asks for them.

Each is a pattern for the bytes before a find, or after it; a word counts where it ends within the pattern's `end`.
"""

from __future__ import annotations

import re


def _words(*alternatives: str, end: str = r"[^\n]{0,24}$") -> re.Pattern[bytes]:
    """A pattern for the text before a find: one of the words, then at most some characters; `[eé]` stands for e, é and É."""
    pattern = rf"(?i)(?<![a-z\x80-\xff])(?:{'|'.join(alternatives)})(?![a-z\x80-\xff]){end}".replace("[eé]", "(?:e|é|É)")
    return re.compile(pattern.encode())


SPEAKS_PHONE = _words(
    "t[eé]l[eé]?phone", "t[eé]l", "phone", "fax", "t[eé]l[eé]copieur", "t[eé]l[eé]c", "cell", "cellulaire", "mobile", "portable", "call", "appelez",
)  # fmt: skip
SPEAKS_SIN = _words("sin", "s\\.i\\.n\\.", "nas", "n\\.a\\.s\\.", "social insurance", "assurance sociale", end=r"[^\n]{0,32}$")
SPEAKS_SSN = _words("ssns?", r"s\.s\.n\.", "social security", "s[eé]curit[eé] sociale", end=r"[^\n]{0,32}$")
SPEAKS_NIR = _words("nir", "insee", "s[eé]curit[eé] sociale", "social security", end=r"[^\n]{0,32}$")
SPEAKS_PASSPORT = _words("passport", "passports", "passeport", "passeports", end=r"[^\n]{0,32}$")
SPEAKS_ACCOUNT = _words(
    "account", "accounts", "acct", "a/c", "compte", "comptes", "folio", "transit",
    end=r"(?:[ .:#°]|d'|(?:no|nos|n°|nº|number|num[eé]ro|num|bancaire|bank|ch[eè]ques?|chequing|savings|[eé]pargne|is|est|le|the|ending|in|à|a|of|de|du)(?![a-z\x80-\xff])){0,12}$",
)  # fmt: skip
SPEAKS_CARD = _words("card", "cards", "carte", "cartes", "visa", "mastercard", "amex", "american express", "discover", end=r"[^\n]{0,16}$")
NUMBERED = _words(
    "no", "nos", "n°", "nº", "num[eé]ro", "number", "docket", "dossier", "file", "case", "cause", "reference", "r[eé]f[eé]rence", "r[eé]f", "invoice", "facture",
    "patent", "brevet", "permit", "permis", "licence", "bill", "gst", "hst", "tps", "tvq", "qst", "bn", "ne", "lot", "isbn", "registration", "enregistrement",
    "application", "demande", "order", "commande", "cadastre",
    end=r"[ .:#°(]{0,4}(?:no|n°|nº|number|num[eé]ro)?[ .:#°(]{0,3}$",
)  # fmt: skip
LABEL = re.compile("(?i)(?:[:#]|°|º|(?<![a-z])(?:no|nos|num|number|num(?:e|é|É)ro)[ .]{0,2}) *$".encode())
"""What makes of grouped digits behind a word such as compte a number of an account: `compte` is a verb too."""
SECTION_WORDS = (
    "sections?", "(?<!')s", "(?<!')ss", "art", "articles?", "arts", "clauses?", "paragraphs?", "par", "paragraphes?", "alin[eé]as?", "rules?", "r[eè]gles?", "schedule",
    "annexe", "chapter", "chapitre", "version", "v", "release", "firmware", "build", "item", "part", "partie", "§+",
)  # fmt: skip
SECTION = _words(*SECTION_WORDS, end=r"[ .:]{0,2}(?:[\d.]+(?:,| and| et| to| à| or| ou|, and)? ){0,5}$")
SECTION_BEFORE = _words(*SECTION_WORDS, end=r"[ .]{0,2}$")
SPEAKS_IP = _words("ip", "ipv4", "ipv6", "server", "serveur", "host", "h[oô]te", "address", "adresse", "dns", "login", "connexion", "logged", "gateway", "passerelle")
PROVINCE = _words("ab", "bc", "mb", "nb", "nl", "ns", "nt", "nu", "on", "pe", "qc", "sk", "yt", "ontario", "qu[eé]bec", "alberta", "manitoba", "saskatchewan",
                  "columbia", "colombie-britannique", "postal code", "code postal", end=r"[ ,):.]{0,3}$")  # fmt: skip
MONEY_AFTER = re.compile(rb" ?(?:[$%]|\xe2\x82\xac|\xc2\xa3|dollars|euros|CAD|USD|EUR|[.,]\d\d(?!\d))")
MONEY_BEFORE = re.compile(rb"(?:[$]|\xe2\x82\xac|\xc2\xa3|CAD|USD|EUR) ?$")
