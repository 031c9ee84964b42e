"""Format values as text: labels of fields, ranks and configurations, and consistently rounded numbers."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pandas as pd
from markupsafe import Markup, escape

MISSING = "–"

_MOST_EXACT = 1e6
"""Whole numbers below are shown without decimals, since columns with gaps hold integers as floats."""


MOST_FIELDS = 8
"""Maximum fields that name a configuration in prose; if more vary, only the distinguishing ones are used."""

FLAG = "flag "
"""Prefix of columns of arguments such as `lr=0.1`, whose names could be those of fields or measures."""

_ARGUMENTS = "script_arguments"

_PATHS = ("script", "train_function", "workload")
"""Fields with the path of a user's file, which identifies a configuration."""


@dataclass(frozen=True)
class FieldLabel:
    """How reports name a field of a trial, as its declaration says.

    label: the field with a value; "" for its name and the value. {value} is the value, {value:,} with thousands
    separators, {file} the last part of a path, {rank} what a rank is called; (s) and (es) stay unless the value is 1.
    header: the field as header of a column; "" for its name.
    """

    label: str = ""
    header: str = ""


class RankNouns(tuple[str, str]):
    """What the ranks of a study are called, one and several, and the labels of its fields by name."""

    labels: Mapping[str, FieldLabel]

    @classmethod
    def of(cls, devices: Iterable[str], labels: Mapping[str, FieldLabel]) -> Self:
        """Call ranks GPUs only if every rank had a GPU."""
        kinds = set(devices)
        one = {frozenset({"cuda"}): "GPU", frozenset({"cpu"}): "CPU rank"}.get(frozenset(kinds), "rank")
        nouns = cls((one, f"{one}s"))
        nouns.labels = labels
        return nouns


def _label_of(field: str, ranks: tuple[str, str]) -> FieldLabel:
    return ranks.labels.get(field, FieldLabel()) if isinstance(ranks, RankNouns) else FieldLabel()


def field_label(field: str, ranks: tuple[str, str]) -> str:
    """Return a field's name as a column header."""
    header = _label_of(field, ranks).header
    return header.replace("{rank}", ranks[0]) if header else _plain_label(field)


def value_label(field: str, value: Any, ranks: tuple[str, str]) -> str:
    """Return a field with its value, as in "4 GPUs", "batch 32 per GPU", "bf16" or "2 loader workers"."""
    if field == "global_batch":
        return f"global batch {_count(value)}"
    if field == "interconnect" and value != "auto":
        return field_value(field, value)
    if field.isupper():  # a variable of the environment
        return f"{field}={text(value)}"
    label = _label_of(field, ranks).label
    if not label:
        return f"{_plain_label(field)} {text(value)}"
    shown = text(value)
    parts = {"{value}": shown, "{value:,}": _count(value), "{file}": shown.rpartition("/")[2], "{rank}": ranks[0]}
    parts |= {f"({plural})": "" if value == 1 else plural for plural in ("s", "es")}
    return _PART_OF_LABEL.sub(lambda match: parts[match[0]], label)


_PART_OF_LABEL = re.compile(r"\{value(?::,)?\}|\{file\}|\{rank\}|\(e?s\)")


def _count(value: Any) -> str:
    """Return an integer with thousands separators, anything else as it is."""
    return f"{value:,}" if isinstance(value, int | np.integer) else text(value)


def _plain_label(field: str) -> str:
    """Return a field's name as words, without the mark of a script's own argument."""
    return field.removeprefix(FLAG).replace("_", " ")


def configuration_label(row: Mapping[str, Any] | pd.Series, fields: Iterable[str], ranks: tuple[str, str]) -> str:
    """Return the given fields of a configuration, separated by commas, without those that have no value."""
    return ", ".join(value_label(name, row[name], ranks) for name in fields if text(row[name]) != MISSING)


_VAGUE = ("none", "auto", "as_is", "full", "selective")
"""words that say nothing without their field"""


