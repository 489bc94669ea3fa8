"""Reading token blocks: the training stream against mosaicml-streaming on the same blocks, batches of 8, two processes. Promised: 1x.

usage: python tests/benchmarks/data_read.py [blocks, default 16384] [seq_len, default 2048]      (needs: pip install mosaicml-streaming)

Rounds alternate between the two, so that other work on the machine meets both; each round is one shuffled epoch. The ratio is of
the speed behind the first batch, which a run waits for once; the time to it is shown too. Ours delivers token ids, labels and
position ids, checked step by step against the order; theirs the token ids alone.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from data_texts import shown, table

from data_pipelines.packing import Piece, best_fit_decreasing, blocks_table
from raytune70b.blocks.manifest import Manifest, write_block_file
from raytune70b.blocks.order import Order
from raytune70b.blocks.stream import BlockStream, Feed, Reader, dataset, row_groups
from raytune70b.storage import Folder

BATCH, ROUNDS = 8, 5


def blocks_of(count: int, seq_len: int) -> np.ndarray:
    """Random tokens, skewed as those of text are."""
    draw = np.random.default_rng(0)
    return (draw.random((count, seq_len)) ** 3 * 32_000).astype(np.int32)


def write_ours(ids: np.ndarray, folder: Path) -> Feed:
    files, seq_len = [], ids.shape[1]
    for number, start in enumerate(range(0, len(ids), 2048)):
        pieces = [Piece(row, (1, seq_len)) for row in ids[start : start + 2048]]
        table = blocks_table(pieces, best_fit_decreasing([seq_len] * len(pieces), seq_len), seq_len, 0, start)
        files.append(write_block_file(Folder(folder), f"train/{number:05d}.parquet", table, 64))
    manifest = Manifest(seq_len, 32_000, 0, "", "", {"train": tuple(files), "validation": ()})
    order = Order(row_groups(manifest, "train"), 17, 4, BATCH)
    return Feed(Reader(Folder(folder), manifest, "train"), order, BATCH, order.steps_per_epoch)


def write_theirs(ids: np.ndarray, folder: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"input_ids": f"ndarray:int32:{ids.shape[1]}"}, compression="zstd:3") as sink:
        for row in ids:
            sink.write({"input_ids": row})


def read_ours(feed: Feed) -> Iterator[int]:
    (shard,) = dataset(feed, 0, 1).streaming_split(1, equal=False)
    for _, _, batches in BlockStream(shard, feed, 0, 0, 1):
        for batch in batches:
            yield batch["input_ids"].size


def read_theirs(folder: Path) -> Iterator[int]:
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    rows = StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=17, batch_size=BATCH)
    for batch in StreamingDataLoader(rows, batch_size=BATCH, num_workers=2):
        yield batch["input_ids"].numel()


def timed(batches: Iterator[int]) -> tuple[float, float]:
    """(seconds to the first batch, tokens/s behind it)"""
    started = time.monotonic()
    next(batches)
    first = time.monotonic()
    tokens = sum(batches)
    return first - started, tokens / (time.monotonic() - first)


def main() -> None:
    import ray

    count, seq_len = (int(given) for given in [*sys.argv[1:], *("16384", "2048")[len(sys.argv) - 1 :]])
    waits: dict[str, list[float]] = {"ours": [], "mosaicml-streaming": []}
    rates: dict[str, list[float]] = {"ours": [], "mosaicml-streaming": []}
    with tempfile.TemporaryDirectory() as temporary:
        ids = blocks_of(count, seq_len)
        feed, theirs = write_ours(ids, Path(temporary) / "ours"), Path(temporary) / "theirs"
        write_theirs(ids, theirs)
        ray.init(address="local", num_cpus=2, log_to_driver=False, include_dashboard=False)
        for _ in range(ROUNDS):
            for name, batches in (("ours", read_ours(feed)), ("mosaicml-streaming", read_theirs(theirs))):
                wait, rate = timed(batches)
                waits[name].append(wait)
                rates[name].append(rate)
        ray.shutdown()
    ratios = [a / b for a, b in zip(*rates.values(), strict=True)]
    print(f"{count:,} blocks of {seq_len:,} tokens, batches of {BATCH}; median (least to most) of {ROUNDS} epochs\n")
    rows = [(name, shown([r / 1e6 for r in rates[name]], 1), shown(waits[name], 1)) for name in rates]
    print(table(("", "million tokens/s", "seconds to the first batch"), rows))
    print(f"\nratio {shown(ratios)}x")
    print(json.dumps({"ratio": statistics.median(ratios), "tokens_per_s": {name: statistics.median(found) for name, found in rates.items()}}))


if __name__ == "__main__":
    main()
