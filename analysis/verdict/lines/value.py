"""The summary card as a value: facts, trust, and a few lines of text with the numbers that they state."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from analysis.text import further_repeats, interval_decimals, number, percent


@dataclass(frozen=True)
class Quantity:
    """A number of a line with its 95 % interval, in `unit`: a word such as "GPU" or "s", or "1" for a ratio or share.

    value, low, high: None if unknown. If the interval is not resolved, all three are None and `further_repeats` is the
    number of repeats that would resolve it (infinite if very many); otherwise it is None. part: the workload, recipe or
    other part of the study that the number is of; empty if that is clear.
    """

    name: str
    value: float | None
    unit: str
    low: float | None = None
    high: float | None = None
    further_repeats: float | None = None
    part: str = ""

    @classmethod
    def of(
        cls,
        name: str,
        unit: str,
        value: float,
        low: float = math.nan,
        high: float = math.nan,
        more: float = math.nan,
        *,
        part: str = "",
    ) -> "Quantity":
        """Return a quantity from numbers that may be NaN. more: column of `statistics.intervals`."""
        if more > 0:
            return cls(name, None, unit, further_repeats=float(more), part=part)
        return cls(name, _known(value), unit, _known(low), _known(high), part=part)

    def text(self, decimals: int, scale: float = 1.0) -> str:
        """Return `7.8 (7.7–7.9)`, `7.8` without an interval, or that the number is not resolved."""
        if self.value is None:
            return self.unresolved
        decimals = self.telling_decimals(decimals, scale)
        shown = number(scale * self.value, decimals)
        return f"{shown} ({ends})" if (ends := self.ends(decimals, scale)) else shown

    def telling_decimals(self, decimals: int, scale: float = 1.0) -> int:
        """Return the decimals that the value needs so that its interval does not look like a point."""
        if self.low is None or self.high is None:
            return decimals
        return interval_decimals(scale * self.low, scale * self.high, decimals)

    def ends(self, decimals: int, scale: float = 1.0) -> str:
        """Return the interval as `7.7–7.9`, or `-0.4 to 1.2`; empty if it is unknown."""
        if self.low is None or self.high is None:
            return ""
        low, high = (number(scale * end, decimals) for end in (self.low, self.high))
        return f"{low} to {high}" if low.startswith("-") else f"{low}–{high}"

    @property
    def unresolved(self) -> str:
        """Say that the number is unknown, or how many more repeats it needs."""
        if self.further_repeats is None:
            return "unknown"
        return f"not resolved (needs {further_repeats(self.further_repeats)})"

    @property
    def half_width(self) -> float | None:
        """Return half the relative width of the interval (0.1 is ±10 %); None if it is unknown."""
        if not self.low or not self.high:
            return None
        return math.sqrt(self.high / self.low) - 1


def _known(value: float) -> float | None:
    return None if pd.isna(value) else float(value)


@dataclass(frozen=True)
class CardLine:
    """One line of the card. key: stable name for programs. label: shown before the text. quantities: its numbers."""

    key: str
    label: str
    text: str
    quantities: tuple[Quantity, ...] = ()


@dataclass(frozen=True)
class Trust:
    """How far the numbers of the card can be trusted: "good", "fair" or "poor", with the reason in a few words.

    groups: worker groups of the configuration with the fewest. half_width: relative half width of the first interval.
    """

    level: str
    reason: str
    groups: int | None = None
    half_width: float | None = None


@dataclass(frozen=True)
class Card:
    """The answer of a study on one screen.

    form: what kind of study it is, see `card.card_of`. title: the facts in one line. facts: the same for programs;
    values are text or numbers. lines: in the order in which they are read, at most six. missing_trials: planned trials
    that have not run yet; if there are any, the study is partial. resume_command: what runs them.
    """

    study: str
    question: str
    form: str
    title: str
    facts: Mapping[str, str | int | float]
    trust: Trust
    lines: tuple[CardLine, ...]
    missing_trials: int = 0
    planned_trials: int | None = None
    resume_command: str = ""

    @property
    def is_partial(self) -> bool:
        """Return True if planned trials have not run yet."""
        return self.missing_trials > 0

    @property
    def heading(self) -> str:
        """Return the title, marked if the study is partial."""
        if not self.is_partial:
            return self.title
        return f"{self.title} (partial: {self.missing_trials} of {self.planned_trials} planned trials missing)"

    def line(self, key: str) -> CardLine | None:
        """Return the line with this key; None if the card has none."""
        return next((line for line in self.lines if line.key == key), None)


def share_text(quantity: Quantity) -> str:
    """Return a share as `98 %, 97–98`, without the interval if it is unknown; with decimals if it is narrow."""
    if quantity.value is None:
        return quantity.unresolved
    decimals = (
        1 if quantity.low is not None and quantity.high is not None and quantity.high - quantity.low < 0.01 else 0
    )
    decimals = quantity.telling_decimals(decimals, 100)
    ends = quantity.ends(decimals, 100)
    return percent(quantity.value, decimals) + (f", {ends}" if ends else "")
