"""How a user's mistake is told: one line with where, what, and what is allowed."""

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any

_REPR = reprlib.Repr()


_REPR.maxstring = _REPR.maxother = 80


def near(value: Any, names: Iterable[str]) -> str:
    """The name that was probably meant, as the end of a message; empty where none is like it."""
    near = difflib.get_close_matches(value, list(names), n=1) if isinstance(value, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def shown(value: Any) -> str:
    """A value as it was given, however long it is."""
    return clipped(_REPR.repr(value), 100)


def counted(number: int, noun: str) -> str:
    """Such as 1 node, 2 nodes."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def one_line(error: object) -> str:
    """What an error says, in one line."""
    return clipped(" ".join(str(error).split()) or type(error).__name__)


def clipped(text: str, length: int = 300) -> str:
    """A text, cut where it is longer than `length`."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


DONE, SOME_FAILED, USAGE, DOES_NOT_FIT, NO_CLUSTER, INTERRUPTED = 0, 1, 2, 3, 4, 130


class ConfigurationError(Exception):
    """What a user asked for cannot be: one line with where, what, and what is allowed."""

    exit_code = USAGE
