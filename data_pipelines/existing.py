"""Whether a data set that is there is the one that would be made, and whole: every file has the checksum that was recorded for it.

Sizes alone would call a data set unchanged that training refuses. Costs one reading of the files, several at a time.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from data_pipelines.held_out import HELD_OUT
from data_pipelines.work import Result
from raytune70b.blocks.manifest import SPLITS, BlockFile, DataError, Manifest, read_manifest, tokenizer_digest, verify_file
from raytune70b.storage import Folder

TOKENIZER = "tokenizer"
"""In the data folder: the tokenizer's own folder."""


def existing(target: Folder, key: str) -> Manifest | None:
    """The manifest of the data set in a folder, where it was made from what `key` names and is whole."""
    try:
        manifest = read_manifest(target)
    except DataError:
        return None
    if manifest.lineage.get("key") != key:
        return None
    files = [f for split in SPLITS for f in manifest.splits[split]]
    with ThreadPoolExecutor(8) as pool:  # hashing releases the GIL
        whole = all(pool.map(lambda f: is_whole(target, f), files))
    own = target / TOKENIZER
    whole = whole and tokenizer_digest({name: own.read(name) for name, _ in own.files()}) == manifest.tokenizer
    whole = whole and target.size(HELD_OUT) is not None and target.checksum(HELD_OUT) == manifest.lineage["held_out"]
    return manifest if whole else None


def is_whole(target: Folder, file: BlockFile) -> bool:
    """Whether a file of blocks has its size and checksum."""
    try:
        verify_file(target, file)
    except DataError:
        return False
    return True


def block_file(result: Result) -> BlockFile:
    """A file of blocks, from the result of the unit that published it."""
    return BlockFile(result["name"], tuple(result["row_groups"]), result["trained_tokens"], result["bytes"], result["xxh3"])
