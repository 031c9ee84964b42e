"""Recognise training steps in the calls of one or several optimizers."""

from collections.abc import Hashable, Sequence

MOST_CALLS = 24
"""Calls after which a cycle is recognised although some optimizers have not been called."""


def period(calls: Sequence[Hashable], optimizers: int) -> int | None:
    """Return the calls per training step, or None if more calls are needed.

    calls: the optimizer of each call so far. optimizers: how many exist. With one optimizer each call is a step. With
    several, a step is the shortest sequence that repeats: (D, G), (D, D, G). It must have been seen twice, with every
    optimizer in it, unless `MOST_CALLS` calls have not shown all of them. Falls back to 1 after twice as many calls
    without a repetition.
    """
    if optimizers <= 1:
        return 1
    if len(set(calls)) < optimizers and len(calls) < MOST_CALLS:
        return None
    for length in range(1, len(calls) // 2 + 1):
        if all(calls[index] == calls[index - length] for index in range(length, len(calls))):
            return length
    return 1 if len(calls) >= 2 * MOST_CALLS else None
