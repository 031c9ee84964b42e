"""Find the bottleneck of a step: the share of each part, the largest gain without it, and what would shrink it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from analysis.compare.causes import unloaded_step_s
from analysis.compare.communication import Communication
from analysis.read.schema import PHASES
from analysis.read.study_record import Improvement
from analysis.text import field_value, join, number, percent, value_label

_ENTIRE_STEP = 0.99
"""Share of a step from which on the rest of the step is too small to be known."""

BOUND_SHARE = 0.2
"""A step is bound by load and transfer together, or by wire, wait and contention, from this share on (critical
threshold of TraceML).
"""

LEAST_SHOWN = 0.0005
"""Share of a step below which a part is shown as 0."""

_ALL_TRANSFER = "transfer of gradients, exposed or slowing compute"

COMMUNICATION = ("wire", "wait", "contention")
"""Regions that a step without communication would not have."""

REGIONS = ("host", "load", "transfer", *COMMUNICATION, "idle", "compute")


@dataclass(frozen=True)
class Region:
    """The label of a region as a bound, what takes the time, and the change that shrinks it."""

    label: str
    takes: str
    change: str


WORDS: Mapping[str, Region] = {
    "host": Region("the host", "waiting for the host to issue work", "a larger batch, compilation or CUDA graphs"),
    "load": Region("loading", "waiting for a batch", "more loader workers or a format that decodes faster"),
    "transfer": Region(
        "the copy to the device",
        "copying the batch to the device",
        "pinned memory, copies ahead of the step (copy_ahead), or smaller samples",
    ),
    "wire": Region(
        "communication",
        "exposed transfer of gradients",
        "a larger batch per rank, smaller gradients or a faster interconnect",
    ),
    "wait": Region(
        "waiting for the slowest rank", "waiting for the slowest rank", "ranks of equal speed with equal work"
    ),
    "contention": Region(
        "compute that communication slows down",
        "computing more slowly while gradients are transferred",
        "smaller gradients, a larger batch per rank or a faster interconnect",
    ),
    "idle": Region(
        "unexplained idle time",
        "idle time of the device without a measured cause",
        "removing what the device waits for (--profile shows it)",
    ),
    "compute": Region(
        "compute", "forward, loss, backward and optimizer", "lower precision, compilation or a faster device"
    ),
}


def regions(configurations: pd.DataFrame, traffic: Communication) -> pd.DataFrame:
    """Return the share of a step per region in `REGIONS`, and the `bound`; indexed like `configurations`.

    configurations: see the function of that name. Shares add up to 1. If phases are unknown, they are NaN and bound is
    None.

    load: the longest wait of a rank for its batch, for which the others wait. transfer: phase of the step. wire, wait:
    exposed parts of the communication breakdown, as shares of a step in its window (see `unloaded_step_s`); 0 on one
    rank. On several ranks without a breakdown they are NaN and included in compute. host: if the step is host-bound
    (`measures.summarise`), the device's idle time that no other region explains, and wait, which then is 0. NaN, and
    included in compute, if kernel time is unknown. compute: the rest, at most the kernel time if known. contention: of
    the remainder, what a step lasts longer than one under no_sync beyond its exposed communication, at most what it
    lasts longer than on one rank; 0 if strategies communicate under no_sync too. idle: what then remains.

    slower_unknown: True if communication was measured, but not how much it slows compute down: without steps under
    no_sync, or with a strategy that communicates there too. contention then is 0, and is included in compute.

    bound: the largest of host, load + transfer, wire + wait + contention, and idle (of a sum, the largest part) if it
    takes at least `BOUND_SHARE`; else "host" if the step is host-bound, and "compute" if not. "host" also if the step
    is host-bound but the host's share is unknown.
    """
    parts = configurations[list(PHASES)].astype(float)
    total = parts.sum(axis=1, min_count=1).where(configurations["phases_step_s"].astype(float).notna())
    total = total.where(total > 0)
    exposed = traffic.exposed.reindex(configurations.index)
    step_s, alone = configurations["step_s"].astype(float), configurations["world_size"] == 1
    window_step_s = exposed["communication_step_s"].astype(float)
    scale = unloaded_step_s(total, configurations, window_step_s) / total / window_step_s
    shares = pd.DataFrame(
        {
            "load": configurations["longest_load_wait_s"].astype(float).fillna(0.0) / total,
            "transfer": parts["host_to_device_s"].fillna(0.0) / total,
            "wire": (exposed["exposed_wire_s"].astype(float) * scale).mask(alone, 0.0),
            "wait": (exposed["exposed_wait_s"].astype(float) * scale).mask(alone, 0.0),
        }
    )
    host_bound = pd.Series([value is True for value in configurations["host_bound"]], index=configurations.index)
    busy = configurations["busy_s"].astype(float) / step_s
    idle = 1 - busy - shares.sum(axis=1)
    # Where the host bounds the step, a rank is late because its host is.
    shares["host"] = (idle.clip(lower=0.0) + shares["wait"].fillna(0.0)).where(host_bound, 0.0)
    shares["wait"] = shares["wait"].mask(host_bound & shares["wait"].notna(), 0.0)
    unexplained = idle.clip(lower=0.0).fillna(0.0).mask(host_bound, 0.0)
    longer = exposed["difference_s"].astype(float) / exposed["synchronised_step_s"].astype(float)
    contention = (longer - shares["wire"] - shares["wait"]).mask(exposed["traced"].eq(True))
    contention = contention.fillna(0.0).clip(upper=_growth(traffic.slowdown, step_s) - shares["wire"] - shares["wait"])
    shares["contention"] = contention.clip(upper=unexplained).clip(lower=0.0)
    shares["idle"] = unexplained - shares["contention"]
    # Windows differ, so that parts from several of them may add up to more than a step.
    shares = shares.div(shares.sum(axis=1).clip(lower=1.0), axis=0)
    shares["compute"] = (1 - shares.sum(axis=1)).clip(lower=0.0)
    shares = shares.where(total.notna())[list(REGIONS)]
    bound = _bound(shares).astype(object)
    bound = bound.mask(host_bound & (shares["host"].isna() | (bound == "compute")), "host")
    shares["bound"] = bound.where(total.notna() | host_bound, None)
    without_difference = exposed["difference_s"].isna() | exposed["traced"].eq(True)
    shares["slower_unknown"] = without_difference & shares["wire"].notna() & ~alone
    return shares


def removable(shares: pd.DataFrame) -> pd.DataFrame:
    """Return the share of the step of each part that one kind of change can remove, see `regions` for `shares`.

    wire includes contention, for gradients that need no transfer slow nothing down. Unknown parts are 0.
    """
    parts = shares[list(REGIONS)].astype(float).fillna(0.0)
    parts["wire"] += parts["contention"]
    return parts.drop(columns=["contention", "compute"])


def removed_words(part: str, shares: pd.Series) -> str:
    """Name a part of `removable`, with the row of `regions` that it is from."""
    return _ALL_TRANSFER if part == "wire" and shares["contention"] >= LEAST_SHOWN else WORDS[part].takes


def is_exposed_only(part: str, shares: pd.Series) -> bool:
    """Return True if a part of `removable` lacks the compute that it slows down, which is unknown. shares: its row."""
    return part == "wire" and bool(shares["slower_unknown"])


def _growth(slowdown: pd.DataFrame, step_s: pd.Series) -> pd.Series:
    """Return how much longer a step lasts than on one rank, as a share of the step; infinite if unknown."""
    growth = pd.Series(math.inf, index=step_s.index)
    if slowdown.empty:
        return growth
    from_one = slowdown[slowdown["reference_world_size"] == 1].set_index("configuration")["growth_s"].astype(float)
    return (from_one / step_s.reindex(from_one.index)).reindex(step_s.index).fillna(growth)


_TOGETHER = (("host",), ("load", "transfer"), COMMUNICATION, ("idle",))
"""Regions whose shares are added up to see what bounds a step."""


def _bound(shares: pd.DataFrame) -> pd.Series:
    """Return the region whose share is known to bound each step, else "compute"; see `regions`."""
    known = shares.fillna(0.0)
    sums = pd.DataFrame({number: known[list(names)].sum(axis=1) for number, names in enumerate(_TOGETHER)})
    largest = pd.DataFrame({number: known[list(names)].idxmax(axis=1) for number, names in enumerate(_TOGETHER)})
    bound = pd.Series(
        largest.to_numpy()[range(len(shares)), sums.to_numpy().argmax(axis=1)], index=shares.index, dtype=object
    )
    return bound.where(sums.max(axis=1) >= BOUND_SHARE, "compute")


def larger_compute(shares: pd.Series) -> str:
    """Return the share of compute, if it is larger than that of the bound, as the end of a list of shares; else "".

    shares: a row of `regions`, whose rule lets parts that a change can remove count before compute. If that needs the
    sum of several parts, it is listed too.
    """
    kind = str(shares["bound"])
    if kind == "compute" or not shares["compute"] > shares[kind]:
        return ""
    compute = f"; compute {percent(float(shares['compute']))}"
    if kind == "host" or shares[kind] >= BOUND_SHARE:
        return compute
    together = float(shares[list(next(names for names in _TOGETHER if kind in names))].astype(float).sum())
    return f"; {_SUMS[kind]} {percent(together)}{compute}"


_SUMS = {"load": "loading with its copy", "transfer": "the copy with loading"} | dict.fromkeys(
    COMMUNICATION, "all communication"
)
"""The regions of `_TOGETHER` that are added up, by their largest part."""


def largest_gain(share: float) -> float:
    """Return the largest possible speed-up from removing a part with this share of a step (Amdahl, 1967).

    Infinite if the part takes nearly the entire step, whose remainder is then too small to be known.
    """
    return 1 / (1 - share) if share < _ENTIRE_STEP else math.inf


def largest_gain_text(share: float) -> str:
    """Return the largest possible speed-up from removing a part with this share of a step: `at most 2.13x`."""
    gain = largest_gain(share)
    return f"at most {number(gain, 2)}x" if math.isfinite(gain) else "no upper bound: it takes the entire step"


def issue_ratio(configurations: pd.DataFrame) -> pd.Series:
    """Return host time to issue a step / device time of its kernels per configuration; NaN if unknown.

    Above 1 the host is the slower of the two. The ratio is the largest possible speed-up from issuing in no time.
    """
    return configurations["step_launch_s"].astype(float) / configurations["busy_s"].astype(float)


NOT_CAPTURED = ("dp", "horovod", "zero1", "fsdp2", "hsdp")
"""Strategies whose steps cannot be captured in a CUDA graph."""


def change_for(part: str, row: pd.Series) -> str:
    """Return the change that shrinks a region of a configuration's step, without those that it already uses."""
    if part == "host":
        return fewer_launches(row)
    return faster_compute(row) if part == "compute" else WORDS[part].change


