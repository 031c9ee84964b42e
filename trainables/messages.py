"""How errors read in messages."""


def one_line(error: object) -> str:
    """An error's text in one line; its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__
