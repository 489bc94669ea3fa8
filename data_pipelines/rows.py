"""What a raw row means: a document, an instruction triple, a question with its answer, or a conversation.

A row is read by the columns it has: `messages`, else `instruction` (with `input`) and `output`, else `question` and `answer`,
else `text`. Everything but a document becomes a conversation, so that there is one path from here on. Half surrogate pairs,
which JSON can hold and UTF-8 cannot, become U+FFFD.
"""

from __future__ import annotations

from typing import Any

from data_pipelines.prompts import triple

Messages = tuple[tuple[str, str], ...]
NAMES = ("text", "instruction", "input", "output", "question", "answer", "messages")
"""Columns that mean something; `data.columns` maps them to other names."""
ROLES = ("system", "user", "assistant", "tool")


class RowError(ValueError):
    """Why a row cannot be used."""


def interpret(row: Any, columns: dict[str, str]) -> tuple[str, Messages]:
    """(text, ()) of a document, or ("", messages). `columns` maps our names to the row's. Raises RowError."""
    if not isinstance(row, dict):
        raise RowError(f"a row must be an object, this is {_kind(row)}")

    def value(name: str) -> Any:
        return row.get(columns.get(name, name))

    if value("messages") is not None:
        return "", _messages(value("messages"))
    for question, answer in (("instruction", "output"), ("question", "answer")):
        if value(question) is not None or value(answer) is not None:
            return "", _pair(_text(value(question), question), _text(value(answer), answer), _optional(value("input"), "input"))
    return _text(value("text"), "text"), ()


def _pair(question: str, answer: str, context: str) -> Messages:
    return (("user", triple(question, context)), ("assistant", answer))


def _messages(value: Any) -> Messages:
    if not isinstance(value, list):
        raise RowError(f"messages must be a list, this is {_kind(value)}")
    found = []
    for number, message in enumerate(value):
        if not isinstance(message, dict):
            raise RowError(f"message {number} must be an object, this is {_kind(message)}")
        role = message.get("role")
        if role not in ROLES:
            raise RowError(f"message {number} has role {role!r:.40}; it takes one of {', '.join(ROLES)}")
        for name in ("tool_calls", "function_call"):  # they stand beside the content or in its place
            call = message.get(name)
            if any(call.values()) if isinstance(call, dict) else call:  # Parquet has an object of nulls where there is none
                raise RowError(f"message {number} has {name}, which are not trained")
        found.append((role, _text(message.get("content"), f"content of message {number}")))
    if not any(role == "assistant" for role, _ in found):
        raise RowError("no message of the assistant, so nothing to train on")
    return tuple(found)


def _optional(value: Any, name: str) -> str:
    return "" if value is None else _string(value, name)


def _text(value: Any, name: str) -> str:
    if value is None:
        raise RowError(f"{name} is missing")
    text = _string(value, name)
    if not text.strip():
        raise RowError(f"{name} is empty")
    return text


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{name} must be a string, this is {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:  # half a surrogate pair; whole ones were joined by the JSON reader
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return value


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")
