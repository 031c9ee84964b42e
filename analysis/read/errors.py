"""The error for unreadable results folders, and text that is safe to print.

This module imports nothing of the project, so that the store can use it.
"""

import re

RUN_AGAIN = "remove that trial's folder and run the study again"
RESTORE = "restore it from a copy"
"""Fixes for a damaged file: of a trial, and of a packed study."""

_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]")
_BREAK = re.compile(r"[\t\n\v\f\r\x85\u2028\u2029]+")


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
    """Return a text in one line, without control characters, and with an escape for each undecodable byte.

    A name in somebody else's folder could otherwise clear the terminal, hide text, or end a report that cannot encode
    it.
    """
    return _CONTROL.sub("", _BREAK.sub(" ", text)).encode("utf-8", "backslashreplace").decode()
