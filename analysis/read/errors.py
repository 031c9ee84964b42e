"""The error for unreadable results folders, and text that is safe to print.

This module imports nothing of the project, so that the store can use it.
"""

import re

RUN_AGAIN = "remove that trial's folder and run the study again"
RESTORE = "restore it from a copy"
"""Fixes for a damaged file: of a trial, and of a packed study."""

_SPACES = re.compile(r"[^\S ]+")


class ResultsError(ValueError):
    """A results folder cannot be read. The message is one line: where, what is wrong, and the fix."""

    exit_code = 2


class ReportNotWritten(ResultsError):
    """The results are readable, but the report cannot be written. The message is one line."""

    exit_code = 74  # EX_IOERR of sysexits.h


def line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return printable(str(error).strip().partition("\n")[0])


def printable(text: str) -> str:
    """Return a text in one line, without invisible characters, and with an escape for each undecodable byte.

    A name in somebody else's folder could otherwise clear the terminal, hide or reverse text, or end a report that
    cannot encode it.
    """
    encodable = text.encode("utf-8", "backslashreplace").decode()
    return encodable if encodable.isprintable() else "".join(filter(str.isprintable, _SPACES.sub(" ", encodable)))
