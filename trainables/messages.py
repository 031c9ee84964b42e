"""Format errors and hints for messages."""

import difflib
import re
from collections.abc import Iterable

_TERMINAL_STYLE = re.compile(r"\x1b\[[0-9;]*m")
"""bold or coloured text, as in torch's message about weights that cannot be loaded"""


def one_line(error: object) -> str:
    """Return an error's text on one line and without terminal styles, or its type if it has no text."""
    return " ".join(_TERMINAL_STYLE.sub("", str(error)).split()) or type(error).__name__


def type_and_line(error: BaseException) -> str:
    """Return an error's type and the first line of its text, or its type if it has no text."""
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def near(value: str, names: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the most similar name, or "" if no name is similar."""
    matches = difflib.get_close_matches(value, list(names), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
