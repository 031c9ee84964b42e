"""The most frequent reasons why trials have no result, as one short text."""

import pandas as pd

from analysis.cause import cause
from analysis.read.schema import TOO_LARGE

MOST_REASONS, LONGEST_REASON = 3, 60
"""Number of reasons that are listed, and the maximum characters of one, where space is short."""


def common_reasons(trials: pd.DataFrame, most: int = MOST_REASONS, longest: int = LONGEST_REASON) -> str:
    """Return `A (3); B (1); 2 more reasons`, the most frequent first; a single reason has no count.

    trials: those without a result. Of a reason, the first line counts, see `cause`.
    """
    memory = trials["status"].isin(TOO_LARGE)
    reasons = trials["reason"].fillna("unknown reason").astype(str).map(cause)
    counts = reasons.mask(memory, "out of memory").map(lambda reason: _cut(reason, longest)).value_counts()
    listed = [f"{reason} ({count})" if len(counts) > 1 else str(reason) for reason, count in counts.head(most).items()]
    if more := len(counts) - len(listed):
        listed.append(f"{more} more reason{'s' if more > 1 else ''}")
    return "; ".join(listed)


def _cut(reason: str, longest: int) -> str:
    first = reason.splitlines()[0] if reason else reason
    return first if len(first) <= longest else f"{first[: longest - 1]}…"
