"""Run folders without a training run: a sharded model on two processes, its trained weights moved at random, saved by the Saver."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data_pipelines.tokens import save_tokenizer, train_tokenizer
from raytune70b.blocks.manifest import read_manifest
from raytune70b.config import compose, to_yaml
from raytune70b.model.fingerprint import base_fingerprint
from raytune70b.model.load import build_model
from raytune70b.model.shard import make_mesh, reshard
from raytune70b.schema import Config
from raytune70b.storage import Folder
from raytune70b.training.checkpoint import Cursor
from raytune70b.training.optimizer import build_optimizer
from raytune70b.training.saver import Saver
from raytune70b.training.state import local_tensor, state_dict
from tests.conftest import write_blocks

VOCAB, SEQ_LEN = 320, 32
TEXTS = ["The Supplier shall deliver the goods within thirty days.", "Le Prêteur peut résilier la présente convention sans retard injustifié."]


def write_data(folder: Path) -> Folder:
    """Random blocks, with a tokenizer that a manifest knows."""
    data = Folder(folder)
    manifest = write_blocks(data, {"train": [8], "validation": [6]}, seq_len=SEQ_LEN, vocab=VOCAB)
    digest, template = save_tokenizer(train_tokenizer(TEXTS * 40, VOCAB), data / "tokenizer")
    manifest = dataclasses.replace(manifest, tokenizer=digest, chat_template=template, lineage={"documents": {"read": 14, "duplicates": {"exact": 2}}})
    data.write("manifest.json", manifest.to_json().encode())
    return data


def run_config(root: Path, name: str, *overrides: str) -> Config:
    return compose([f"run.path={root / 'runs'}", f"run.name={name}", f"data.path={root / 'data'}", "tracking.mlflow=", *overrides])


def write_runs(rank: int, world_size: int, configs: list[Config], rounds: int = 1) -> dict[str, Tensor]:
    """Body of `tests.distributed`: a checkpoint for each configuration; the sharded models' logits on the first validation blocks."""
    found = {}
    for config in configs:
        manifest = read_manifest(Folder(config.data.path))
        model = build_model(config, manifest.vocab_size, make_mesh(world_size, 1, "cpu"), torch.device("cpu"))
        optimizer = build_optimizer(model, config)
        move(model, seed=rank)
        run = Folder(config.run.path) / config.run.name
        base = base_fingerprint(Folder(config.model.path)) if config.model.path else None
        cursor = Cursor(step=7, trained_tokens=700, world_size=world_size, data=manifest.digest, fingerprint={"base": base}, validation_loss=2.5)
        saver = Saver(run, config.checkpoint, dist.new_group(backend="gloo"), print)
        saver.start(state_dict(model, optimizer), cursor, [])
        saver.wait()
        error = saver.take().error
        assert error is None, error
        if rank == 0:
            run.write("config.yaml", to_yaml(config).encode())
        found[config.run.name] = logits(model, blocks(config))
        reshard(model)
    return found


@torch.no_grad()
def move(model: Any, seed: int) -> None:
    """Moves every trained weight, as training would."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            own = local_tensor(parameter)
            own.add_(torch.randn(own.shape, generator=generator).to(own.dtype) * 0.05)


def blocks(config: Config) -> dict[str, Tensor]:
    from raytune70b.blocks.stream import Reader

    data = Folder(config.data.path)
    rows = Reader(data, read_manifest(data), "validation").rows(np.arange(2))
    return {name: torch.from_numpy(rows[name]).long() for name in ("input_ids", "position_ids")}


@torch.no_grad()
def logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model.eval()(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits.float()
