"""A model folder as an evaluation uses it: the loss of texts, and greedy answers to prompts, in batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raytune70b.blocks.held_out import Pair, Text
from raytune70b.evaluation.work import Settings, Unit, text_batches
from raytune70b.model.generation import end_tokens, greedy
from raytune70b.model.loss import LogitShape, linear_cross_entropy

CHUNK_TOKENS = 1024
"""Tokens whose logits are held at once."""


class Model:
    """A Hugging Face model folder, loaded once, with a tokenizer's folder; `devices` is the number of GPUs that it is spread over."""

    def __init__(self, folder: Path, tokenizer: Path, settings: Settings, devices: int):
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.settings = settings
        options: dict[str, Any] = {"device_map": "auto"} if devices > 1 else {}
        dtype: Any = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "auto": "auto"}[settings.dtype]
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, **options).eval()
        if devices == 1 and torch.cuda.is_available():
            self.model.to("cuda")
        self.tokenizer = AutoTokenizer.from_pretrained(str(tokenizer), local_files_only=True)
        self.pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        self.ends = list(dict.fromkeys([self.tokenizer.eos_token_id, *settings.ends, *end_tokens(self.model.generation_config)]))
        """The tokens that end an answer: the tokenizer's, those that training ended answers with, and the model's."""
        self.device = self.model.get_input_embeddings().weight.device

    def run(self, unit: Unit) -> dict[str, dict[int, Any]]:
        """The results of a unit, by the numbers of its items."""
        found: dict[str, dict[int, Any]] = {"losses": {}, "answers": {}}
        for batch in text_batches(unit.texts, self.settings.batch_tokens):
            found["losses"] |= self.losses(batch)
        if unit.pairs:
            found["answers"] = self.answers(unit.pairs)
        return found

    @torch.no_grad()
    def losses(self, texts: Sequence[Text]) -> dict[int, tuple[float, int]]:
        """(summed loss, trained tokens) of each text. Padding stands behind a text, where a causal model cannot see it."""
        longest = max(len(t.ids) for t in texts)
        ids = torch.full((len(texts), longest), self.pad)
        for row, text in enumerate(texts):
            ids[row, : len(text.ids)] = torch.tensor(text.ids)
        hidden = self.model.get_decoder()(input_ids=ids.to(self.device), use_cache=False).last_hidden_state
        return {t.number: (self._loss_sum(hidden[row], t), t.trained_tokens) for row, t in enumerate(texts)}

    def _loss_sum(self, hidden: Tensor, text: Text) -> float:
        """The summed loss of one text's trained tokens; logits in fp32, as in training."""
        starts, ends = text.spans[::2], text.spans[1::2]
        places = torch.tensor([p for s, e in zip(starts, ends, strict=True) for p in range(s, e)])
        if not len(places):
            return 0.0
        head = self.model.get_output_embeddings()
        at = head.weight.device  # a head that is tied to the embedding lies on another GPU than the last layer
        hidden, targets = hidden[places - 1].to(at), torch.tensor(text.ids)[places].to(at)
        loss = linear_cross_entropy(hidden, head.weight, getattr(head, "bias", None), targets, CHUNK_TOKENS, LogitShape.of(self.model.config))
        return float(loss)

    @torch.no_grad()
    def answers(self, pairs: Sequence[Pair]) -> dict[int, tuple[str, int, bool]]:
        """(answer, its tokens, whether it ended by itself) for each prompt, greedily."""
        longest = max(len(p.prompt_ids) for p in pairs)
        ids, mask = torch.full((len(pairs), longest), self.pad), torch.zeros((len(pairs), longest), dtype=torch.int64)
        for row, pair in enumerate(pairs):
            ids[row, longest - len(pair.prompt_ids) :] = torch.tensor(pair.prompt_ids)
            mask[row, longest - len(pair.prompt_ids) :] = 1
        made = self.model.generate(
            ids.to(self.device), attention_mask=mask.to(self.device), generation_config=greedy(self.model, self.settings.max_new_tokens, self.pad, self.ends)
        )[:, longest:].tolist()
        return {p.number: self._answer(row) for p, row in zip(pairs, made, strict=True)}

    def _answer(self, ids: list[int]) -> tuple[str, int, bool]:
        length = next((n for n, token in enumerate(ids) if token in self.ends), len(ids))
        return str(self.tokenizer.decode(ids[:length], skip_special_tokens=True)).strip(), length, length < len(ids)
