"""Sentences on what bounds the step."""

import numpy as np
import pandas as pd

from analysis.compare.best import best_configurations
from analysis.compare.bottleneck import BOUND_SHARE, REGIONS, WORDS, fewer_launches, issue_ratio, largest_gain, regions
from analysis.study import Analysis, study_ranks
from analysis.text import configuration_label, join, number, percent, telling_fields

NOISE = 0.03
"""Gain by the instruments, which there cannot be, from which a machine is called noisy."""


def bounds(analysis: Analysis) -> str | None:
    """What bounds the fastest configuration, the number that shows it, and what would help most, with its upper bound.

    Then the other bounds in the study, and the configuration where one change could bring most. Where configurations do
    several kinds of work none is the fastest, and only these are told.
    """
    found = analysis.configurations
    of = regions(found, analysis.communication)
    known = of["bound"].dropna()
    if known.empty:
        return None
    fastest, text = None, []
    if len(best_configurations(analysis.configurations, analysis.axes, analysis.fields)) == 1:
        fastest = int(found["throughput_samples_per_s"].astype(float).to_numpy().argmax())
        if of["bound"].iloc[fastest] is None:
            return None
        text = [f"The fastest configuration is bound by {_bound(of.iloc[fastest], found.iloc[fastest])}"]
    counts = known.value_counts()
    if fastest is not None and len(known) == 1:
        return text[0]
    if len(counts) == 1:
        return " ".join([*text, f"All {len(known)} configurations are bound by {WORDS[str(counts.index[0])].label}."])
    listed = join(
        [f"{count} {'is' if count == 1 else 'are'} bound by {WORDS[str(kind)].label}" for kind, count in counts.items()]
    )
    text.append(f"Of the {len(known)} configurations, {listed}.")
    removable = [name for name in REGIONS if name not in ("compute", "idle")]
    part = of[removable].astype(float).fillna(0.0).to_numpy()
    where, column = np.unravel_index(part.argmax(), part.shape)
    gain, kind = float(part.max()), removable[int(column)]
    if where == fastest or gain < BOUND_SHARE:
        return " ".join(text)
    names = [*(name for name in analysis.axes if name != "world_size"), "world_size"]
    named = telling_fields(found, found.iloc[int(where)], names)
    label = configuration_label(found.iloc[int(where)], named, study_ranks(analysis))
    text.append(
        f"One change could bring most with {label}: without {WORDS[kind].takes}, {percent(gain)} of a step, it would be "
        f"at most {number(largest_gain(gain), 2)} times as fast."
    )
    return " ".join(text)


def _bound(shares: pd.Series, row: pd.Series) -> str:
    """The bound of one configuration with its share, the change that helps most, and what it would bring at most."""
    kind = str(shares["bound"])
    words, share = WORDS[kind], float(shares[kind])
    change = words.change
    if kind == "host":
        shown = f"{words.label}, which takes {number(1e3 * row['step_launch_s'], 1)} ms to issue a step"
        change = fewer_launches(row)
        if pd.isna(share) or share <= 0:
            return f"{shown}. What helps is {change}."
        shown += f": {words.takes} takes {percent(share)} of it"
    elif kind == "compute":
        rest = {name: float(shares[name]) for name in REGIONS if name != "compute" and shares[name] > 0}
        largest = max(rest, key=lambda name: rest[name], default="")
        timed, known = pd.notna(row["busy_s"]), pd.notna(shares["wire"])
        unknown = " (communication that is not hidden, which was not measured, is in it)"
        kernels = "kernels of " if timed else ""
        shown = (
            f"{words.label}: {kernels}{words.takes} take {percent(share)} of a step{'' if timed or known else unknown}"
        )
        if not largest or rest[largest] < NOISE:
            return f"{shown}. What helps is {words.change}."
        return (
            f"{shown}. What helps is {words.change}; the largest other part is {WORDS[largest].takes}, {percent(rest[largest])}"
            f"{unknown if largest == 'idle' and not known else ''}, without which a step would be at most "
            f"{number(largest_gain(rest[largest]), 2)} times as fast."
        )
    else:
        shown = f"{words.label}: {words.takes} takes {percent(share)} of a step"
    gain = number(largest_gain(share), 2)
    return f"{shown}. What helps most is {change}; without that part a step would be at most {gain} times as fast."


def host_bound(analysis: Analysis) -> str | None:
    """How many configurations the host limits, by how much where the GPU is idle most, and what to do; None for none."""
    found = analysis.configurations
    limited = found[[value is True for value in found["host_bound"]]]
    if limited.empty:
        return None
    ratio = issue_ratio(limited)
    idle = 1 - limited["busy_fraction"].astype(float)
    by = idle if idle.notna().any() else limited["step_launch_s"].astype(float)
    place = int(by.fillna(0.0).to_numpy().argmax())
    worst = limited.iloc[place]
    names = telling_fields(found, worst, [*(n for n in analysis.axes if n != "world_size"), "world_size"])
    label = configuration_label(worst, names, study_ranks(analysis))
    issue = f"it needs {number(1e3 * worst['step_launch_s'], 1)} ms to issue a step"
    if pd.notna(ratio.iloc[place]):
        issue += (
            f" whose kernels take the GPU {number(1e3 * worst['busy_s'], 1)} ms, {number(ratio.iloc[place], 1)} times as long, and the "
            f"GPU is busy for {percent(worst['busy_fraction'])} of the step"
        )
    return (
        f"The host limits {len(limited)} of {len(found)} configurations{', most' if len(limited) > 1 else ''} with {label}: {issue}. "
        f"There {fewer_launches(worst)} can help: more work for each launch, or fewer of them."
    )