def brief_label(
    configurations: pd.DataFrame, row: Mapping[str, Any] | pd.Series, fields: Sequence[str], ranks: tuple[str, str]
) -> str:
    """Return `configuration_label` for little room: a word without its field, if no other field has this word.

    The user's own files, arguments and variables are named as ever.
    """
    words = {name: set(configurations[name].map(text)) for name in fields}

    def label(name: str) -> str:
        value, own = row[name], name in _PATHS or name.isupper() or name.startswith(FLAG)
        others = set().union(*(words[other] for other in fields if other != name))
        is_clear = isinstance(value, str) and not own and value not in _VAGUE and value not in others
        return field_value(name, value) if is_clear else value_label(name, value, ranks)

    return ", ".join(label(name) for name in fields if text(row[name]) != MISSING)


def with_short_arguments(configurations: pd.DataFrame, row: pd.Series) -> pd.Series:
    """Return a configuration in which `…` replaces the options of its script that tell nothing.

    These are the ones that the most common arguments have too; in the most common arguments themselves, those that no
    others change. An option that is given again keeps the values that the most common arguments lack. configurations:
    all of the study.
    """
    if _ARGUMENTS not in row or text(row[_ARGUMENTS]) == MISSING:
        return row
    given = configurations[_ARGUMENTS].map(text)
    given = given[given != MISSING]
    usual, own = _options(given.mode().iloc[0]), _options(str(row[_ARGUMENTS]))
    if own == usual:
        others = [_options(other) for other in given.unique()]
        short = {name: values for name, values in own.items() if any(other.get(name) != values for other in others)}
    else:
        short = {
            name: values[len(known) :] if values[: len(known)] == known else values
            for name, values in own.items()
            if values != (known := usual.get(name, []))
        }
    if not short or not usual.keys() <= own.keys() or short == own:
        return row
    return pd.Series({**row, _ARGUMENTS: " ".join(["…", *(part for parts in short.values() for part in parts)])})


def _options(arguments: str) -> dict[str, list[str]]:
    """Return the options of a script by name, each as often as it is given, with its values; "" are those before."""
    options: dict[str, list[str]] = {}
    name = ""
    for word in arguments.split():
        if re.match(r"--?[a-zA-Z]", word):
            name = word.partition("=")[0]
            options.setdefault(name, []).append(word)
        elif name in options:
            options[name][-1] += f" {word}"
        else:
            options[name] = [word]
    return options


def telling_label(configurations: pd.DataFrame, row: pd.Series, fields: Sequence[str], ranks: tuple[str, str]) -> str:
    """Return the label of a configuration that tells it from the other ones of `configurations`."""
    telling = telling_fields(configurations, row, fields)
    return configuration_label(with_short_arguments(configurations, row), telling, ranks)


def telling_fields(configurations: pd.DataFrame, row: pd.Series, fields: Sequence[str]) -> list[str]:
    """Return the fields that identify a configuration among `configurations`.

    These are all `fields`; if there are more than `MOST_FIELDS`, a user's file and those whose value differs from the
    most common one. If these are too many as well, the user's file, and what differs among configurations with it.
    """
    if len(fields) <= MOST_FIELDS:
        return list(fields)
    usual = {name: configurations[name].map(text).mode().iloc[0] for name in fields}
    own = [name for name in _PATHS if name in fields and text(row[name]) != MISSING]
    telling = [name for name in fields if name in own or name == "world_size" or text(row[name]) != usual[name]]
    if len(telling) <= MOST_FIELDS or not own:
        return telling
    same = configurations[(configurations[own].map(text) == row[own].map(text)).all(axis=1)]
    different = {"world_size", *own, *(name for name in telling if same[name].map(text).nunique() > 1)}
    return [name for name in fields if name in different]


def field_value(field: str, value: Any) -> str:
    """Return a field's value as a cell. An interconnect that NCCL did not choose itself is marked as emulated."""
    shown = text(value)
    return f"{shown} (emulated)" if field == "interconnect" and shown not in ("auto", MISSING) else shown


