"""Reading token blocks: the training stream against mosaicml-streaming and litdata on the same blocks, batches of 8, two processes. Promised: 1x.

usage: python tests/benchmarks/data_read.py [blocks, default 16384] [seq_len, default 2048]   (needs: pip install mosaicml-streaming litdata)

Rounds alternate between them, so that other work on the machine meets all; each round is one shuffled epoch. The ratio is of
the speed behind the first batch, which a run waits for once; the time to it is shown too. Ours delivers token ids, labels and
position ids, checked step by step against the order; the others the token ids alone.
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


def write_mosaic(ids: np.ndarray, folder: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"input_ids": f"ndarray:int32:{ids.shape[1]}"}, compression="zstd:3") as sink:
        for row in ids:
            sink.write({"input_ids": row})


def write_litdata(ids: np.ndarray, folder: Path) -> None:
    """Without compression, as litdata's loader of tokens demands."""
    import torch
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    sink = BinaryWriter(str(folder), chunk_size=512 * ids.shape[1], item_loader=TokensLoader(block_size=ids.shape[1]))
    for number, row in enumerate(ids):
        sink[number] = torch.from_numpy(row)
    sink.done()
    sink.merge()


def read_ours(feed: Feed) -> Iterator[int]:
    (shard,) = dataset(feed, 0, 1).streaming_split(1, equal=False)
    for _, _, batches in BlockStream(shard, feed, 0, 0, 1):
        for batch in batches:
            yield batch["input_ids"].size


def read_mosaic(folder: Path) -> Iterator[int]:
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    rows = StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=17, batch_size=BATCH)
    for batch in StreamingDataLoader(rows, batch_size=BATCH, num_workers=2):
        yield batch["input_ids"].numel()


def read_litdata(folder: Path, seq_len: int) -> Iterator[int]:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    rows = StreamingDataset(str(folder), item_loader=TokensLoader(block_size=seq_len), shuffle=True, seed=17)
    for batch in StreamingDataLoader(rows, batch_size=BATCH, num_workers=2):
        yield batch.numel()


def timed(batches: Iterator[int], total: int) -> tuple[float, float]:
    """(seconds to the first batch, tokens/s behind it) of an epoch, which must hold `total` tokens."""
    started = time.monotonic()
    at_once = next(batches)
    first = time.monotonic()
    tokens = sum(batches)
    if at_once + tokens != total:
        raise ValueError(f"an epoch of {at_once + tokens:,} tokens where there are {total:,}")
    return first - started, tokens / (time.monotonic() - first)


def main() -> None:
    import ray

    count, seq_len = (int(given) for given in [*sys.argv[1:], *("16384", "2048")[len(sys.argv) - 1 :]])
    with tempfile.TemporaryDirectory() as temporary:
        ids = blocks_of(count, seq_len)
        mosaic, litdata = Path(temporary) / "mosaic", Path(temporary) / "litdata"
        feed = write_ours(ids, Path(temporary) / "ours")
        write_mosaic(ids, mosaic)
        write_litdata(ids, litdata)
        contenders = {
            "ours": lambda: read_ours(feed),
            "mosaicml-streaming": lambda: read_mosaic(mosaic),
            "litdata": lambda: read_litdata(litdata, seq_len),
        }
        waits: dict[str, list[float]] = {name: [] for name in contenders}
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        ray.init(address="local", num_cpus=2, log_to_driver=False, include_dashboard=False)
        for _ in range(ROUNDS):
            for name, read in contenders.items():
                wait, rate = timed(read(), ids.size)
                waits[name].append(wait)
                rates[name].append(rate)
        ray.shutdown()
    ratios = {name: [a / b for a, b in zip(rates["ours"], rates[name], strict=True)] for name in rates}
    print(f"{count:,} blocks of {seq_len:,} tokens, batches of {BATCH}; median (least to most) of {ROUNDS} epochs\n")
    rows = [(name, shown([r / 1e6 for r in rates[name]], 1), shown(ratios[name]), shown(waits[name], 1)) for name in rates]
    print(table(("", "million tokens/s", "ours by it", "seconds to the first batch"), rows))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    print(json.dumps({"ratio": {name: statistics.median(r) for name, r in ratios.items()}, "tokens_per_s": medians}))


if __name__ == "__main__":
    main()
