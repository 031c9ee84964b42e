"""How values read: names of fields, ranks and configurations, and numbers rounded alike throughout a column."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

MISSING = "–"


MOST_FIELDS = 8
"""that a configuration is named by in prose; of more, those that set it apart"""


_UNITS_AFTER = {
    "loader_workers": ("loader worker", "loader workers"),
    "nodes": ("node", "nodes"),
    "prefetch_batches": ("prefetched batch", "prefetched batches"),
    "cpus_per_rank": ("CPU core per rank", "CPU cores per rank"),
}


_BARE = ("precision", "model", "dataset", "parallel", "memory_format", "device")


def rank_noun(devices: Iterable[str]) -> tuple[str, str]:
    """What ranks are called, one and several: GPUs only where every one of them held a GPU."""
    kinds = set(devices)
    if kinds == {"cuda"}:
        return "GPU", "GPUs"
    if kinds == {"cpu"}:
        return "CPU rank", "CPU ranks"
    return "rank", "ranks"


def field_label(field: str, ranks: tuple[str, str]) -> str:
    """A field's name for a column head."""
    one, several = ranks
    labels = {
        "world_size": several,
        "batch_per_gpu": f"batch per {one}",
        "global_batch": "global batch",
    }
    return labels.get(field, field.replace("_", " "))


def value_label(field: str, value: Any, ranks: tuple[str, str]) -> str:
    """A field with its value, for prose and pictures: "4 GPUs", "batch 32 per GPU", "bf16", "2 loader workers"."""
    if field == "world_size":
        return f"{value} {ranks[0] if value == 1 else ranks[1]}"
    if field == "batch_per_gpu":
        return f"batch {value} per {ranks[0]}"
    if field == "global_batch":
        return f"global batch {value}"
    if field in _UNITS_AFTER:
        one, several = _UNITS_AFTER[field]
        return f"{value} {one if value == 1 else several}"
    if field == "interconnect" and value != "auto":
        return field_value(field, value)
    if field in _BARE:
        return text(value)
    return f"{field.replace('_', ' ')} {text(value)}"


def configuration_label(row: Mapping[str, Any] | pd.Series, fields: Iterable[str], ranks: tuple[str, str]) -> str:
    """The named fields of a configuration in one phrase, separated by commas; those without a value are left out."""
    return ", ".join(value_label(name, row[name], ranks) for name in fields if text(row[name]) != MISSING)


def telling_fields(found: pd.DataFrame, row: pd.Series, fields: Sequence[str]) -> list[str]:
    """The fields that name a configuration among those `found`: all, or of more than `MOST_FIELDS` those in which it differs
    from most of the others."""
    if len(fields) <= MOST_FIELDS:
        return list(fields)
    return [name for name in fields if name == "world_size" or text(row[name]) != found[name].map(text).mode().iloc[0]]


def field_value(field: str, value: Any) -> str:
    """A field's value as a cell shows it. An interconnect that NCCL did not choose itself is called emulated."""
    shown = text(value)
    return f"{shown} (emulated)" if field == "interconnect" and shown not in ("auto", MISSING) else shown


def size(value_bytes: float) -> str:
    """Bytes in binary units, four digits at most: "4 B", "25.4 MiB", "1 GiB"."""
    for unit, least in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value_bytes >= least:
            return f"{value_bytes / least:.1f}".removesuffix(".0") + f"\u00a0{unit}"
    return f"{value_bytes:.0f}\u00a0B"


def text(value: Any) -> str:
    """A value as a cell shows it; missing values are a dash."""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    return MISSING if value == "" or pd.isna(value) else str(value)


def number(value: float | None, decimals: int) -> str:
    """A number with thousands separated, a dash where it is missing."""
    return MISSING if value is None or pd.isna(value) else f"{round(value, decimals) + 0.0:,.{decimals}f}"  # no "-0"


def with_interval(value: float, low: float, high: float, decimals: int, too_wide: bool = False) -> str:
    """`12.3 [11.9, 12.8]`, or `12.3 [too wide to use]`; the number alone where there is no interval."""
    if pd.isna(low) or pd.isna(high):
        return number(value, decimals)
    if too_wide:
        return f"{number(value, decimals)} [too wide to use]"
    return f"{number(value, decimals)} [{number(low, decimals)}, {number(high, decimals)}]"


def decimals_for(values: pd.Series, digits: int = 3) -> int:
    """Decimals, 0 to 6, that give the smallest value of a column `digits` significant digits, and so all of them."""
    sizes = values.dropna().abs()
    sizes = sizes[sizes > 0]
    if sizes.empty:
        return 0
    return min(6, max(0, digits - 1 - math.floor(math.log10(sizes.min()))))


def percent(share: float, decimals: int = 0) -> str:
    """A share as a percentage, with a no-break space before the sign."""
    return f"{number(100 * share, decimals)}\u00a0%"


def join(parts: list[str], last: str = "and") -> str:
    """`a, b and c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {last} {parts[-1]}" if parts else ""


SLOWDOWN_LABELS = {
    "exposed_wire_s": "exposed wire",
    "exposed_wait_s": "exposed wait",
    "host_work_s": "host work",
    "load_s": "load",
    "remainder_s": "remainder",
}


MOST_NAMED = 3
"""trials by their names in one sentence"""


def named(trial_ids: Sequence[str]) -> str:
    """Trials by their names, of many the first."""
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
    "optimizer_s": "optimizer",
}
