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
    "sms", "call", "dial", "voicemail", "(?:ring|text) (?:me|us|him|her|them)", "r?appele[rz]", "compose[rz]", "joignables?",
)  # fmt: skip
SPEAKS_SIN = _words("sin", "s\\.i\\.n\\.", "nas", "n\\.a\\.s\\.", "social insurance", "assurance sociale", end=r"[^\n]{0,32}$")
SPEAKS_SSN = _words("ssns?", r"s\.s\.n\.", "social security", "s[eé]curit[eé] sociale", end=r"[^\n]{0,32}$")
SPEAKS_NIR = _words("nir", "insee", "carte vitale", "s[eé]curit[eé] sociale", "social security", end=r"[^\n]{0,32}$")
SPEAKS_HEALTH = _words(
    "ramq", "nam", r"n\.a\.m\.", "assurance[ -]?maladie", "assurance[ -]sant[eé]", "carte[ -]soleil", "carte[ -]sant[eé]", "health (?:card|insurance|number|no|plan|coverage)s?", "ohip", "hcn", "hin",
    end=r"[^\n;]{0,56}$",
)  # fmt: skip
SPEAKS_NINO = _words("ninos?", "ni", r"n\.i\.", "national insurance", "assurance nationale", end=r"[^\n;]{0,48}$")
SPEAKS_NRN = _words(
    "registre national", "num[eé]ro national", "national (?:register|registration|number)", "belgian (?:national|register|social|id)", "rijksregister(?:nummer)?", "niss", "insz", "nrn", "rrn", "nn",
    end=r"[^\n;]{0,48}$",
)  # fmt: skip
SPEAKS_AHV = _words("avs", "ahv", "avs/ai", "assur[eé]", "swiss social", "nss", end=r"[^\n;]{0,48}$")
SPEAKS_IDNR = _words(
    "idnr", "id-nr", "steuer-?id(?:nr|entifikationsnummer)?", "steuerliche identifikationsnummer", "identifikationsnummer", "tax(?:payer)? id(?:entification)?", "tin", "identification fiscale",
    "identifiant fiscal", "num[eé]ro fiscal", end=r"[^\n;]{0,48}$",
)  # fmt: skip
SPEAKS_RVNR = _words(
    "(?:renten|sozial)versicherungs(?:nummer|nr|ausweis)", "rvnr", "sv-?(?:nummer|nr)", "versicherungsnummer", "german (?:pension|social)", "pension (?:insurance|number)", end=r"[^\n;]{0,48}$",
)  # fmt: skip
SPEAKS_IDCARD = _words(
    "personalausweis(?:es|nummer|nr)?", "ausweis(?:-?nummer|-?nr)?", "(?:identity|id) cards?", "(?:identity|id) card number", "carte (?:nationale )?d(?:'|’)identit[eé]", "cni", end=r"[^\n;]{0,48}$",
)  # fmt: skip
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
CODED = _words(
    rf"(?:{'|'.join(DOCKETS)})s?", rf"(?:{'|'.join(ISSUED)})s?[ .:#]{{0,3}}(?:{NUMBER})", rf"(?:{NUMBER}) (?:de |d')(?:{'|'.join(ISSUED)})s?", "models?", "mod[eè]les?", "skus?", "parts?", "pi[eè]ces?", "batch", "codes?", "s/n", "bolts?", "boulons?", "items?", "plans?", "lots?", "arts?", "articles?", "sections?", "containers?", "conteneurs?",
    "seal", "table", "tableau", "compteur", "meter", "colis", "ean", "upc", "barcode", end=NUMBER_END,
)  # fmt: skip
"""Before a code of letters and digits, or of as many digits, that is nobody's."""
STAFF = _words("(?:employee|personnel|staff|payroll) (?:files?|records?)", "payroll", end=NUMBER_END)
"""Before a British number where `file` alone would speak of a docket."""
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
MAIL = _words("e-?mails?", "courriels?", "m[eé]ls?", "mails?", "adresses?", "address(?:es)?", "contact(?:ez)?", "write (?:to )?", "[eé]crire", "[eé]crivez", "reach", end=r"[^\n]{0,24}$")
NOBODY = re.compile(
    rb"(?i)(?:us|me|him|her|them|it|you|we|i|look|looking|found|available|located|site|website|web|online|store|shop|here|page|that|this|more|visit|is|are|was|were|and|or|not|only|"
    rb"email|mail|address|works?|worked|employed|stayed|arrived|hosted|read|see|seen|sold|posted|published|sign|signup|up|prices?|services?|team|staff|people|jobs?|all|one|www\..*|"
    rb".*\.(?:com|org|net|ca|fr|io|pdf|html?)|v?[\d.]+)$"
)
"""What stands before `at example.com` where it is no address."""
MAILBOXES = re.compile(rb"(?i)(?:gmail|hotmail|outlook|live|msn|yahoo|ymail|icloud|me|mac|aol|gmx|proton(?:mail)?|videotron|sympatico|bell|rogers|orange|free|sfr|laposte|wanadoo|bluewin)\.[a-z.]{2,6}$")
ENGLISH_STREETS = (
    "street|str?|avenue|ave?|road|rd|drive|dr|boulevard|blvd|lane|ln|crescent|cres|court|crt|ct|close|grove|row|gardens|gdns|square|sq|place|pl|terrace|way|highway|hwy|hill|mews|walk|"
    "parade|quay|wharf|park|trail|parkway|pkwy|bishopsgate|broadway|strand|whitehall"
)
FRENCH_STREETS = (
    "rue|avenue|av|boulevard|boul|bd|bld|bvd|place|pl|chemin|ch|all(?:é|É|e)es?|impasse|quai|route|rte|rang|cours|c(?:ô|o)te|mont(?:é|e)e|square|passage|cit(?:é|e)|r(?:é|e)sidence|voie|sentier|faubourg|fbg|"
    "villa|rond-point|esplanade|promenade|lotissement|lieu-dit|hameau|zone industrielle|z\\.?i\\.?|parc d'activit(?:é|e)s"
)
BOX = r"(?:P\.? ?O\.? ?Box|C\.? ?P\.?|B\.? ?P\.?|CS|TSA)[ :]? ?\d+"
REST = r"[^\n;]{0,60}\n?[^\n;]{0,32}$"
ADDRESS = re.compile(
    (rf"(?:(?:[A-Z\x80-\xff][\w'.\x80-\xff-]*|\b\d+(?:st|nd|rd|th)) (?i:{ENGLISH_STREETS})\b\.?|(?i:\b\d+[a-z]?,? (?:[\w'.-]+ ){{0,3}}(?:{ENGLISH_STREETS})\b)"
     rf"|(?i:(?<![a-z\x80-\xff])(?:{FRENCH_STREETS})\b\.?) |\b{BOX}\b){REST}").encode()
)  # fmt: skip
"""A street, a square or a post box before a postcode, on its line or the one before."""
FRENCH_ADDRESS = re.compile(rf"(?:(?i:(?<![a-z\x80-\xff])(?:{FRENCH_STREETS})\b\.?) |\b{BOX}\b){REST}|(?:\b(?:F|FR)-|(?i:code postal) ?:? ?)$".encode())
CITY = re.compile(
    "(?:London|Londres|Manchester|Birmingham|Leeds|Glasgow|Edinburgh|Liverpool|Bristol|Cardiff|Belfast|Sheffield|Newcastle|Nottingham|Leicester|Oxford|Cambridge|Brighton|Southampton|Portsmouth|"
    "York|Bath|Exeter|Norwich|Reading|Aberdeen|Dundee|Swansea|Plymouth|Toronto|Montr(?:é|e)al|Ottawa|Vancouver|Calgary|Edmonton|Winnipeg|Halifax|Laval|Gatineau|Longueuil|Sherbrooke|Hamilton|"
    "Mississauga|Brampton|Markham|Regina|Saskatoon|Victoria|Trois-Rivi(?:è|e)res|Moncton|Fredericton|Kingston|Windsor|Kitchener|Waterloo|Burnaby|Surrey|Kelowna|Sudbury|Oshawa|Guelph|L(?:é|e)vis|Saguenay)"
    "[ ,.)\n]{1,3}$".encode()
)
POSTCODE = _words("post(?:al)? ?codes?", "zip(?: code)?", "code postal", "codes postaux", end=r"[ :.=]{0,3}(?:is|est)?[ :]{0,2}$")
BRITAIN = re.compile(rb"[,. \n]{1,2}(?:\(?U\.?K\b|United Kingdom|England|Scotland|Wales|Northern Ireland|Great Britain|Royaume-Uni|Angleterre|GB\b)")
CANADA = re.compile(rb"[,. \n]{1,2}Canada\b")
NO_CITY = re.compile("(?i)(?:euros?|eur|usd|cad|chf|francs?|dollars?|salari(?:é|e)e?s?|habitants?|actions?|parts?|unit(?:é|e)s?|employ(?:é|e)e?s?|m2|km|kg|janvier|f(?:é|e)vrier|mars|avril|mai|juin|juillet|ao(?:û|u)t|septembre|octobre|novembre|d(?:é|e)cembre)\\b".encode())
"""Behind five digits where they are no postcode."""
CEDEX = re.compile(" [A-ZÀ-Þ][^\n,;.]{1,40}? (?:CEDEX|Cedex|cedex)".encode())
NO_PATIENT = re.compile(rb"(?i)(?:page|note|from|year|case|file|unit|lots|rows|line|part|item|form|rule|reg[es]|type|plan|loan|bond|deed|year|annee|jour|mars|juin|cell|room|area|zone|code|date|fact|bill|data|step|test|user|with|that|than|over|plus|tome|vers|dans|pour|avec|issn|isbn|isin)")
"""Four letters before eight digits that are no name's."""
MONEY_AFTER = re.compile(rb" ?(?:[$%]|\xe2\x82\xac|\xc2\xa3|dollars|euros|CAD|USD|EUR|GBP|CHF|F ?CFA|[.,]\d\d(?!\d))")
MONEY_BEFORE = re.compile(rb"(?:[$]|\xe2\x82\xac|\xc2\xa3|CAD|USD|EUR|GBP|CHF) ?$")
