import numpy as np
import pyarrow.parquet as pq
import pytest

from raytune70b.blocks.batch import IGNORED, decode
from raytune70b.blocks.manifest import DataError, read_manifest, verify_file
from raytune70b.blocks.order import Order
from raytune70b.blocks.stream import Feed, Reader, row_groups, validation_batches


def plain_rows(folder, split):
    """Independent reading: file by file with pyarrow, arrays by the definition in words."""
    rows = []
    for path in sorted((folder.local / split).glob("*.parquet")):
        for row in pq.read_table(path).to_pylist():
            ids, labels, positions = row["input_ids"], [IGNORED] * len(row["input_ids"]), []
            spans = row["trained_spans"]
            for start, end in zip(spans[::2], spans[1::2], strict=True):
                for t in range(start, end):
                    labels[t - 1] = ids[t]
            starts = [0, *row["document_ends"]]
            for t in range(len(ids)):
                positions.append(t - max(s for s in starts if s <= t))
            rows.append((ids, labels, positions))
    return rows


def test_reader_and_decode_against_plain_pyarrow(blocks):
    folder, manifest = blocks
    rows = plain_rows(folder, "train")
    ids = np.random.default_rng(1).permutation(manifest.rows("train"))[:30]
    arrays = Reader(folder, manifest, "train").rows(ids)
    for n, block in enumerate(ids):
        assert (arrays["input_ids"][n].tolist(), arrays["labels"][n].tolist(), arrays["position_ids"][n].tolist()) == rows[block]
    assert (arrays["labels"] != IGNORED).sum() == sum(sum(x != IGNORED for x in rows[b][1]) for b in ids)


def test_manifest_counts_trained_tokens(blocks):
    folder, manifest = blocks
    table = pq.read_table(folder.local / "validation")
    assert (decode(table, manifest.seq_len)["labels"] != IGNORED).sum() == manifest.trained_tokens("validation")


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_read_tasks_carry_the_same_steps_for_any_world(blocks, world):
    folder, manifest = blocks
    order = Order(row_groups(manifest, "train"), 5, 2, 8)
    feed = Feed(Reader(folder, manifest, "train"), order, 4, 2 * order.steps_per_epoch)
    for first in (0, 1, 7):
        got: dict[int, list[int]] = {}
        tables = [t for start, stop in feed.tasks(first) for t in feed.read(start, stop, world)]
        assert len({t.nbytes for t in tables}) == 1 and tables[0].nbytes == feed.block_bytes(world)
        for table in tables:
            got.setdefault(table.column("step")[0].as_py(), []).extend(i for i in table.column("block_id").to_pylist() if i >= 0)
        assert {s: sorted(i) for s, i in got.items()} == {s: sorted(ids.tolist()) for s, ids in order.step_ids(first, feed.total_steps)}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_validation_reads_every_block_once(blocks, world):
    folder, manifest = blocks
    parts = [list(validation_batches(Reader(folder, manifest, "validation"), None, 2, rank, world)) for rank in range(world)]
    assert len({len(p) for p in parts}) == 1
    trained = sum((b["labels"] != IGNORED).sum() for p in parts for b in p)
    assert trained == manifest.trained_tokens("validation")


def test_damage_is_refused(blocks):
    folder, manifest = blocks
    path = folder.local / manifest.splits["train"][0].name
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="checksum"):
        verify_file(folder, manifest.splits["train"][0])
    with pytest.raises(DataError, match="row group"):
        Reader(folder, manifest, "train").rows(np.arange(13))
    path.write_bytes(content[:-10])
    with pytest.raises(DataError, match="bytes"):
        verify_file(folder, manifest.splits["train"][0])
    (folder.local / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="not a manifest"):
        read_manifest(folder)
