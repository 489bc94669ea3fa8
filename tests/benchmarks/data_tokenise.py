"""Tokenising and packing against Hugging Face datasets and datatrove: the same texts, tokenizer and two processes. Promised: 1.2x each.

usage: python tests/benchmarks/data_tokenise.py [rounds, default 3]   (texts, tokenizer: see data_texts.py; needs: pip install datasets datatrove)

Each contender is a process of its own that starts two; the time is wall-clock from its start to its end, imports included, and
the contenders take turns. Work is not equal: ours leaves Parquet blocks of 2,048 tokens with document ends and trained spans,
packed best-fit; `datasets` blocks cut from the joined tokens, by the usual recipe; datatrove's DocumentTokenizer each process's
documents one after the other in a file, nothing packed, its shuffle turned off. The tokenizers library takes about nine tenths
of our CPU time. `floor` is that alone: `encode_batch_fast` on two processes, nothing kept.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path

from data_texts import MEGABYTES, file_of_texts, shown, table, tokenizer_folder

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
    with ProcessPoolExecutor(2) as pool:
        return sum(pool.map(_encode, paths, [tokenizer] * 2, [str(out)] * 2))


def _encode(path: Path, tokenizer: str, out: str) -> int:
    import numpy as np

    from data_pipelines.stages import Encode, encode
    from raytune70b.storage import Folder

    payload = Encode(Folder(path.parent), path.stem, np.zeros(0, np.int64), 0.05, Folder(tokenizer), "", SEQ_LEN)
    return encode(payload, Folder(out), path.stem)["counts"]["tokens"]


def floor(paths: list[Path], tokenizer: str, out: Path) -> int:
    """The tokenizer alone."""
    with ProcessPoolExecutor(2) as pool:
        return sum(pool.map(_tokenise, paths, [tokenizer] * 2))


def _tokenise(path: Path, tokenizer: str) -> int:
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    backend, tokens, batch = Tokenizer.from_file(f"{tokenizer}/tokenizer.json"), 0, []
    for line in path.open("rb"):
        batch.append(json.loads(line)["text"])
        if len(batch) == 256:
            tokens += sum(len(e) for e in backend.encode_batch_fast(batch, add_special_tokens=False))
            batch = []
    return tokens + sum(len(e) for e in backend.encode_batch_fast(batch, add_special_tokens=False))


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

    eos = json.loads(Path(f"{tokenizer}/tokenizer_config.json").read_text())["eos_token"]
    eos = eos if isinstance(eos, str) else eos["content"]
    steps = [JsonlReader(str(paths[0].parent), glob_pattern="*.jsonl"),
             DocumentTokenizer(str(out / "tokens"), tokenizer_name_or_path=f"{tokenizer}/tokenizer.json", eos_token=eos, shuffle_documents=False)]  # fmt: skip
    LocalPipelineExecutor(steps, tasks=2, workers=2, logging_dir=str(out / "logs")).run()
    size = 4 if _vocabulary(tokenizer) > 2**16 else 2
    return sum(p.stat().st_size for p in (out / "tokens").rglob("*.ds")) // size


def _vocabulary(tokenizer: str) -> int:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(f"{tokenizer}/tokenizer.json").get_vocab_size()


CONTENDERS = {"ours": ours, "datasets": datasets_map, "datatrove": datatrove, "floor": floor}


def timed(name: str, folder: Path, tokenizer: str, out: Path) -> float:
    """Tokens a second of a contender."""
    started = time.monotonic()
    environment = {k: v for k, v in os.environ.items() if k not in ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM")}
    command = [sys.executable, __file__, "--one", name, str(folder), tokenizer, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    return int(done.stdout.split()[-1]) / (time.monotonic() - started)


def main() -> None:
    source = file_of_texts()
    tokenizer = tokenizer_folder(source)
    rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "texts"
        extracted(halves(source, folder, MEGABYTES))
        size = sum(p.stat().st_size for p in folder.glob("*.jsonl")) / 1e6
        for round_ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
            for name in CONTENDERS:
                rates[name].append(timed(name, folder, tokenizer, Path(temporary) / f"{name}{round_}"))
    ratios = {name: [a / b for a, b in zip(rates["ours"], rates[name], strict=True)] for name in CONTENDERS}
    print(f"{size:.0f} MB of rows, two processes, wall-clock; median (least to most) of {len(rates['ours'])} rounds\n")
    print(table(("", "million tokens/s", "ours by it"), [(name, shown([r / 1e6 for r in rates[name]], 3), shown(ratios[name])) for name in CONTENDERS]))
    print(json.dumps({"tokens_per_s": {n: statistics.median(r) for n, r in rates.items()}, "ratio": {n: statistics.median(r) for n, r in ratios.items()}}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        _, _, name, folder, tokenizer, out = sys.argv
        print(CONTENDERS[name](sorted(Path(folder).glob("*.jsonl")), tokenizer, Path(out)))
    else:
        main()
