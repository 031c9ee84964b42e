"""Format durations; without pandas, since the command line shows them before it reads any results."""


def duration(seconds: float) -> str:
    """Format seconds for people: 42 s, 3 min, 1 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
