"""Exit codes, the error for wrong configurations, and helpers for one-line messages to users."""

import reprlib
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

from analysis.read.errors import printable
from trainables import messages

DONE, SOME_FAILED, USAGE, DOES_NOT_FIT, NO_CLUSTER = 0, 1, 2, 3, 4
INTERNAL, NOT_WRITTEN, INTERRUPTED, OUTPUT_CLOSED = 70, 74, 130, 141
"""70 and 74 as in sysexits.h; 130 and 141 as a shell reports SIGINT and SIGPIPE"""

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


class ConfigurationError(Exception):
    """A configuration that is not possible. The message is one line: where, what, and what is allowed."""

    exit_code = USAGE


def near(value: Any, names: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the most similar name, or "" if no name is similar."""
    return messages.near(value, names) if isinstance(value, str) else ""


def shown(value: Any) -> str:
    """Return the repr of a user's value, shortened to 100 characters."""
    return clipped(_REPR.repr(value), 100)


def counted(number: int, noun: str) -> str:
    """Return number and noun, such as "1 node" or "2 nodes"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def one_line(error: object) -> str:
    """Return the message of an error in one line, clipped, or its class if it has no message."""
    return clipped(messages.one_line(error))


def lines_of(text: object) -> str:
    """Return a text for a terminal: its lines, without control characters, which could clear it or hide text."""
    return "\n".join(map(printable, str(text).splitlines()))


def print_to_stderr(line: str) -> None:
    """Print a message: in one line for a log, which people search, and fitted to a terminal."""
    text = lines_of(line)
    print(
        fitted(text, shutil.get_terminal_size().columns) if sys.stderr.isatty() else text, file=sys.stderr, flush=True
    )


def fitted(text: str, width: int) -> str:
    """Return the text wrapped between words. A command at its end has a line of its own, so that it can be copied."""
    prose, start, rest = text.partition("python -m study.scaling")
    filled = [
        textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in prose.splitlines()
    ]
    return "\n".join([*filled, *([f"  {start}{rest}"] if start else [])])


def clipped(text: str, length: int = 400) -> str:
    """Return the text, shortened to `length` characters."""
    return text if len(text) <= length else f"{text[: length - 3]}..."
