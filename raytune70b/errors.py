"""Errors that a user can mend, and how an error of a library is told in one line. Runs in every process."""

from __future__ import annotations


class UserError(Exception):
    """What the user must mend before the job can go on: shown as one line, exit code 2."""


class ConfigError(UserError):
    """A wrong configuration."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
