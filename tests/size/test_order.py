"""The order and the stream's start at 30 million blocks cost what they cost at 300,000."""

import json
import pickle

import cloudpickle
import numpy as np
import pytest
import xxhash

from raytune70b.blocks.manifest import read_manifest
from raytune70b.blocks.order import Order
from raytune70b.blocks.stream import READ_TASKS, Feed, Reader, read_tasks, row_groups
from raytune70b.storage import Folder
from tests.size.made import BLOCKS, GLOBAL_BATCH, WINDOW, manifest

pytestmark = pytest.mark.size


class Counting(Order):
    """An order that counts the windows and epochs it makes."""

    def window_ids(self, epoch, number):
        made.append(number)
        return super().window_ids(epoch, number)


made: list[int] = []


@pytest.fixture(scope="module")
def large():
    return manifest()


def feed(blocks, order=Counting) -> Feed:
    sizes = row_groups(blocks, "train")
    whole = order(sizes, 17, WINDOW, GLOBAL_BATCH)
    return Feed(Reader(Folder("/nowhere"), blocks, "train"), whole, 2, whole.steps_per_epoch)


GOLDEN = {(256, 0, 10): "130b14ab3aa2944b7963c3ae00b86581", (256, 200_000, 200_010): "ae91968420819fe2ef9d60494b30f937",
          (256, 234_370, 234_380): "e8f486a9dbf1e6b5e3c1345804827e16", (64, 0, 3): "a8acfe6868b90fd6145c46b7b2c2e547",
          (64, 200_000, 200_003): "7146df1e00af222d645970a89f433b81"}  # fmt: skip
"""(blocks a row group, first step, stop): digest of the ids by version 0.1.0's first code, which made every window anew for each."""


@pytest.mark.parametrize("rows", [256, 64])
def test_the_order_is_what_it_was(rows):
    order = Order(np.full(-(-BLOCKS // rows), rows), 17, WINDOW, GLOBAL_BATCH)
    for (_, first, stop), expected in ((key, value) for key, value in GOLDEN.items() if key[0] == rows):
        digest = xxhash.xxh3_128()
        for step, ids in order.step_ids(first, stop):
            digest.update(np.int64(step).tobytes() + np.int64(len(ids)).tobytes() + ids.tobytes())
        assert digest.hexdigest() == expected


@pytest.mark.parametrize("first", [0, 117_000, 200_000])
def test_steps_make_the_windows_that_they_touch(large, first):
    order = feed(large).order
    made.clear()
    ids = [ids for _, ids in order.step_ids(first, first + 1000)]
    assert len(made) == len(set(made)) <= 1000 * GLOBAL_BATCH // (WINDOW * 64) + 2 and sum(map(len, ids)) == 1000 * GLOBAL_BATCH


def test_a_whole_epoch_makes_each_window_once(large):
    order = feed(large).order
    made.clear()
    seen = np.zeros(BLOCKS, bool)
    for _, ids in order.step_ids(0, order.steps_per_epoch):
        assert not seen[ids].any()
        seen[ids] = True
    assert seen.all() and made == list(range(len(order.epoch(0).starts) - 1))


@pytest.mark.parametrize("world", [16, 1024])
@pytest.mark.parametrize("first", [0, 200_000])
def test_a_read_task_carries_a_range(large, world, first):
    """However large the data set: under 1 kB beside the reference to what all share, which is in the object store once."""
    small = feed(manifest(300_000))
    sizes = {}
    for name, whole in (("small", small), ("large", feed(large))):
        tasks = read_tasks(b"a reference in Ray's store, 28", whole, min(first, whole.total_steps // 2), world)
        assert len(tasks) <= READ_TASKS
        sizes[name] = max(len(cloudpickle.dumps(task)) for task in tasks)
    assert sizes["large"] - sizes["small"] < 100 and sizes["large"] < 1000


def test_a_resume_late_in_a_run_makes_and_reads_nothing_of_what_is_trained(large):
    """At step 200,000: one window, and the row groups of the blocks that are still to come."""
    read = []

    class Recorded(Reader):
        def rows(self, ids):
            read.extend(ids.tolist())
            return {name: np.zeros((len(ids), large.seq_len), np.int32) for name in ("input_ids", "labels", "position_ids")}

    whole = feed(large)
    recorded = Feed(Recorded(Folder("/nowhere"), large, "train"), whole.order, 2, whole.total_steps)
    start, stop = recorded.tasks(200_000, 16)[0]
    assert start == 200_000
    made.clear()
    next(recorded.read(start, stop, 16))
    trained = set(np.concatenate([ids for _, ids in whole.order.step_ids(199_000, 200_000)]).tolist())
    assert made[0] == 200_000 * GLOBAL_BATCH // (WINDOW * 64) and not trained & set(read) and len(read) <= 2 * WINDOW * 64


def test_the_manifest_is_light(large, tmp_path):
    """A MB and a half in the object store, once; the same text, digest and row groups after a round trip."""
    text = large.to_json()
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True, ensure_ascii=False)
    Folder(tmp_path).write("manifest.json", text.encode())
    again = read_manifest(Folder(tmp_path))
    assert again == large and again.digest == large.digest == xxhash.xxh3_128_hexdigest(text.encode())
    assert len(pickle.dumps(large)) < 2 << 20 and row_groups(again, "train").sum() == BLOCKS == again.rows("train")