def size(value_bytes: float) -> str:
    """Return bytes in binary units with one decimal: "4 B", "25.4 MiB", "1 GiB"."""
    for unit, least in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value_bytes >= least:
            return f"{value_bytes / least:.1f}".removesuffix(".0") + f"\u00a0{unit}"
    return f"{value_bytes:.0f}\u00a0B"


def text(value: Any) -> str:
    """Return a value as a cell; missing values are a dash."""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, float) and value.is_integer() and abs(value) < _MOST_EXACT:
        return str(int(value))
    return MISSING if value == "" or pd.isna(value) else str(value)


def number(value: float | None, decimals: int) -> str:
    """Return a number with thousands separators, or a dash if it is missing."""
    return (
        MISSING if value is None or pd.isna(value) else f"{round(value, decimals) + 0.0:,.{decimals}f}"
    )  # + 0.0 avoids "-0"


def not_resolved(more: float) -> str:
    """Say that an interval is too wide to print its value, and how many further repeats would narrow it enough.

    more: column of `statistics.intervals`, > 0.
    """
    return f"not resolved (needs {further_repeats(more)})"


def further_repeats(more: float) -> str:
    """Return a number of further repeats: "about 3 more repeats"; infinite is "many more repeats"."""
    return f"{'many' if math.isinf(more) else f'about {more:.0f}'} more repeat{'' if more == 1 else 's'}"


WIDEST = 1_000


def interval_decimals(low: float, high: float, decimals: int) -> int:
    """Return the decimals of a value and its interval: up to 2 more if the ends of the interval would look equal.

    They are fewer if the interval is `WIDEST` units of the last decimal wide, for then that decimal says nothing.
    """
    while decimals > 0 and (high - low) * 10**decimals >= WIDEST:
        decimals -= 1
    more = (enough for enough in range(decimals, decimals + 3) if number(low, enough) != number(high, enough))
    return next(more, decimals)


def with_interval(
    value: float, low: float, high: float, decimals: int, instead: str | None = None, more: float = 0.0
) -> str:
    """Return `12.3 [11.9, 12.8]`, or `12.3 [reason]` or the number alone if it has no interval.

    instead: reason why there is no interval. more: further repeats that the interval needs (see
    `statistics.intervals`); above 0, that is all that is shown.
    """
    if more > 0:
        return not_resolved(more)
    if pd.isna(low) or pd.isna(high):
        return f"{number(value, decimals)} [{instead}]" if instead else number(value, decimals)
    decimals = interval_decimals(low, high, decimals)
    return f"{number(value, decimals)} [{number(low, decimals)}, {number(high, decimals)}]"


def decimals_for(values: pd.Series, digits: int = 3) -> int:
    """Return the decimals, 0 to 6, that give even the smallest value of a column `digits` significant digits."""
    sizes = values.dropna().abs()
    sizes = sizes[sizes > 0]
    if sizes.empty:
        return 0
    return min(6, max(0, digits - 1 - math.floor(math.log10(sizes.min()))))


def lost_decimals(total: float) -> int:
    """Return the decimals of lost ranks and their causes: more if little is lost, as each part is still smaller."""
    return 3 if abs(total) < 1 else 2


def cause_label(cause: str, lost: float) -> str:
    """Return the label of a part of a slowdown, with the ranks that it costs, or gains if negative."""
    return "faster compute" if cause == "slower_compute_s" and lost < 0 else SLOWDOWN_LABELS[cause]


def part_of(part: int, count: int, noun: str) -> str:
    """Return the start of a statement about some of several: `1 of 8 intervals is`, `3 of 8 intervals are`."""
    return f"{part} of {count} {noun} {'is' if part == 1 else 'are'}"


def sizes_to_measure(largest: int) -> str:
    """Return the numbers of ranks, as for --gpus, that show how a study scales: powers of 2 up to the largest."""
    sizes = [2**power for power in range(12) if 2**power < largest] + [largest]
    return ",".join(map(str, sizes)) if largest > 1 else "1,2,4"


