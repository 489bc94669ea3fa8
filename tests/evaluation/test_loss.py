"""The evaluation's loss: that of full logits and of the token blocks, whatever the batch; answers that padding does not touch."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from data_pipelines.tokens import save_tokenizer, train_tokenizer
from raytune70b.blocks.held_out import Pair, Text
from raytune70b.evaluation.model import Model
from raytune70b.evaluation.work import Settings, Unit, pending, plan, read_results, text_batches, write_result
from raytune70b.storage import Folder
from tests.export.run_folders import TEXTS, VOCAB
from tests.reference import write_model

torch.set_num_threads(1)


def settings_of(batch_tokens: int = 4096, batch_size: int = 8) -> Settings:
    return Settings(batch_size, batch_tokens, 6, "fp32")


@pytest.fixture(scope="module", params=["llama", "gemma3", "mixtral"])
def folder(request, tmp_path_factory):
    """A model folder with a tokenizer; gemma3 caps its logits, mixtral routes tokens."""
    folder = write_model(tmp_path_factory.mktemp(request.param), request.param, VOCAB)
    save_tokenizer(train_tokenizer(TEXTS * 40, VOCAB), Folder(folder))
    return folder


@pytest.fixture(scope="module")
def texts():
    random = np.random.default_rng(3)
    found = []
    for number in range(23):
        length = int(random.integers(2, 60))
        start = int(random.integers(1, length))
        found.append(Text(number, tuple(random.integers(3, VOCAB, length).tolist()), (start, length), "en", "file"))
    return [*found, Text(23, (5, 6, 7), (), "fr", "file")]  # nothing of it is trained


def mean_loss(model: Model, texts: list[Text]) -> float:
    losses = model.run(Unit("", texts=tuple(sorted(texts, key=lambda t: -len(t.ids)))))["losses"]
    return sum(loss for loss, _ in losses.values()) / sum(count for _, count in losses.values())


def test_loss_is_that_of_full_logits_text_by_text(folder, texts):
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for text in texts:
        with torch.no_grad():
            logits = plain(torch.tensor([text.ids])).logits[0]
        for place in range(*text.spans) if text.spans else ():
            total, count = total + F.cross_entropy(logits[place - 1], torch.tensor(text.ids[place])).item(), count + 1
    assert mean_loss(Model(folder, folder, settings_of(), 0), texts) == pytest.approx(total / count, abs=1e-6)


def test_batch_size_does_not_matter(folder, texts):
    losses = [mean_loss(Model(folder, folder, settings_of(tokens), 0), texts) for tokens in (1, 64, 333, 100_000)]
    assert max(losses) - min(losses) <= 1e-6


def test_answers_do_not_depend_on_the_batch(folder):
    random = np.random.default_rng(4)
    pairs = [Pair(n, tuple(random.integers(3, VOCAB, 3 + 5 * n).tolist()), "", "", "question", "en", "file") for n in range(5)]
    model = Model(folder, folder, settings_of(), 0)
    assert model.answers(pairs) == {p.number: model.answers([p])[p.number] for p in pairs}


def test_answer_is_plain_greedy_decoding(folder):
    prompt = (7, 9, 11, 30, 41)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = list(prompt)
    model = Model(folder, folder, settings_of(), 0)
    for _ in range(6):
        with torch.no_grad():
            ids.append(int(plain(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == model.tokenizer.eos_token_id:
            break
    made = model.answers([Pair(0, prompt, "", "", "question", "en", "file")])[0]
    wanted = [i for i in ids[len(prompt) :] if i != model.tokenizer.eos_token_id]
    assert made[0] == model.tokenizer.decode(wanted, skip_special_tokens=True).strip() and made[1] == len(wanted)


HOSTILE = [
    {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": "greedy"}, {"begin_suppress_tokens": "greedy"}, {"bad_words_ids": "greedy"}, {"forced_eos_token_id": 1},
    {"sequence_bias": "greedy"}, {"guidance_scale": 3.0}, {"do_sample": True, "temperature": 5.0}, {"max_length": 7, "max_new_tokens": 2}, {"num_return_sequences": 2, "num_beams": 2},
]  # fmt: skip


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("greedy"), "llama", VOCAB, seed=2)
    save_tokenizer(train_tokenizer(TEXTS * 40, VOCAB), Folder(folder))
    return folder


@pytest.mark.parametrize(("values", "file"), [*((v, "generation_config.json") for v in HOSTILE), *((v, "config.json") for v in HOSTILE[:2])])
def test_greedy_is_greedy_whatever_the_models_own_generation_config_says(plain_folder, tmp_path, values, file):
    """Old models have such values in config.json, where transformers refuses them unless a call brings its own."""
    source = shutil.copytree(plain_folder, tmp_path / "model")
    prompt, settings = (7, 9, 11, 30, 41), dataclasses.replace(settings_of(), max_new_tokens=24)
    ids, plain = list(prompt), AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        for _ in range(24):
            ids.append(int(plain(torch.tensor([ids])).logits[0, -1].argmax()))
    first = ids[5]
    chosen = {"suppress_tokens": [first], "begin_suppress_tokens": [first], "bad_words_ids": [[first]], "sequence_bias": [[[first], -9.0]]}
    values = {key: chosen[key] if value == "greedy" else value for key, value in values.items()}
    held = json.loads((source / file).read_text()) if (source / file).exists() else {}
    (source / file).write_text(json.dumps({**held, **values}))
    model = Model(source, source, settings, 0)
    if file == "generation_config.json":
        asked = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        theirs = asked.generate(torch.tensor([prompt]), **({} if "max_new_tokens" in values else {"max_new_tokens": 24}), pad_token_id=0)
        assert theirs.tolist() != [ids], "the model's own config changes what it generates"
    made = model.answers([Pair(0, prompt, "", "", "question", "en", "file")])[0]
    length = next((n for n, token in enumerate(ids[5:]) if token in model.ends), 24)
    assert made[:2] == (model.tokenizer.decode(ids[5 : 5 + length], skip_special_tokens=True).strip(), length)


def test_an_answer_ends_where_training_ended_it(folder):
    prompt, settings = (7, 9, 11, 30, 41), settings_of()
    plain = Model(folder, folder, settings, 0)
    _, length, _ = plain.answers([Pair(0, prompt, "", "", "question", "en", "file")])[0]
    made = plain.model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, pad_token_id=0)[0, len(prompt) :].tolist()
    assert length > 1, "a second token, which may be made the end"
    early = Model(folder, folder, dataclasses.replace(settings, ends=(made[1],)), 0).answers(
        [Pair(0, prompt, "", "", "question", "en", "file")]
    )[0]
    assert early[1:] == ((0 if made[0] == made[1] else 1), True)


def test_units_cover_every_item_once_and_resume(tmp_path, texts):
    pairs = [Pair(n, (1,) * (n + 1), "", "", "question", "en", "file") for n in range(10)]
    units, out = plan("model", texts, pairs, settings_of(batch_size=4)), Folder(tmp_path / "units")
    assert sorted(t.number for u in units for t in u.texts) == list(range(24))
    assert sorted(p.number for u in units for p in u.pairs) == list(range(10))
    write_result(out, units[0], {"losses": {}, "answers": {9: ("x", 1, True)}})
    assert pending(units, out) == units[1:] and read_results(units[:1], out)["answers"] == {9: ["x", 1, True]}


@pytest.mark.parametrize("change", [{"batch_size": 5}, {"max_new_tokens": 7}, {"dtype": "bf16"}, {"ends": (9,)}])
def test_another_setting_or_model_is_other_work(texts, change):
    pairs = [Pair(n, (1, 2), "", "", "question", "en", "file") for n in range(3)]
    keys = {u.key for u in plan("model", texts, pairs, settings_of())}
    changed = {u.key for u in plan("model", texts, pairs, dataclasses.replace(settings_of(), **change)) if u.pairs}
    assert not changed & keys and not keys & {u.key for u in plan("other", texts, pairs, settings_of())}


def test_text_batches_stay_below_the_limit(texts):
    ordered = sorted(texts, key=lambda t: -len(t.ids))
    batches = text_batches(ordered, 100)
    assert [t for b in batches for t in b] == ordered
    assert all(len(b) == 1 or len(b) * len(b[0].ids) <= 100 for b in batches)
