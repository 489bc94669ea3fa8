"""How a conversation becomes text, for training and evaluation alike, so that their prompts cannot differ.

The layout is the tokenizer's own chat template; a tokenizer without one gets `DEFAULT_TEMPLATE`, which is saved with it.
Instruction triples and question-answer pairs are conversations of one turn.

The white space around a turn's content is dropped, as the templates of Llama do: a tokenizer would merge an answer's first
line break with the one that ends the prompt, and the training text would no longer begin with the evaluation's prompt.

Promises: `answers` finds in the rendered text where each assistant turn begins - exactly where the generation prompt of an
evaluation ends - where its content ends, and what its end token must stand before. Templates need no generation tags. A template that rewrites the turns so
that they cannot be found again is an error, never a guess. One that asks for today's date is given `TODAY`, on every day.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

Turn = tuple[str, str]
"""(role, content)"""

DEFAULT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '### Response:\\n' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
    "{% else %}{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
)


TODAY = datetime(2024, 7, 26)
"""The date of a template that asks for it (Llama 3.2 tells the model what day it is): the same inputs give the same tokens on any day, and
an evaluation's prompts are those of the training. It is the one that Llama 3.1's template has where it is told none."""


class PromptError(ValueError):
    """A conversation that the template refuses, or whose answers cannot be found in what it renders."""


@dataclass(frozen=True)
class Prompts:
    """A chat template with the names of the special tokens that it may use (`bos_token`, `eos_token`, ...)."""

    template: str
    special_tokens: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, tokenizer: Any) -> Prompts:
        """The layout of a Hugging Face tokenizer."""
        tokens = {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
        template = tokenizer.chat_template
        if isinstance(template, dict):  # several templates by name
            template = template["default"]
        return cls(template or DEFAULT_TEMPLATE, tuple(sorted(tokens.items())))

    def render(self, turns: Sequence[Turn], generation: bool = False) -> str:
        """The text of a conversation; with `generation` it ends where an answer begins. Raises PromptError."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import _compile_jinja_template

        messages = [{"role": role, "content": content.strip()} for role, content in turns]
        values: dict[str, Any] = dict(self.special_tokens)
        try:
            # not by `render_jinja_template`, which gives no value to a template that can be called
            compiled = cast(Any, _compile_jinja_template)(self.template)
            return str(compiled.render(messages=messages, tools=None, documents=None, add_generation_prompt=generation, strftime_now=TODAY.strftime, **values))
        except TemplateError as error:
            raise PromptError(f"the chat template refuses it: {error}") from error

    def answers(self, turns: Sequence[Turn]) -> tuple[str, list[tuple[int, int, str]]]:
        """The rendered text, and of every assistant turn (start, end of its content, in characters; the next turn's content). Raises PromptError."""
        text, spans, position = self.render(turns), [], 0
        for number, (role, content) in enumerate(turns):
            if role != "assistant":
                continue
            prompt = self.render(turns[:number], generation=True)
            core = content.strip()
            start = len(prompt) if text.startswith(prompt) else self._places(turns, text).get(number, -1)
            found = text.find(core, start) if start >= position else -1
            if found < 0:
                raise PromptError(f"the chat template changes turn {number}, so that it cannot be told from the rest")
            position = found + len(core)
            spans.append((start, position, turns[number + 1][1].strip() if number + 1 < len(turns) else ""))
        return text, spans

    def _places(self, turns: Sequence[Turn], text: str) -> dict[int, int]:
        """Where each turn's content stands in the rendered text; empty where the template does more than insert it.

        Some templates render a conversation's beginning in another way than the whole of it (Mistral puts the system's text before the
        last question), and to look for the answer would find it where the question quotes it.
        """
        try:
            marked = self.render([(role, f"\ue000{number}\ue001") for number, (role, _) in enumerate(turns)])
        except PromptError:  # it looks into the contents
            return {}
        built, places = "", dict[int, int]()
        for n, piece in enumerate(re.split("\ue000(\\d+)\ue001", marked)):
            if n % 2:
                places[int(piece)] = -1 if int(piece) in places else len(built)
                built += turns[int(piece)][1].strip()
            else:
                built += piece
        return places if built == text else {}


def prompt_ids(tokenizer: Any, turns: Sequence[Turn]) -> list[int]:
    """Tokens that ask a model for the next answer, with exactly one BOS where the tokenizer has one."""
    text = Prompts.of(tokenizer).render(turns, generation=True)
    return one_bos(tokenizer.encode(text, add_special_tokens=False), tokenizer.bos_token_id)


def one_bos(ids: list[int], bos: int | None) -> list[int]:
    """The ids behind exactly one BOS; unchanged where the tokenizer has none."""
    if bos is None:
        return ids
    first = next((n for n, token in enumerate(ids) if token != bos), len(ids))
    return [bos, *ids[first:]]


def triple(instruction: str, context: str = "") -> str:
    """The question of an instruction triple: the instruction, then its input."""
    return f"{instruction}\n\n{context}" if context.strip() else instruction
