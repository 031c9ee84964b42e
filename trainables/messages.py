"""Format errors for messages."""


def one_line(error: object) -> str:
    """Return an error's text on one line, or its type if it has no text."""
    return " ".join(str(error).split()) or type(error).__name__
