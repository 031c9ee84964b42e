"""The error for unreadable results folders. This module imports nothing, so that the store can use it."""

RUN_AGAIN = "remove that trial's folder and run the study again"
RESTORE = "restore it from a copy"
"""Fixes for a damaged file: of a trial, and of a packed study."""


class ResultsError(ValueError):
    """A results folder cannot be read. The message is one line: where, what is wrong, and the fix."""

    exit_code = 2


def line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0]
