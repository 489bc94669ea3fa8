"""The stream's start at 300,000 and at 30 million blocks: seconds to the first batch, and what Ray Data's read tasks weigh. Promised: within 2x, under 50 kB a task.

usage: python tests/benchmarks/size_stream.py [rounds, default 3]

Both data sets are real files in the same layout (row groups of 256 blocks, 16,384 blocks a file), of 8 tokens a block, since
only their number matters here. Each is read from its beginning and from 85 % of its steps, as after a recovery, by two
workers; rounds alternate.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from data_texts import shown, table

from raytune70b.blocks.manifest import BlockFile, Manifest, block_schema
from raytune70b.blocks.order import Order
from raytune70b.blocks.stream import BlockStream, Feed, Reader, dataset, row_groups
from raytune70b.storage import Folder

SIZES, SEQ_LEN, ROW_GROUP, FILE_BLOCKS, GLOBAL_BATCH, WORLD = (300_000, 30_000_000), 8, 256, 16_384, 128, 2


def write(folder: Path, blocks: int) -> Feed:
    """A data set of so many blocks, each one document of eight tokens."""
    (folder / "train").mkdir(parents=True)
    files = []
    for first in range(0, blocks, FILE_BLOCKS):
        rows = min(FILE_BLOCKS, blocks - first)
        flat, ends = pa.array(np.ones(rows * SEQ_LEN, np.int32)), pa.array(np.full(rows, SEQ_LEN, np.int32))
        spans = pa.array(np.tile(np.array([1, SEQ_LEN], np.int32), rows))
        columns = [
            pa.array(np.arange(first, first + rows)), pa.FixedSizeListArray.from_arrays(flat, SEQ_LEN),
            pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32), ends), pa.ListArray.from_arrays(np.arange(0, 2 * rows + 1, 2, dtype=np.int32), spans),
        ]  # fmt: skip
        name = f"train/part-{len(files):06d}.parquet"
        pq.write_table(pa.Table.from_arrays(columns, schema=block_schema(SEQ_LEN)), folder / name, row_group_size=ROW_GROUP, use_dictionary=False, write_statistics=False)
        groups = tuple(min(ROW_GROUP, rows - start) for start in range(0, rows, ROW_GROUP))
        files.append(BlockFile(name, groups, rows * (SEQ_LEN - 1), 0, ""))
    manifest = Manifest(SEQ_LEN, 32_000, 0, "", "", {"train": tuple(files), "validation": ()})
    order = Order(row_groups(manifest, "train"), 17, 4, GLOBAL_BATCH)
    return Feed(Reader(Folder(folder), manifest, "train"), order, 2, order.steps_per_epoch)


def first_batch(feed: Feed, first: int) -> float:
    """Seconds until every worker has its first step, checked."""
    begin = time.monotonic()
    shards = dataset(feed, first, WORLD).streaming_split(WORLD, equal=False)  # begins when all ask
    with ThreadPoolExecutor(WORLD) as pool:
        list(pool.map(lambda rank: next(iter(BlockStream(shards[rank], feed, first, rank, WORLD))), range(WORLD)))
    return time.monotonic() - begin


def weights(feed: Feed, first: int) -> list[int]:
    """Bytes of each read task as Ray keeps it in its object store."""
    import ray
    from ray.experimental.locations import get_local_object_locations

    found = dataset(feed, first, WORLD)
    tasks = [ray.put(task) for task in found._logical_plan.dag.datasource_or_legacy_reader.get_read_tasks(1)]
    return [place["object_size"] for place in get_local_object_locations(tasks).values()]


def main() -> None:
    import ray

    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory() as temporary:
        feeds = {blocks: write(Path(temporary) / str(blocks), blocks) for blocks in SIZES}
        ray.init(address="local", num_cpus=2, log_to_driver=False, include_dashboard=False)
        first_batch(feeds[SIZES[0]], 0)  # Ray starts its first processes
        cases = [(blocks, share) for blocks in SIZES for share in (0.0, 0.85)]
        waits: dict[tuple[int, float], list[float]] = {case: [] for case in cases}
        for _ in range(rounds):
            for blocks, share in cases:
                waits[blocks, share].append(first_batch(feeds[blocks], int(share * feeds[blocks].total_steps)))
        heavy = {case: weights(feeds[case[0]], int(case[1] * feeds[case[0]].total_steps)) for case in cases}
        ray.shutdown()
    rows = []
    for blocks, share in cases:
        ratios = [b / a for a, b in zip(waits[SIZES[0], share], waits[blocks, share], strict=True)]
        rows.append((f"{blocks:,}", f"{int(share * feeds[blocks].total_steps):,}", shown(waits[blocks, share], 2), shown(ratios), str(len(heavy[blocks, share])), f"{max(heavy[blocks, share]):,}"))
    print(f"{WORLD} workers, global batch {GLOBAL_BATCH}; median (least to most) of {rounds} rounds\n")
    print(table(("blocks", "from step", "seconds to the first batch", f"by that at {SIZES[0]:,}", "read tasks", "bytes of the largest"), rows))
    print(json.dumps({"seconds": {f"{b} {s}": w for (b, s), w in waits.items()}}))


if __name__ == "__main__":
    main()
