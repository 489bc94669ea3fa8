"""Reading token blocks: the training stream against mosaicml-streaming on the same blocks, batches of 8, two processes.

    python tests/benchmarks/data_read.py [BLOCKS] [SEQ_LEN]      (needs: pip install mosaicml-streaming)

Rounds alternate between the two, so that other work on the machine meets both; each round is one shuffled epoch. The ratio
is of the speed behind the first batch, which a run waits for once; the time to it is shown too. Ours delivers token ids, labels and position ids, checked block by block
against the order; theirs the token ids alone.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_pipelines.packing import Piece, best_fit_decreasing, blocks_table
from raytune70b.blocks.manifest import Manifest, write_block_file
from raytune70b.blocks.order import Order
from raytune70b.blocks.stream import BlockStream, Feed, Reader, dataset, row_groups
from raytune70b.storage import Folder

BATCH, ROUNDS = 8, 3


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


def main() -> None:
    import ray

    count, seq_len = (int(a) for a in [*sys.argv[1:3], "8192", "2048"][:2]) if len(sys.argv) != 2 else (int(sys.argv[1]), 2048)
    with tempfile.TemporaryDirectory() as temporary:
        ids = blocks_of(count, seq_len)
        feed = write_ours(ids, Path(temporary) / "ours")
        write_theirs(ids, Path(temporary) / "theirs")
        ray.init(address="local", num_cpus=2, log_to_driver=False, include_dashboard=False)
        ratios = []
        for round_ in range(ROUNDS):
            rates = {}
            for name, read in (("ours", lambda: read_ours(feed)), ("mosaicml-streaming", lambda: read_theirs(Path(temporary) / "theirs"))):
                started, batches = time.monotonic(), read()
                head = next(batches)
                first = time.monotonic()
                tail = sum(batches)
                rates[name] = tail / (time.monotonic() - first)
                whole = (head + tail) / (time.monotonic() - started)
                print(f"round {round_} {name}: {head + tail:,} tokens, first batch after {first - started:.1f} s, then {rates[name] / 1e6:.1f} M tokens/s; "
                      f"{whole / 1e6:.1f} M tokens/s in all", flush=True)  # fmt: skip
            ratios.append(rates["ours"] / rates["mosaicml-streaming"])
        print(f"ratio, median of {ROUNDS} rounds: {sorted(ratios)[ROUNDS // 2]:.2f}x")
        ray.shutdown()


if __name__ == "__main__":
    main()
