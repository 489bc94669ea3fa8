"""The other side of recovery.py: a plain elastic TorchTrainer with default settings on the same model, W between 2 and 4.

usage: python recovery_plain.py ADDRESS FOLDER     (writes FOLDER/steps.jsonl, a line a step)

It does what Ray Train's guides show: DDP, streaming_split of a Ray Data set, torch.save of rank 0 reported every ten steps.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def train_loop(config: dict[str, Any]) -> None:
    import os

    import ray.train
    import ray.train.torch
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    context = ray.train.get_context()
    shape = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=64)
    bare = LlamaForCausalLM(shape)
    optimizer, step, checkpoint = torch.optim.AdamW(bare.parameters(), lr=1e-3), 0, ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(f"{folder}/state.pt")
        bare.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    model = ray.train.torch.prepare_model(bare)
    while True:
        for batch in ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=4):
            ids = batch["data"].long()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            time.sleep(config["pace"])
            if context.get_world_rank() == 0:
                with open(config["log"], "a") as log:
                    log.write(json.dumps({"step": step, "time": time.time(), "world_size": context.get_world_size(), "pid": os.getpid()}) + "\n")
            if step % 10 == 0:
                with tempfile.TemporaryDirectory() as folder:
                    if context.get_world_rank() == 0:
                        torch.save({"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{folder}/state.pt")
                    saved = ray.train.Checkpoint.from_directory(folder) if context.get_world_rank() == 0 else None
                    ray.train.report({"step": step}, checkpoint=saved)


def main(address: str, folder: str) -> None:
    import numpy as np
    import ray
    import ray.data
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(address=address, log_to_driver=False)
    blocks = ray.data.from_numpy(np.random.default_rng(0).integers(1, 64, (100_000, 16)))
    TorchTrainer(
        train_loop,
        train_loop_config={"log": str(Path(folder) / "steps.jsonl"), "pace": 0.1},
        scaling_config=ScalingConfig(num_workers=(2, 4), resources_per_worker={"CPU": 1.5}),
        datasets={"train": blocks},
        run_config=RunConfig(name="plain", storage_path=folder, failure_config=FailureConfig(max_failures=100)),
    ).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
