"""The words around personal data that tell it from what has the same shape, in English and French: `redact` asks for them.

Each is a pattern for the bytes before a find, or after it; a word counts where it ends within the pattern's `end`.
"""

from __future__ import annotations

import re

ACCENTED = re.compile("\\[([a-z])([à-ÿ])\\]")


def _words(*alternatives: str, end: str = r"[^\n]{0,24}$") -> re.Pattern[bytes]:
    """A pattern for the text before a find: one of the words, then at most some characters; `[eé]` stands for e, é and É."""
    pattern = rf"(?i)(?<![a-z\x80-\xff])(?:{'|'.join(alternatives)})(?![a-z\x80-\xff]){end}"
    return re.compile(ACCENTED.sub(lambda m: f"(?:{m[1]}|{m[2]}|{m[2].upper()})", pattern).encode())


SPEAKS_PHONE = _words(
    "t[eé]l[eé]?phones?", "t[eé]l", "phones?", "fax", "t[eé]l[eé]copieurs?", "t[eé]l[eé]c", "cell?", "cellulaires?", "mobiles?", "portables?", "gsm", "natel", "whatsapp",
    "sms", "call", "r?appele[rz]", "compose[rz]", "joignables?",
)  # fmt: skip
SPEAKS_SIN = _words("sin", "s\\.i\\.n\\.", "nas", "n\\.a\\.s\\.", "social insurance", "assurance sociale", end=r"[^\n]{0,32}$")
SPEAKS_SSN = _words("ssns?", r"s\.s\.n\.", "social security", "s[eé]curit[eé] sociale", end=r"[^\n]{0,32}$")
SPEAKS_NIR = _words("nir", "insee", "s[eé]curit[eé] sociale", "social security", end=r"[^\n]{0,32}$")
SPEAKS_PASSPORT = _words("passport", "passports", "passeport", "passeports", end=r"[^\n]{0,32}$")
SPEAKS_ACCOUNT = _words(
    "account", "accounts", "acct", "a/c", "compte", "comptes", "folio", "transit", "rib",
    end=r"(?:[ .:#°\-]|d'|(?:no|nos|n°|nº|number|num[eé]ro|num|bancaires?|bank|ch[eè]ques?|chequing|savings|[eé]pargne|courants?|joint|is|est|le|the|ending|in|à|a|of|de|du)(?![a-z\x80-\xff])){0,12}$",
)  # fmt: skip
SPEAKS_CARD = _words("card", "cards", "carte", "cartes", "visa", "mastercard", "amex", "american express", "discover", end=r"[^\n]{0,16}$")
DOCKETS = (
    "docket", "dossier", "file", "case", "cause", "reference", "r[eé]f[eé]rence", "r[eé]f", "invoice", "facture", "patent", "brevet", "permit", "permis", "licence", "bill",
    "gst", "hst", "tps", "tvq", "qst", "bn", "ne", "lot", "isbn", "registration", "enregistrement", "immatriculation", "matricule", "application", "demande", "order",
    "commande", "cadastre", "parcel", "parcelle", "serial", "s[eé]rie", "claim", "r[eé]clamation", "sinistre", "certificate", "certificat", "bearing", "portant(?: le)?",
    "sous le", "siren", "siret", "rcs", "neq", "ein", "tva", "vat",
)  # fmt: skip
ISSUED = (
    "police", "policy", "contract", "contrat", "company", "corporation", "soci[eé]t[eé]", "client", "customer", "member", "membre", "employee", "employ[eé]", "student", "plan",
    "model", "mod[eè]le", "project", "projet", "ticket", "tracking", "suivi", "transaction", "confirmation", "tax", "r[eè]glement", "pourvoi",
)  # fmt: skip
"""What has a number of its own, and may have a telephone too: it counts with the word number only."""
NUMBER = "nos?|n°s?|nº|numbers?|num[eé]ros?"
NUMBER_END = rf"[ .:#°(]{{0,4}}(?:{NUMBER})?[ .:#°(]{{0,3}}$"
NUMBERED = _words(NUMBER, rf"(?:{'|'.join(DOCKETS)})s?", end=NUMBER_END)
DOCKETED = _words(
    rf"(?:{'|'.join(DOCKETS)})s?", rf"(?:{'|'.join(ISSUED)})s?[ .:#]{{0,3}}(?:{NUMBER})", rf"(?:{NUMBER}) (?:de |d')(?:{'|'.join(ISSUED)})s?", end=NUMBER_END
)  # fmt: skip
"""What a grouped phone number does not follow. `Number` alone says nothing: one calls a number, too."""
COMPANY = _words("siren", "siret", "rcs", "neq", "ein", "tva", "vat", end=NUMBER_END)
"""Before the number of a company, which may have the length of a person's."""
TABULAR = _words(
    "pages", "pp", "(?:lots|units|unit[eé]s|shares|actions|titres)(?: sold| vendue?s)?", "rows?", "rang[eé]es?", "columns?", "colonnes?", "tables?", "tableaux?", "vol", "volumes?",
    "tomes?", "totals?", "totaux", "recettes", "d[eé]penses", "revenues?", "revenus?", "assets", "liabilities", "actifs?", "passifs?", "solde", "d[eé]bit", "amounts?",
    "montants?", end=r"[ .:]{0,3}$",
)  # fmt: skip
"""Before the numbers of a table, which may stand in the groups of a telephone number."""
LABEL = re.compile("(?i)(?:[:#]|°|º|(?<![a-z])(?:no|nos|num|number|num(?:e|é|É)ro)[ .]{0,2}) *$".encode())
"""What makes of grouped digits behind a word such as compte a number of an account: `compte` is a verb too."""
SECTION_WORDS = (
    "sections?", "(?<!')s", "(?<!')ss", "art", "articles?", "arts", "clauses?", "paragraphs?", r"par(?=\.)", "paragraphes?", "alin[eé]as?", "rules?", "r[eè]gles?", "schedule",
    "annexe", "chapter", "chapitre", "version", "v", "release", "firmware", "build", "item", "part", "partie", "§+",
)  # fmt: skip
SECTION = _words(
    *SECTION_WORDS, "ch", "chap", "titles?", "titres?", "points?", "paras?", "subsections?", "tables?", "tableaux?", "fig", "figures?", "recueil syst[eé]matique",
    "(?-i:RS[A-Z]{0,2}|SRL?|BSG|BLV)", end=r"[ .:]{0,2}(?:[\d.]+(?:,| and| et| to| à| or| ou|, and)? ){0,5}$",
)  # fmt: skip
"""What comes before 172.220.111.3 where it is no address. Switzerland and its cantons cite statutes so, by their collections (RS, SR, RSF, BLV)."""
SECTION_BEFORE = _words(*SECTION_WORDS, end=r"[ .]{0,2}$")
SPEAKS_IP = _words("ip", "ipv4", "ipv6", "server", "serveur", "host", "h[oô]te", "address", "adresse", "dns", "login", "connexion", "logged", "gateway", "passerelle")
PROVINCE = _words("ab", "bc", "mb", "nb", "nl", "ns", "nt", "nu", "on", "pe", "qc", "sk", "yt", "ontario", "qu[eé]bec", "alberta", "manitoba", "saskatchewan",
                  "columbia", "colombie-britannique", "postal code", "code postal", end=r"[ ,):.]{0,3}$")  # fmt: skip
MONEY_AFTER = re.compile(rb" ?(?:[$%]|\xe2\x82\xac|\xc2\xa3|dollars|euros|CAD|USD|EUR|GBP|CHF|F ?CFA|[.,]\d\d(?!\d))")
MONEY_BEFORE = re.compile(rb"(?:[$]|\xe2\x82\xac|\xc2\xa3|CAD|USD|EUR|GBP|CHF) ?$")
