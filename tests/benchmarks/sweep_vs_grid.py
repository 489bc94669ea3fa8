"""What a sweep finds against an exhaustive grid of full runs, and for what share of its tokens.

    python tests/benchmarks/sweep_vs_grid.py [SEEDS] [FOLDER]

For each seed: a grid of nine learning rates, a factor of two apart, each a full run; a sweep over the same range with trials on a
quarter of the data; and the full run at the rate which the sweep carried over. The text is drawn from a Markov chain, so that it has
a floor that no model gets below, as natural text has. Prints one line a seed and the worst of each figure; exit code 1 when a loss
is more than 1 % above the grid's best or a sweep took more than 35 % of the grid's tokens.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import ray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from raytune70b import cluster
from raytune70b.blocks.manifest import Manifest, block_schema, write_block_file
from raytune70b.config import compose
from raytune70b.storage import Folder
from raytune70b.sweep.fit import spaced
from raytune70b.sweep.points import Point, Result, read_results, write_result
from raytune70b.sweep.run import prepare_sweep, run
from raytune70b.sweep.setting import full_tokens, space, sweep_folder
from raytune70b.sweep.stages import Stage
from raytune70b.sweep.trials import run_stage
from raytune70b.training.prepared import Prepared

VOCAB, SEQ, SUCCESSORS = 256, 32, 8
BLOCKS = {"train": 4096, "validation": 256}
LOW, HIGH, RATES = 0.0015625, 0.4, 9
SETTINGS = [
    "model.config.model_type=llama", "model.config.hidden_size=32", "model.config.intermediate_size=64", "model.config.num_hidden_layers=1",
    "model.config.num_attention_heads=2", "model.config.num_key_value_heads=2", "model.config.max_position_embeddings=64", "model.precision=fp32",
    "train.global_batch_size=16", "train.micro_batch_size=16", "train.warmup_steps=20", "train.learning_rate=0.01",
    f"sweep.low={LOW}", f"sweep.high={HIGH}", "sweep.batch_factors=[]", "sweep.warmup_factors=[]", "sweep.workers=1",
    "tracking.mlflow=null", "cluster.dashboard=false",
]  # fmt: skip


def markov_text(blocks: int, seed: int) -> np.ndarray:
    """int32 [blocks, SEQ]: seven times in ten one of eight successors of the token before, else any token; both by Zipf's law."""
    chain, draw = np.random.default_rng(0), np.random.default_rng(seed)
    successors = chain.integers(0, VOCAB, (VOCAB, SUCCESSORS))
    near, far = 1 / np.arange(1, SUCCESSORS + 1), 1 / np.arange(1, VOCAB + 1)
    text = np.empty((blocks, SEQ), np.int32)
    text[:, 0] = draw.choice(VOCAB, blocks, p=far / far.sum())
    for t in range(1, SEQ):
        follow = successors[text[:, t - 1], draw.choice(SUCCESSORS, blocks, p=near / near.sum())]
        text[:, t] = np.where(draw.random(blocks) < 0.7, follow, draw.choice(VOCAB, blocks, p=far / far.sum()))
    return text


def write_data(folder: Folder) -> None:
    splits = {}
    for number, (split, count) in enumerate(BLOCKS.items()):
        text = markov_text(count, number + 1)
        rows = [{"block_id": n, "input_ids": row.tolist(), "document_ends": [SEQ], "trained_spans": [1, SEQ]} for n, row in enumerate(text)]
        splits[split] = (write_block_file(folder, f"{split}/0.parquet", pa.Table.from_pylist(rows, schema=block_schema(SEQ)), 64),)
    folder.write("manifest.json", Manifest(SEQ, VOCAB, 0, "none", "none", splits).to_json().encode())


def full_runs(prepared: Prepared, points: list[Point]) -> list[Result]:
    """Full runs at these points, to their ends: trials on all the data. Those that are there already are read."""
    config = prepared.config
    whole = dataclasses.replace(prepared, config=dataclasses.replace(config, sweep=dataclasses.replace(config.sweep, name="grid", data_fraction=1.0)))
    folder = sweep_folder(whole.config)
    missing = tuple(p for p in dict.fromkeys(points) if p not in read_results(folder))
    if missing:
        run_stage(whole, folder, Stage("grid", missing, {}), {}, lambda result, running: write_result(folder, result), lambda: False)
    results = read_results(folder)
    return [results[p] for p in points]


def one_seed(seed: int, data: Folder, path: Path) -> dict[str, float]:
    prepared = prepare_sweep(compose([*SETTINGS, f"data.path={data.uri}", f"run.path={path / f'seed-{seed}'}", f"run.seed={seed}"]))
    cluster.start(prepared.config)
    assert run(prepared) == 0
    folder = sweep_folder(prepared.config)
    start, chosen = space(prepared).start, json.loads(folder.read("answer.json"))["point"]["learning_rate"]
    rates = spaced(LOW, HIGH, RATES)
    *grid, mine = full_runs(prepared, [dataclasses.replace(start, learning_rate=rate) for rate in (*rates, chosen)])
    best = min((r for r in grid if r.loss is not None), key=lambda r: r.loss or 0.0)
    assert best.loss is not None and mine.loss is not None
    tokens = sum(r.tokens for r in read_results(folder).values())
    figures = {"chosen": chosen, "loss": mine.loss, "grid_rate": best.point.learning_rate, "grid_loss": best.loss,
               "above": mine.loss / best.loss - 1, "tokens": tokens / (RATES * full_tokens(prepared))}  # fmt: skip
    print(f"seed {seed}: sweep's rate {chosen:.3g}, full run's loss {mine.loss:.4f}; grid's best {best.loss:.4f} at {figures['grid_rate']:.3g}; "
          f"{figures['above']:+.2%}; {figures['tokens']:.1%} of the grid's tokens; grid {[(f'{k:.3g}', round(r.loss or 0, 4)) for k, r in zip(rates, grid, strict=True)]}", flush=True)  # fmt: skip
    return figures


def main(seeds: int, path: Path) -> int:
    data = Folder(path / "data")
    if not data.exists("manifest.json"):
        write_data(data)
    figures = [one_seed(17 + n, data, path) for n in range(seeds)]
    ray.shutdown()
    print("\n| seed | the sweep's rate | full run's loss | grid's best rate | its loss | above | tokens of the grid's |\n|---|---|---|---|---|---|---|")
    for n, f in enumerate(figures):
        print(f"| {17 + n} | {f['chosen']:.3g} | {f['loss']:.4f} | {f['grid_rate']:.3g} | {f['grid_loss']:.4f} | {f['above']:+.2%} | {f['tokens']:.1%} |")
    above, tokens = max(f["above"] for f in figures), max(f["tokens"] for f in figures)
    print(f"\nworst of {seeds} seeds: loss {above:+.2%} against the grid's best (at most +1 %), {tokens:.1%} of its tokens (at most 35 %)")
    print(json.dumps({"benchmark": "sweep_vs_grid", "seeds": seeds, "above": above, "tokens": tokens, "holds": above <= 0.01 and tokens <= 0.35}))
    return int(above > 0.01 or tokens > 0.35)


if __name__ == "__main__":
    given = dict(enumerate(sys.argv))
    sys.exit(main(int(given.get(1, "3")), Path(given.get(2, "runs/sweep-vs-grid")).absolute()))