def fewer_launches(row: pd.Series) -> str:
    """Return the changes that help a host-bound configuration, except those it already uses."""
    execution = str(row.get("execution", "eager"))
    changes = [*_processes(row), "a larger batch"]
    changes += [] if "compile" in execution else ["compilation"]
    changes += [] if "graph" in execution or row.get("parallel") in NOT_CAPTURED else ["CUDA graphs"]
    return join(changes, "or")


def faster_compute(row: pd.Series) -> str:
    """Return the changes that help a compute-bound configuration, except those it already uses."""
    changes = _processes(row)
    changes += ["lower precision"] if row.get("precision") in ("fp32", "tf32") else []
    changes += [] if "compile" in str(row.get("execution", "eager")) else ["compilation"]
    return join([*changes, "a faster device"], "or")


def _processes(row: pd.Series) -> list[str]:
    """Return the change from DataParallel, whose threads share one interpreter, to a process per GPU."""
    return ["DDP in place of DataParallel"] if row.get("parallel") == "dp" and row["world_size"] > 1 else []


_GAIN_FLAGS = ("is_measured", "is_used", "is_open", "is_partial")
GAIN_COLUMNS = ["change", "how", "gain", "gain_low", "gain_high", *_GAIN_FLAGS, "configuration"]

_LEAST_GAIN = 1.005
"""Upper bounds below this gain are omitted."""