def percent(share: float, decimals: int = 0) -> str:
    """Return a share as a percentage, with a no-break space before the sign."""
    return f"{number(100 * share, decimals)}\u00a0%"


def significance(is_within_noise: bool) -> str:
    """Say whether a difference is significant, judged by its 95 % interval."""
    return f"{'not ' if is_within_noise else ''}significantly different, 95\u00a0%"


_IN_BRACKETS = re.compile(r"\([^()]*\)|\[[^\[\]]*\]")


def join(parts: list[str], last: str = "and") -> str:
    """Return the parts as an enumeration: `a, b and c`, or `a, b; c` if a part contains a comma outside brackets."""
    if len(parts) < 2:
        return "".join(parts)
    if any(", " in _IN_BRACKETS.sub("", part) for part in parts):
        return "; ".join(parts)
    return f"{', '.join(parts[:-1])} {last} {parts[-1]}"


def uncapitalised(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def held_bounds(checked: list[tuple[str, bool]]) -> str:
    """Return how many of the upper bounds of changes held, and which did not. checked: change, and whether it did."""
    failed = [change for change, held in checked if not held]
    text = f"{len(checked) - len(failed)} of {len(checked)} upper bounds held"
    return f"{text} (not {join(failed)})" if failed else text


_LINK = re.compile(r"(?<=!)(?=\[)|(?<=\])(?=[\[(:])")


def without_links(text: str) -> str:
    """Return a text for Markdown in which no bracket starts a picture, a link or its definition."""
    return _LINK.sub(r"\\", text)


def as_prose(text: str) -> str:
    """Return a text as one paragraph of Markdown: no markup of HTML, no link, and no heading, list or quote."""
    line = without_links(text.replace("<", "&lt;").replace("\n", " ").replace("\r", " "))
    return re.sub(r"^(\s*)(?=[#>*+|=~`-])", r"\1\\", re.sub(r"^(\s*\d+)(?=[.)](\s|$))", r"\1\\", line))


_UNDIVIDED = re.compile(
    r"(?<![\w-])--[a-z][a-z-]*(?:=[^\s.,;:()]+| \w+=[^\s.,;:()]+| \d+(?:,\d+)*)?"
    r"|\b[A-Z]{2,}-\d+\b|\b\d+ x [A-Z]\d+\b|-?\d[\d.,]*–\d[\d.,]*|\[-?[\d.,]+, -?[\d.,]+\]"
)
_CODE = re.compile(r"`([^`]+)`")


def as_html(text: str) -> Markup:
    """Return a text as HTML: escaped, `code` as such. No line divides options, percentages and names like GPT-2."""
    escaped = str(escape(text.replace(" %", "\u00a0%")))
    return Markup(_UNDIVIDED.sub(r'<span class="option">\g<0></span>', _CODE.sub(r"<code>\1</code>", escaped)))


SLOWDOWN_LABELS = {
    "transfer_s": "exposed transfer",
    "queueing_s": "queueing",
    "wait_s": "wait for slowest rank",
    "host_s": "host",
    "load_s": "load",
    "slower_compute_s": "slower compute",
    "remainder_s": "unexplained",
}


MOST_NAMED = 3
"""Maximum trials listed by name in one sentence."""


def named(trial_ids: Sequence[str]) -> str:
    """Return the trials by name; if there are many, the first ones and how many more."""
    first, more = list(trial_ids[:MOST_NAMED]), len(trial_ids) - MOST_NAMED
    return join([*first, f"{more} more"] if more > 0 else first)


GIB, MIB = 2**30, 2**20


GB = 1e9


PHASE_LABELS = {
    "load_wait_s": "load wait",
    "host_to_device_s": "host to device",
    "scatter_s": "scatter",
    "replicate_s": "replicate",
    "forward_s": "forward",
    "gather_s": "gather",
    "loss_s": "loss",
    "backward_s": "backward",
    "reduce_s": "reduce",
    "graph_s": "CUDA graph",
    "after_backward_s": "after backward",
    "optimizer_s": "optimizer",
    "other_s": "other",
}
