"""Whether two tokenizers give the same ids: held-out texts are encoded by the data set's, so a model of another one would score noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raytune70b.config import UserError
from raytune70b.export.verify import SAMPLES

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def check_tokenizer(key: str, folder: Path, data: str, data_tokenizer: Any) -> None:
    """Compares a model folder's tokenizer, where it has one, with the data set's. Raises UserError."""
    if not any((folder / name).is_file() for name in FILES):
        return
    from transformers import AutoTokenizer

    found = difference(AutoTokenizer.from_pretrained(str(folder), local_files_only=True), data_tokenizer)
    if found is not None:
        what, theirs, ours = found
        raise UserError(f"{key}: {what}: {theirs} by the tokenizer of {folder}, {ours} by that of data.path={data}; "
                        f"give held-out data prepared with data.tokenizer={folder}, or another model")  # fmt: skip


def difference(theirs: Any, ours: Any) -> tuple[str, str, str] | None:
    """(what differs, its value by one tokenizer, by the other); None where both give the same ids.

    One may have tokens more than the other, such as an added padding token.
    """
    vocabularies = theirs.get_vocab(), ours.get_vocab()
    if not (vocabularies[0].keys() >= vocabularies[1].keys() or vocabularies[0].keys() <= vocabularies[1].keys()):
        return "the vocabularies differ", f"{len(vocabularies[0]):,} tokens", f"{len(vocabularies[1]):,} tokens"
    for token in vocabularies[1]:
        if vocabularies[0].get(token, vocabularies[1][token]) != vocabularies[1][token]:
            return f"the token {token!r} differs", f"id {vocabularies[0][token]}", f"id {vocabularies[1][token]}"
    for text in SAMPLES:
        ids = [t.encode(text, add_special_tokens=False) for t in (theirs, ours)]
        if ids[0] != ids[1]:
            return f"the ids of {text!r} differ", f"{ids[0][:6]}...", f"{ids[1][:6]}..."
    if theirs.eos_token_id != ours.eos_token_id:
        return "the token that ends an answer differs", f"{theirs.eos_token!r}", f"{ours.eos_token!r}"
    return None
