import numpy as np
import pyarrow.parquet as pq
import pytest

from raytune70b.blocks import stream
from raytune70b.blocks.batch import IGNORED, decode, fillers
from raytune70b.blocks.manifest import DataError, read_manifest, verify_file
from raytune70b.blocks.order import Order, share
from raytune70b.blocks.stream import BlockStream, Feed, OrderError, Reader, row_groups, validation_batches


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


@pytest.mark.parametrize("block_bytes", [1, 5000, 1 << 20])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_read_tasks_carry_the_same_steps_for_any_world_and_block_size(blocks, world, block_bytes, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK_BYTES", block_bytes)
    folder, manifest = blocks
    order = Order(row_groups(manifest, "train"), 5, 9, 8)
    feed = Feed(Reader(folder, manifest, "train"), order, 4, 2 * order.steps_per_epoch)
    assert (feed.steps_per_block(world) > 1) == (block_bytes > 1)
    for first in (0, 1, 7):
        tables = [t for start, stop in feed.tasks(first, world) for t in feed.read(start, stop, world)]
        assert {t.nbytes for t in tables} == {feed.block_bytes(world)}
        for rank in range(world):  # dealt round robin
            got = [row for t in tables[rank::world] for row in t.to_pylist() if row["step"] != stream.NO_STEP]
            expected = [(step, block) for step, ids in order.step_ids(first, feed.total_steps) for block in share(ids, rank, world, 4, -(-2 // world))]
            assert [(row["step"], row["block_id"]) for row in got] == expected
            for row in got[:: max(1, len(got) // 20)]:
                arrays = feed.reader.rows(np.array([row["block_id"]])) if row["block_id"] >= 0 else fillers(1, manifest.seq_len)
                assert all(row[name] == arrays[name][0].tolist() for name in stream.ARRAYS)


@pytest.mark.parametrize("steps", [1, 7, 3_000, 400_000])
def test_a_long_run_has_no_more_read_tasks_than_ray_makes_in_seconds(blocks, steps):
    folder, manifest = blocks
    feed = Feed(Reader(folder, manifest, "train"), Order(row_groups(manifest, "train"), 5, 9, 8), 4, steps)
    tasks = feed.tasks(0, 2)
    assert [t[0] for t in tasks] == [0, *(t[1] for t in tasks[:-1])] and tasks[-1][1] == steps and len(tasks) <= stream.READ_TASKS
    first = list(feed.read(*tasks[0], 2))[::2]
    assert [s for t in first for s in dict.fromkeys(t.column("step").to_pylist()) if s != stream.NO_STEP] == list(range(*tasks[0]))


class Dealt:
    """A worker's side of the split, without Ray: the tables that round robin gives it."""

    def __init__(self, tables):
        self.tables = tables

    def iter_batches(self, **_):
        return iter(self.tables)


def test_a_worker_trains_each_step_once_and_refuses_any_other_order(blocks):
    folder, manifest = blocks
    order = Order(row_groups(manifest, "train"), 5, 9, 8)
    feed = Feed(Reader(folder, manifest, "train"), order, 2, order.steps_per_epoch)
    tables = [t for start, stop in feed.tasks(1, 2) for t in feed.read(start, stop, 2)]
    own = list(BlockStream(Dealt(tables[1::2]), feed, 1, 1, 2))
    assert [step for step, _, _ in own] == list(range(1, order.steps_per_epoch))
    for _, ids, batches in own:
        expected = share(ids, 1, 2, 2, 2).reshape(2, 2)
        assert len(batches) == 2
        for micro, blocks_of_it in zip(batches, expected, strict=True):
            for n, block in enumerate(blocks_of_it):
                assert (micro["labels"][n] == (feed.reader.rows(np.array([block]))["labels"][0] if block >= 0 else IGNORED)).all()
    for wrong in (tables[0::2], tables[1::2][1:], tables[1::2][::-1], []):
        with pytest.raises(OrderError, match=r"the order says|the data ended"):
            list(BlockStream(Dealt(wrong), feed, 1, 1, 2))


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
