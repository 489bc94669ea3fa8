"""A small bilingual (English, French) legal corpus, made on the spot: nothing is downloaded, nothing is real.

Promises: the same seed gives the same bytes; contracts, statutes, instruction triples and conversations in both
languages; personal data that a redaction must find, near copies that a deduplication must find, and rows that no
reader can read. A model of two layers learns the language in one epoch, since its sentences come from a grammar, and the form
of the answers; some it answers right. Costs about one second for the 2 MB of the embedded default.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raytune70b.blocks.manifest import MANIFEST
from raytune70b.schema import Config, Data
from raytune70b.storage import Folder

SEED = 2026

ENGLISH = {
    "party": ["the Supplier", "the Client", "the Lender", "the Borrower", "the Landlord", "the Tenant", "the Licensor", "the Licensee",
              "the Employer", "the Contractor", "the Trustee", "the Guarantor"],
    "duty": ["shall deliver", "shall pay", "shall disclose", "shall preserve", "may terminate", "may assign", "shall not transfer",
             "shall indemnify the other party for", "shall keep confidential", "shall insure", "may inspect", "shall register"],
    "object": ["the goods described in the schedule", "all amounts due under this agreement", "the books and records", "the leased premises",
               "any trade secret received", "the collateral", "the intellectual property", "every defect found on inspection",
               "the security deposit", "the statement of account", "the insurance policy", "the personal information of customers"],
    "when": ["within thirty days of written notice", "before the closing date", "upon the request of the other party",
             "no later than the last day of each quarter", "for as long as this agreement is in force", "after a default has occurred",
             "without undue delay", "in accordance with section 12 of the Act", "during normal business hours", "as soon as practicable"],
    "unless": ["unless the parties agree otherwise in writing", "subject to the limits set out in the schedule",
               "except where the law forbids it", "save in case of force majeure", "provided that no fee is charged",
               "notwithstanding any earlier agreement"],
    "heading": ["Definitions", "Term", "Payment", "Confidentiality", "Warranties", "Liability", "Termination", "Assignment", "Notices",
                "Governing law", "Insurance", "Dispute resolution"],
    "act": ["Commercial Tenancies Act", "Consumer Credit Act", "Personal Information Act", "Securities Transfer Act", "Income Tax Act",
            "Employment Standards Act", "Land Registration Act", "Insolvency Act"],
    "kind": ["SERVICE AGREEMENT", "LEASE AGREEMENT", "LOAN AGREEMENT", "LICENCE AGREEMENT", "SUPPLY AGREEMENT", "GUARANTEE"],
}  # fmt: skip
FRENCH = {
    "party": ["le Fournisseur", "le Client", "le Prêteur", "l'Emprunteur", "le Bailleur", "le Locataire", "le Concédant", "le Licencié",
              "l'Employeur", "l'Entrepreneur", "le Fiduciaire", "la Caution"],
    "duty": ["doit livrer", "doit payer", "doit divulguer", "doit conserver", "peut résilier", "peut céder", "ne peut transférer",
             "doit indemniser l'autre partie pour", "doit garder confidentiels", "doit assurer", "peut inspecter", "doit enregistrer"],
    "object": ["les biens décrits à l'annexe", "toute somme due en vertu de la présente convention", "les livres et registres",
               "les lieux loués", "tout secret commercial reçu", "les biens grevés", "la propriété intellectuelle",
               "tout vice constaté lors de l'inspection", "le dépôt de garantie", "l'état de compte", "la police d'assurance",
               "les renseignements personnels des clients"],
    "when": ["dans les trente jours d'un avis écrit", "avant la date de clôture", "à la demande de l'autre partie",
             "au plus tard le dernier jour de chaque trimestre", "tant que la présente convention est en vigueur", "après un défaut",
             "sans retard injustifié", "conformément à l'article 12 de la Loi", "durant les heures normales de bureau", "dès que possible"],
    "unless": ["sauf entente contraire écrite des parties", "sous réserve des limites prévues à l'annexe", "sauf si la loi l'interdit",
               "sauf en cas de force majeure", "pourvu qu'aucuns frais ne soient exigés", "malgré toute entente antérieure"],
    "heading": ["Définitions", "Durée", "Paiement", "Confidentialité", "Garanties", "Responsabilité", "Résiliation", "Cession", "Avis",
                "Droit applicable", "Assurance", "Règlement des différends"],
    "act": ["Loi sur les baux commerciaux", "Loi sur le crédit à la consommation", "Loi sur les renseignements personnels",
            "Loi sur le transfert des valeurs mobilières", "Loi de l'impôt sur le revenu", "Loi sur les normes d'emploi",
            "Loi sur la publicité foncière", "Loi sur la faillite"],
    "kind": ["CONTRAT DE SERVICE", "BAIL COMMERCIAL", "CONTRAT DE PRÊT", "CONTRAT DE LICENCE", "CONTRAT D'APPROVISIONNEMENT", "CAUTIONNEMENT"],
}  # fmt: skip
GIVEN = ["Alice", "Benoît", "Chloé", "David", "Élise", "Frank", "Geneviève", "Hugo", "Irene", "Jérôme", "Karen", "Luc"]
FAMILY = ["Tremblay", "Smith", "Gagnon", "Brown", "Roy", "Martin", "Côté", "Wilson", "Bouchard", "Campbell", "Gauthier", "Morin"]
Draw = random.Random


def _sentence(draw: Draw, words: dict[str, list[str]]) -> str:
    parts = [draw.choice(words["party"]), draw.choice(words["duty"]), draw.choice(words["object"]), draw.choice(words["when"])]
    text = " ".join(parts) + (f", {draw.choice(words['unless'])}" if draw.random() < 0.5 else "")
    return text[0].upper() + text[1:] + "."


def _with_check_digit(digits: str) -> str:
    """The digits with the Luhn check digit that makes the whole valid."""
    total = sum(sum(divmod(int(d) * (2 if n % 2 == 0 else 1), 10)) for n, d in enumerate(reversed(digits)))
    return digits + str(-total % 10)


def _contact(draw: Draw, french: bool) -> str:
    given, family = draw.choice(GIVEN), draw.choice(FAMILY)
    mail = f"{given}.{family}@example.{draw.choice(['ca', 'com', 'org'])}".lower()
    mail = mail.translate(str.maketrans("éèêôîë", "eeeoie"))
    phone = f"({draw.choice([416, 514, 613, 819])}) {draw.randint(200, 999)}-{draw.randint(0, 9999):04d}"
    sin = _with_check_digit(str(draw.randint(1, 7)) + f"{draw.randint(0, 9999999):07d}")
    sin = f"{sin[:3]} {sin[3:6]} {sin[6:]}"
    if french:
        return f"{given} {family}, courriel {mail}, téléphone {phone}, NAS {sin}."
    return f"{given} {family}, e-mail {mail}, telephone {phone}, SIN {sin}."


def _contract(draw: Draw, french: bool) -> str:
    words = FRENCH if french else ENGLISH
    between = "ENTRE" if french else "BETWEEN"
    lines = [draw.choice(words["kind"]), "", f"{between}: {_contact(draw, french)}", f"{'ET' if french else 'AND'}: {_contact(draw, french)}", ""]
    for number, heading in enumerate(draw.sample(words["heading"], draw.randint(4, 8)), 1):
        lines += [f"{number}. {heading}", " ".join(_sentence(draw, words) for _ in range(draw.randint(2, 4))), ""]
    return "\n".join(lines)


def _statute(draw: Draw, french: bool) -> str:
    words = FRENCH if french else ENGLISH
    lines = [f"{draw.choice(words['act'])}, {'L.R.Q.' if french else 'R.S.C.'} {draw.randint(1970, 2020)}, c. {draw.choice('ABCDEP')}-{draw.randint(1, 60)}", ""]
    first = draw.randint(1, 400)
    for number in range(first, first + draw.randint(4, 9)):
        name = "Article" if french else "Section"
        lines += [f"{name} {number}", " ".join(_sentence(draw, words) for _ in range(draw.randint(2, 4))), ""]
    return "\n".join(lines)


def _triple(draw: Draw, french: bool) -> dict[str, str]:
    """A question about one clause; its answer stands in the clause."""
    words = FRENCH if french else ENGLISH
    party, duty, thing, when = (draw.choice(words[k]) for k in ("party", "duty", "object", "when"))
    clause = f"{party[0].upper()}{party[1:]} {duty} {thing} {when}."
    if french:
        asked = {"Quand cette obligation doit-elle être exécutée ?": when, "Qui est visé par cette clause ?": party, "Sur quoi porte cette clause ?": thing}
    else:
        asked = {"When must this be done?": when, "Who is bound by this clause?": party, "What does this clause concern?": thing}
    question, answer = draw.choice(list(asked.items()))
    return {"instruction": question, "input": clause, "output": answer[0].upper() + answer[1:] + "."}


def _chat(draw: Draw, french: bool) -> dict[str, list[dict[str, str]]]:
    system = "Vous êtes un assistant juridique." if french else "You are a legal assistant."
    messages = [{"role": "system", "content": system}] if draw.random() < 0.5 else []
    for _ in range(draw.randint(1, 3)):
        triple = _triple(draw, french)
        messages.append({"role": "user", "content": f"{triple['input']} {triple['instruction']}"})
        messages.append({"role": "assistant", "content": triple["output"]})
    return {"messages": messages}


def _near_copy(draw: Draw, text: str) -> str:
    """The text with one sentence's last word changed: a copy that only a near-duplicate search finds."""
    sentences = text.split(". ")
    at = draw.randrange(len(sentences))
    sentences[at] = sentences[at].rsplit(" ", 1)[0] + " aforesaid"
    return ". ".join(sentences)


