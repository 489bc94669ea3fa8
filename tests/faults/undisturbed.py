"""The undisturbed run that every disturbed one is compared with: two gloo processes, no Ray, no checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from tests import distributed


@dataclass(frozen=True)
class Undisturbed:
    ids: list[list[int]]
    """Block ids of every step."""
    losses: list[float]


def train(arguments: list[str]) -> Undisturbed:
    """Trains what `jobs/finetune.py` would with these arguments."""
    return distributed.run(_train, 2, arguments, timeout_s=300)[0]


def _train(rank: int, world: int, arguments: list[str]) -> Undisturbed:
    import torch
    import torch.distributed as dist

    from raytune70b.blocks.stream import ARRAYS
    from raytune70b.config import compose
    from raytune70b.training.engine import build_engine
    from raytune70b.training.guards import Guard
    from raytune70b.training.prepared import prepare_run
    from raytune70b.training.schedule import learning_rate
    from raytune70b.training.step import train_step

    prepared = prepare_run(compose(arguments))
    config, feed = prepared.config, prepared.feed
    engine = build_engine(config, prepared.manifest.vocab_size, torch.device("cpu"))
    guard, micro = Guard(0.0, 5), feed.micro_batch_size
    all_ids, losses = [], []
    for step, ids in feed.order.step_ids(0, feed.total_steps):
        rows = feed.reader.rows(ids)
        parts = [{name: rows[name][n : n + micro] for name in ARRAYS} for n in range(rank * micro, len(ids), world * micro)]
        trained = torch.tensor(sum(int((p["labels"] >= 0).sum()) for p in parts))
        dist.all_reduce(trained)
        result = train_step(
            engine, parts, trained_tokens=int(trained), learning_rate=learning_rate(config.train, step, feed.total_steps),
            max_grad_norm=config.train.max_grad_norm, loss_chunk_tokens=config.model.loss_chunk_tokens, seed=config.run.seed, step=step, guard=guard,
            device=torch.device("cpu"),
        )  # fmt: skip
        all_ids.append(ids.tolist())
        losses.append(result.loss)
    return Undisturbed(all_ids, losses)
