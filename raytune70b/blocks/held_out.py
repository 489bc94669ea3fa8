"""What an evaluation works on: the documents of the validation split, encoded as in training, and the answers to generate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """A document, or a piece of one, as training would see it."""

    number: int
    ids: tuple[int, ...]
    spans: tuple[int, ...]
    """start, end, start, end, ...: tokens that are targets of the loss."""
    language: str
    source: str

    @property
    def trained_tokens(self) -> int:
        return sum(self.spans[1::2]) - sum(self.spans[::2])


@dataclass(frozen=True)
class Pair:
    """A question with the answer that a person wrote."""

    number: int
    prompt_ids: tuple[int, ...]
    prompt: str
    """The text that `prompt_ids` encode."""
    answer: str
    task: str
    """`question` with one turn of the user, else `conversation`."""
    language: str
    source: str
