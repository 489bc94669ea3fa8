import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings

from raytune70b.blocks.manifest import Manifest, block_schema, write_block_file
from raytune70b.storage import Folder
from raytune70b.training.checkpoint import Cursor, cursor_bytes, folder_name

settings.register_profile("steady", derandomize=True, deadline=None)  # the verdict depends on the code alone, also on a busy machine
settings.register_profile("search", deadline=None)  # other examples each time: pytest --hypothesis-profile=search
settings.load_profile("steady")

CLUSTERS = ("end_to_end", "faults", "first_hour", "tracking/test_prometheus.py", "tracking/test_real_runs.py", "data_pipelines/test_prepare.py",
            "data_pipelines/test_bounded.py", "test_readme.py")  # fmt: skip
"""Tests that start Ray: one after the other, for two clusters on one host disturb each other."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Two processes (`pytest -n 2`): one runs what needs a Ray cluster, in order, the other all else, file by file."""
    from xdist.scheduler import LoadScopeScheduling

    class OneForRay(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid.split("::")[0].removeprefix("tests/")
            return "ray" if path.startswith(CLUSTERS) else path

    return OneForRay(config, log)


def write_blocks(folder: Folder, rows: dict[str, list[int]], seq_len: int = 16, group: int = 4, vocab: int = 64, seed: int = 0) -> Manifest:
    """A data set of random blocks; `rows` gives the blocks of each file of each split."""
    random, splits = np.random.default_rng(seed), {}
    for split, sizes in rows.items():
        files, first = [], 0
        for number, size in enumerate(sizes):
            table = pa.Table.from_pylist([random_block(random, first + n, seq_len, vocab) for n in range(size)], schema=block_schema(seq_len))
            files.append(write_block_file(folder, f"{split}/part-{number:05d}.parquet", table, group))
            first += size
        splits[split] = tuple(files)
    manifest = Manifest(seq_len, vocab, 0, "none", "none", splits)
    folder.write("manifest.json", manifest.to_json().encode())
    return manifest


def publish(checkpoints: Folder, cursor: Cursor) -> Folder:
    """A whole checkpoint of one shard that holds nothing of use."""
    folder = checkpoints / folder_name(cursor.step)
    folder.write("shard", b"x" * cursor.step)
    folder.write("cursor.json", cursor_bytes(cursor))
    files = {name: (folder.size(name), folder.checksum(name)) for name in ("shard", "cursor.json")}
    folder.write("manifest.json", json.dumps({"step": cursor.step, "world_size": 1, "files": files}).encode())
    return folder


def random_block(random: np.random.Generator, block_id: int, seq_len: int, vocab: int) -> dict:
    """A block of two documents and perhaps some padding; all but a document's first token is trained, or its second half."""
    end = int(random.integers(seq_len // 2, seq_len + 1))
    cut = int(random.integers(2, end - 2))
    ids = random.integers(1, vocab, seq_len)
    ids[end:] = 0
    spans = [1, cut, cut + (end - cut + 1) // 2, end]
    return {"block_id": block_id, "input_ids": ids.tolist(), "document_ends": [cut, end], "trained_spans": spans}


@pytest.fixture
def blocks(tmp_path):
    folder = Folder(tmp_path / "data")
    return folder, write_blocks(folder, {"train": [13, 9, 21], "validation": [7]})
