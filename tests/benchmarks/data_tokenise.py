"""Tokenising and packing against Hugging Face datasets and datatrove: the same texts, tokenizer and two processes.

    python tests/benchmarks/data_tokenise.py TEXTS.jsonl TOKENIZER_FOLDER [ROUNDS] [MEGABYTES]     (needs: pip install datasets datatrove)

Each contender is a process of its own; its CPU seconds are those of all its processes, start and imports included, and
change less than wall time where the machine has other work. Ours runs the pipeline's encode stage on two processes; the
others write tokens packed into blocks of 2,048 (datasets), or documents one after the other (datatrove, on one process).
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path

SEQ_LEN = 2048


def halves(source: Path, folder: Path, megabytes: float) -> list[Path]:
    """The first megabytes of the texts in two files: a shard for each process."""
    folder.mkdir()
    paths, left = [folder / "0.jsonl", folder / "1.jsonl"], megabytes * 1e6
    with source.open("rb") as lines, paths[0].open("wb") as first, paths[1].open("wb") as second:
        for number, line in enumerate(lines):
            left -= len(line)
            if left < 0:
                break
            (first, second)[number % 2].write(line)
    return paths


def ours(paths: list[Path], tokenizer: str, out: Path) -> int:
    """Tokens of the encode stage over extracted shards."""
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(2) as pool:
        return sum(pool.map(_encode, paths, [tokenizer] * 2, [str(out)] * 2))


def _encode(path: Path, tokenizer: str, out: str) -> int:
    import numpy as np

    from data_pipelines.stages import Encode, encode
    from raytune70b.storage import Folder

    payload = Encode(Folder(path.parent), path.stem, np.zeros(0, np.int64), 0.05, Folder(tokenizer), "", SEQ_LEN)
    return encode(payload, Folder(out), path.stem)["counts"]["tokens"]


def extracted(paths: list[Path]) -> None:
    """The documents as the stage before leaves them: not part of what is timed."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import xxhash

    for path in paths:
        texts = [json.loads(line)["text"] for line in path.open("rb")]
        hashes = pa.array([xxhash.xxh3_128_digest(t.encode()) for t in texts], pa.binary(16))
        pq.write_table(pa.table({"text": texts, "chat": [False] * len(texts), "hash": hashes}), path.with_suffix(".parquet"), row_group_size=256, compression="zstd")


def datasets_map(paths: list[Path], tokenizer: str, out: Path) -> int:
    """The usual recipe: map a batched tokenizer call, then group the tokens into blocks."""
    import datasets
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    rows = datasets.load_dataset("json", data_files=[str(p) for p in paths], split="train", cache_dir=str(out))
    tokens = rows.map(lambda b: {"input_ids": [[*ids, made.eos_token_id] for ids in made(b["text"])["input_ids"]]}, batched=True, num_proc=2, remove_columns=rows.column_names)

    def grouped(batch: dict) -> dict:
        joined = list(chain.from_iterable(batch["input_ids"]))
        return {"input_ids": [joined[n : n + SEQ_LEN] for n in range(0, len(joined), SEQ_LEN)]}

    blocks = tokens.map(grouped, batched=True, num_proc=2)
    return sum(len(ids) for batch in blocks.with_format("arrow").iter(1000) for ids in batch["input_ids"])


def datatrove(paths: list[Path], tokenizer: str, out: Path) -> int:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens.tokenizer import DocumentTokenizer

    steps = [JsonlReader(str(paths[0].parent), glob_pattern="*.jsonl"),
             DocumentTokenizer(str(out / "tokens"), tokenizer_name_or_path=f"{tokenizer}/tokenizer.json", eos_token="<|end_of_text|>", shuffle_documents=False)]  # fmt: skip
    LocalPipelineExecutor(steps, tasks=2, workers=1, logging_dir=str(out / "logs")).run()  # its pool is not waited for: CPU time would be lost
    return sum(p.stat().st_size for p in (out / "tokens").rglob("*.ds")) // 4


CONTENDERS = {"ours": ours, "datasets": datasets_map, "datatrove": datatrove}


def timed(name: str, folder: Path, tokenizer: str, out: Path) -> tuple[int, float, float, int]:
    """(tokens, CPU seconds, wall seconds, peak KiB of one process) of a contender."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, __file__, "--one", name, str(folder), tokenizer, str(out)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return int(output.split()[-1]), cpu, time.monotonic() - started, after.ru_maxrss


def main() -> None:
    source, tokenizer = Path(sys.argv[1]), sys.argv[2]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "texts"
        extracted(halves(source, folder, float(sys.argv[4]) if len(sys.argv) > 4 else 60.0))
        for round_ in range(int(sys.argv[3]) if len(sys.argv) > 3 else 2):
            rates = {}
            for name in CONTENDERS:
                tokens, cpu, wall, _ = timed(name, folder, tokenizer, Path(temporary) / f"{name}{round_}")
                rates[name] = tokens / cpu
                print(f"round {round_} {name:10} {tokens:,} tokens  {cpu:.1f} CPU s  {tokens / cpu:,.0f} tokens/CPU s  wall {wall:.1f} s, {tokens / wall:,.0f} tokens/s", flush=True)
            print(f"round {round_} ratios of CPU time: datasets {rates['ours'] / rates['datasets']:.2f}x, datatrove {rates['ours'] / rates['datatrove']:.2f}x", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        _, _, name, folder, tokenizer, out = sys.argv
        print(CONTENDERS[name](sorted(Path(folder).glob("*.jsonl")), tokenizer, Path(out)))
    else:
        main()