def gain_rows(
    shares: pd.DataFrame,
    changes: pd.DataFrame,
    configurations: pd.DataFrame,
    headline: int | None,
    ranks: tuple[str, str],
    improvement: Improvement | None = None,
) -> pd.DataFrame:
    """Return what changes gain in throughput: upper bounds for the headline configuration, and measured changes.

    shares: see `regions`. changes: see `one_field.change_rows`. headline: see `best.headline`. improvement: outcome of
    `improve`, whose measured gains replace the changes.

    Columns: change (what is eliminated, or the value chosen), how (what to change, or the alternative), gain with
    interval (null for bounds), is_measured, is_used (the headline has this value), is_open (the headline has the
    alternative, so that this change is still open), is_partial (a bound of what is
    exposed, since slower compute is unknown), configuration. Measured ones first, then the largest gain. The gain of a
    bound is null if the part takes the entire step.
    """
    rows: list[dict[str, object]] = [
        {
            "change": value_label(row["field"], row["value"], ranks),
            "how": f"instead of {field_value(row['field'], row['against'])}",
            "gain": row["ratio"],
            "gain_low": row["ratio_low"],
            "gain_high": row["ratio_high"],
            "is_measured": True,
            "is_used": headline is not None and configurations.at[headline, row["field"]] == row["value"],
            "is_open": headline is not None and configurations.at[headline, row["field"]] == row["against"],
            "configuration": row["configuration"],
        }
        for _, row in (changes if improvement is None else changes.iloc[:0]).iterrows()
    ]
    rows += [] if improvement is None else _lever_gains(improvement, headline)
    rows += [] if headline is None else _bounds(shares.loc[[headline]], configurations.loc[[headline]].iloc[0])
    result = pd.DataFrame(rows, columns=GAIN_COLUMNS)
    flags = {name: result[name].eq(True) for name in _GAIN_FLAGS}
    return result.assign(**flags).astype({name: float for name in ("gain", "gain_low", "gain_high")})


