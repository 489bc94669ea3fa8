"""Small tokenizers with the habits of those in use, and the chat templates of their models, for tests."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data_pipelines.tokens import train_tokenizer

TEXTS = ["The tenant shall pay the rent. As an AI, yes! Le locataire doit payer. ### Instruction: Response:\n\n", "Article 1\nUne réponse. [INST] user 0123456789"] * 3
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
NO_END = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
SHOUTING = "{% for message in messages %}{{ message['content'] | upper + eos_token }}{% endfor %}"


@cache
def byte_level() -> Any:
    """Our own: BOS, EOS, a pad of its own, the default layout."""
    return train_tokenizer(TEXTS, 400)


def with_template(template: str, special: tuple[str, ...] = (), **changes: Any) -> Any:
    """The byte-level tokenizer with further special tokens and another template."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(byte_level().backend_tokenizer.to_str()), pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.chat_template = template
    return tokenizer


def chatml() -> Any:
    """As Qwen: no BOS, pad equal to the end token."""
    return with_template(CHATML, ("<|im_start|>", "<|im_end|>"), bos_token=None, eos_token="<|im_end|>", pad_token="<|im_end|>")


def llama3() -> Any:
    """As Llama 3: the turn ends with a token that is not EOS."""
    return with_template(LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"))


def llama2() -> Any:
    """As Llama 2: a blank is put before every text, unknown characters fall back to bytes, the template repeats BOS."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # while training: no token has a blank inside
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    special = [AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")]
    alphabet = [f"<0x{n:02X}>" for n in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False, max_token_length=8)
    backend.train_from_iterator(TEXTS, trainer)
    values = json.loads(backend.to_str())
    values["pre_tokenizer"] = None
    vocabulary = values["model"]["vocab"]
    for byte in alphabet:
        vocabulary[byte] = len(vocabulary)
    backend = Tokenizer.from_str(json.dumps(values))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = LLAMA2
    return tokenizer


KINDS = {"default": byte_level, "chatml": chatml, "llama2": llama2, "llama3": llama3}

MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}"
    "{%- else %}{%- set loop_messages = messages %}{%- endif %}{{- bos_token }}{%- for message in loop_messages %}"
    "{%- if message['role'] == 'user' %}{%- if loop.last and system is defined %}{{- '[INST] ' + system + '\n\n' + message['content'] + '[/INST]' }}"
    "{%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}{%- else %}{{- ' ' + message['content'] + eos_token }}{%- endif %}{%- endfor %}"
)
"""As of Mistral 7B v0.3: the system's text stands before the last message only if the user wrote it, so a prompt is not how the whole begins."""