def _lines(rows: list[dict], broken: dict[int, bytes]) -> bytes:
    """JSON lines, with the broken ones put in before the row of that number."""
    out = []
    for number, row in enumerate(rows):
        if number in broken:
            out.append(broken[number])
        out.append(json.dumps(row, ensure_ascii=False).encode())
    return b"\n".join(out) + b"\n"


def write_sample(folder: Path, scale: float = 1.0, seed: int = SEED) -> list[Path]:
    """Writes the corpus' files below `folder`; `scale` multiplies the number of documents. Returns the files."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)

    def many(make: Callable[[Draw, bool], object], count: int) -> list:
        return [make(draw, n % 2 == 1) for n in range(max(2, int(count * scale)))]

    contracts, statutes = many(_contract, 420), many(_statute, 420)
    contracts += [_near_copy(draw, text) for text in contracts[::25]] + contracts[::40]
    rows = [{"id": n, "text": text} for n, text in enumerate(contracts)]
    broken = {3: b'{"id": 3, "text": "cut off in the mid', 9: b"not JSON at all", 11: b'{"id": 11, "text": null}', 12: b'{"id": 12, "text": "\xff\xfe"}'}
    files = {
        "contracts.jsonl": _lines(rows, broken),
        "instructions.jsonl.gz": gzip.compress(_lines(many(_triple, 7000), {5: b'{"instruction": "What?", "output": 7}'}), mtime=0),
        "conversations.jsonl": _lines(many(_chat, 1500), {7: b'{"messages": []}'}),
        "notice.txt": "\n\n".join(_statute(draw, n % 2 == 1) for n in range(4)).encode(),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    pq.write_table(pa.table({"text": statutes, "year": [1990 + n % 30 for n in range(len(statutes))]}), folder / "statutes.parquet", row_group_size=128)
    return sorted(p for p in folder.iterdir() if p.is_file())


def prepare_where_missing(config: Config) -> None:
    """Makes the embedded data set before a first run that names no other. A `data.path` of the user's own is never filled with it: it may be misspelt."""
    if config.data.path == Data().path and config.data.inputs == ["sample"] and not Folder(config.data.path).exists(MANIFEST):
        from data_pipelines.build import prepare

        prepare(config)