def _bounds(shares: pd.DataFrame, row: pd.Series) -> list[dict[str, object]]:
    """Return the upper bounds of one configuration for `gain_rows`, the largest first. shares, row: its rows."""
    rows: list[dict[str, object]] = []
    parts = removable(shares).iloc[0].sort_values(ascending=False, kind="stable")
    for name, share in parts.items():
        gain = largest_gain(share)
        if gain >= _LEAST_GAIN:
            rows.append(
                {
                    "change": f"no {removed_words(str(name), shares.iloc[0])}",
                    "how": change_for(str(name), row),
                    "gain": gain if math.isfinite(gain) else None,
                    "is_partial": is_exposed_only(str(name), shares.iloc[0]),
                    "configuration": shares.index[0],
                }
            )
    return rows


def _lever_gains(improvement: Improvement, headline: int | None) -> list[dict[str, object]]:
    """Return the gains in throughput that `improve` measured, the largest first."""
    measured = [(row, row.gain_on_all) for row in improvement.levers if row.gain_on_all is not None]
    return [
        {
            "change": row.lever,
            "how": f"added to {join(list(row.onto))}" if row.onto else "added to the baseline",
            "gain": gain.value,
            "gain_low": gain.low,
            "gain_high": gain.high,
            "is_measured": True,
            "is_open": True,
            "configuration": headline,
        }
        for row, gain in sorted(measured, key=lambda entry: -entry[1].value)
    ]
