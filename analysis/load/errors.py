"""What is raised for a results folder that cannot be read. It imports nothing, so that the store may use it."""

RUN_AGAIN = "remove that trial's folder and run the study again"
RESTORE = "restore it from a copy"
"""What to do about a damaged file: of a trial, and of a packed study."""


class ResultsError(ValueError):
    """A results folder cannot be read: one line with what is wrong, where, and what to do."""

    exit_code = 2


def line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).strip().partition("\n")[0]
