"""Answers a second of the evaluation against plain batched `generate` on the same machine.

usage: python tests/benchmarks/generation_throughput.py [ROUNDS]

Both sides answer the same 96 prompts of very different lengths with the same model, batch size and settings; answers end
at the same token on both sides, so both make the same answers. Plain is the usual loop: prompts in
their order, padded on the left, `model.generate`. Rounds alternate, CPU seconds are compared (other programs disturb wall
time), loading is left out on both sides. The Ray side counts all the CPU that its actor process spends on units.
"""

from __future__ import annotations

import json
import pickle
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from raytune70b.blocks.held_out import Pair
from raytune70b.evaluation.pipeline import Worker
from raytune70b.evaluation.work import Settings, plan
from raytune70b.storage import Folder

PROMPTS, VOCAB = 96, 2048
SETTINGS = Settings(batch_size=16, batch_tokens=16384, max_new_tokens=24, dtype="fp32")


def write_model(folder: Path) -> None:
    """A model of 5 million parameters with a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from data_pipelines.tokens import save_tokenizer, train_tokenizer

    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = AutoConfig.for_model("llama", vocab_size=VOCAB, bos_token_id=None, eos_token_id=None, max_position_embeddings=1024, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = ["Le Prêteur peut résilier la présente convention.", "The Supplier shall deliver the goods."]
    save_tokenizer(train_tokenizer(words * 20, 320), Folder(folder))


def prompts() -> list[Pair]:
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(4.3, 0.8, PROMPTS), 8, 400).astype(int)
    return [Pair(n, tuple(random.integers(3, 320, length).tolist()), "", "", "question", "en", "") for n, length in enumerate(lengths)]


def plain(model: object, pairs: list[Pair], eos: int) -> int:
    """The usual loop; returns the tokens made."""
    made = 0
    for start in range(0, len(pairs), SETTINGS.batch_size):
        batch = pairs[start : start + SETTINGS.batch_size]
        longest = max(len(p.prompt_ids) for p in batch)
        ids = torch.tensor([[0] * (longest - len(p.prompt_ids)) + list(p.prompt_ids) for p in batch])
        mask = torch.tensor([[0] * (longest - len(p.prompt_ids)) + [1] * len(p.prompt_ids) for p in batch])
        out = model.generate(ids, attention_mask=mask, max_new_tokens=SETTINGS.max_new_tokens, do_sample=False, pad_token_id=0, eos_token_id=eos)  # type: ignore[attr-defined]
        made += out[:, longest:].numel()
    return made


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    torch.set_num_threads(1)
    pairs, ratios, speeds = prompts(), [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        write_model(folder)
        worker = Worker(folder, folder, SETTINGS, 0, 1, Folder(Path(temporary) / "units").make())
        units = plan("model", [], pairs, SETTINGS)
        contents = [pickle.dumps(u) for u in units]
        worker({"unit": contents[-1:]})
        print("| round | plain, tokens/CPU s | evaluation, tokens/CPU s | ratio |\n|---|---|---|---|", flush=True)
        for number in range(rounds):
            begin = time.process_time()
            tokens = plain(worker.model.model, pairs, worker.model.tokenizer.eos_token_id)
            middle = time.process_time()
            for content in contents:
                worker({"unit": [content]})
            end = time.process_time()
            ratios.append((middle - begin) / (end - middle))
            speeds.append((tokens / (middle - begin), tokens / (end - middle)))
            print(f"| {number + 1} | {speeds[-1][0]:,.0f} | {speeds[-1][1]:,.0f} | {ratios[-1]:.2f} |", flush=True)
    ratio = statistics.median(ratios)
    print(f"\nmedian {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) of plain batched generate; the promise: at least 0.9")
    plain_speed, own_speed = (statistics.median(column) for column in zip(*speeds, strict=True))
    print(json.dumps({"benchmark": "generation_throughput", "ratio": ratio, "spread": [min(ratios), max(ratios)], "plain": plain_speed, "evaluation": own_speed, "holds": ratio >= 0.9}))


if __name__ == "__main__":
    main()
