"""What became of every row, document and token, counted from the stages' results.

The counts add up: rows read = quarantined + dropped + duplicates + kept; tokens in = tokens in blocks + dropped. `accounts`
raises where they do not, since a data set whose counts are wrong has lost something.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from data_pipelines.duplicates import Duplicates
from data_pipelines.work import Result
from raytune70b.blocks.manifest import SPLITS


def total(results: list[Result], name: str) -> dict[str, int]:
    """The sum of a counter over all units, by key."""
    summed: Counter[str] = Counter()
    for result in results:
        summed.update(result[name])
    return dict(sorted(summed.items()))


def accounts(extracted: list[Result], duplicates: Duplicates, encoded: list[Result], seq_len: int) -> dict[str, Any]:
    """The manifest's lineage. Raises AssertionError where the counts do not add up."""
    read, done = total(extracted, "counts"), total(encoded, "counts")
    blocks = {split: sum(r["rows"][split] for r in encoded) for split in SPLITS}
    documents = {
        "read": read.get("read", 0),
        "quarantined": total(extracted, "quarantined"),
        "dropped": _sum(total(extracted, "dropped"), total(encoded, "dropped")),
        "duplicates": duplicates.counts,
        "kept": {split: done.get(f"documents_{split}", 0) for split in SPLITS},
    }
    tokens = {
        "in": done.get("tokens", 0),
        "out": done.get("tokens_out", 0),
        "dropped": total(encoded, "dropped_tokens"),
        "trained": done.get("trained_tokens", 0),
        "padding": sum(blocks.values()) * seq_len - done.get("tokens_out", 0),
    }
    check(documents, tokens)
    return {
        "documents": documents,
        "tokens": tokens,
        "blocks": blocks,
        "characters": read.get("characters", 0),
        "boilerplate_lines": read.get("boilerplate lines", 0),
        "languages": total(extracted, "languages"),
        "redactions": total(extracted, "redactions"),
    }


def _sum(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return dict(sorted((Counter(a) + Counter(b)).items()))


def check(documents: dict[str, Any], tokens: dict[str, Any]) -> None:
    """Raises AssertionError with both numbers where something was lost or counted twice."""
    ends = sum(sum(documents[name].values()) for name in ("quarantined", "dropped", "duplicates", "kept"))
    if ends != documents["read"]:
        raise AssertionError(f"{documents['read']} rows were read, but {ends} are accounted for: {documents}")
    left = tokens["out"] + sum(tokens["dropped"].values())
    if left != tokens["in"]:
        raise AssertionError(f"{tokens['in']} tokens went in, but {left} are accounted for: {tokens}")


def table(lineage: dict[str, Any]) -> list[tuple[str, str, int]]:
    """(stage, what, count) of everything that was kept and dropped, in the order of the pipeline."""
    documents, tokens = lineage["documents"], lineage["tokens"]
    rows = [("read", "rows", documents["read"])]
    rows += [("quarantine", reason, n) for reason, n in documents["quarantined"].items()]
    rows += [("clean", "boilerplate lines removed", lineage["boilerplate_lines"])]
    rows += [("language", code, n) for code, n in lineage["languages"].items()]
    rows += [("redact", kind, n) for kind, n in lineage["redactions"].items()]
    rows += [("drop", reason, n) for reason, n in documents["dropped"].items()]
    rows += [("duplicates", kind, n) for kind, n in documents["duplicates"].items()]
    rows += [("split", f"documents for {split}", n) for split, n in documents["kept"].items()]
    rows += [("tokens", "in", tokens["in"])]
    rows += [("tokens", f"dropped: {reason}", n) for reason, n in tokens["dropped"].items()]
    rows += [("tokens", name, tokens[name]) for name in ("out", "trained", "padding")]
    return rows + [("blocks", split, n) for split, n in lineage["blocks"].items()]


def printed(lineage: dict[str, Any], seconds: float) -> str:
    """The closing table of a run."""
    rows, last, lines = table(lineage), "", []
    for stage, what, count in rows:
        lines.append(f"  {stage if stage != last else '':<11} {what:<52} {count:>14,}")
        last = stage
    return "\n".join([*lines, f"  {lineage['tokens']['in'] / max(seconds, 1e-9):,.0f} tokens/s over {seconds:.1f} s"])
