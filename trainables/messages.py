"""Format errors for messages."""


def one_line(error: object) -> str:
    """Return an error's text on one line, or its type if it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


def type_and_line(error: BaseException) -> str:
    """Return an error's type and the first line of its text, or its type if it has no text."""
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
