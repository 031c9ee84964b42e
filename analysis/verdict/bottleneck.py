"""Sentences on what limits the step time."""

import numpy as np
import pandas as pd

from analysis.compare.best import best_configurations
from analysis.compare.bottleneck import (
    BOUND_SHARE,
    WORDS,
    change_for,
    fewer_launches,
    is_exposed_only,
    issue_ratio,
    largest_gain_text,
    removable,
    removed_words,
)
from analysis.study import Analysis, study_ranks
from analysis.text import join, number, percent, telling_label

NOISE = 0.03
"""Apparent gain from measuring, which is impossible, above which a machine counts as noisy."""

_UNMEASURED = " (includes unhidden communication, which was not measured)"


def bounds(analysis: Analysis) -> str | None:
    """State what limits the fastest configuration, the evidence, and the upper bound of the best change.

    Then list the limits of the other configurations, and the largest gain that one change could bring anywhere. If
    the study mixes workloads, no configuration is the fastest and only these two are reported.
    """
    configurations = analysis.configurations
    shares = analysis.regions
    known = shares["bound"].dropna()
    if known.empty:
        return None
    fastest, text = None, []
    if len(best_configurations(configurations, analysis.axes, analysis.fields)) == 1:
        rate = configurations["throughput_samples_per_s"].astype(float)
        resolved = rate.mask(configurations["throughput_samples_per_s_more"].astype(float) > 0)
        fastest = int((resolved if resolved.notna().any() else rate).fillna(0.0).to_numpy().argmax())
        if shares["bound"].iloc[fastest] is None:
            return None
        bound = _bound(shares.iloc[[fastest]], configurations.iloc[fastest])
        text = [f"The fastest configuration is bound by {bound}"]
    counts = known.value_counts()
    if fastest is not None and len(known) == 1:
        return text[0]
    if len(counts) == 1:
        all_of_them = "Both" if len(known) == 2 else f"All {len(known)}"
        return " ".join([*text, f"{all_of_them} configurations are bound by {WORDS[str(counts.index[0])].label}."])
    listed = [
        f"{count} {'is' if count == 1 else 'are'} bound by {WORDS[str(kind)].label}" for kind, count in counts.items()
    ]
    text.append(f"Of the {len(known)} configurations, {join(listed)}.")
    if largest := _largest_gain(analysis, shares, fastest):
        text.append(largest)
    return " ".join(text)


def _largest_gain(analysis: Analysis, shares: pd.DataFrame, fastest: int | None) -> str | None:
    """State where removing one part of a step gains most; None if that is small, or the fastest configuration."""
    configurations = analysis.configurations
    parts = removable(shares).drop(columns="idle")
    row, column = (int(index) for index in np.unravel_index(parts.to_numpy().argmax(), parts.shape))
    share = float(parts.to_numpy()[row, column])
    if row == fastest or share < BOUND_SHARE:
        return None
    names = [*(name for name in analysis.axes if name != "world_size"), "world_size"]
    configuration = configurations.iloc[row]
    label = telling_label(configurations, configuration, names, study_ranks(analysis))
    return (
        f"Largest possible gain: {largest_gain_text(share)} for {label}, by eliminating "
        f"{removed_words(str(parts.columns[column]), shares.iloc[row])} ({percent(share)} of the step)."
    )


def _bound(of_one: pd.DataFrame, row: pd.Series) -> str:
    """Return the bound of one configuration with its share, the change that helps most, and its largest gain."""
    shares, parts = of_one.iloc[0], removable(of_one).iloc[0]
    kind = str(shares["bound"])
    if kind == "compute":
        return _compute_bound(shares, parts, row)
    words, share, change = WORDS[kind], float(shares[kind]), change_for(kind, row)
    if kind == "host":
        shown = f"{words.label}: {launching(row)}"
        if pd.isna(share) or share <= 0:
            return f"{shown}. Suggested change: {change}."
        shown += f", and {words.takes} takes {percent(share)} of it"
    else:
        shown = f"{words.label}: {words.takes} takes {percent(share)} of a step"
    part = "wire" if kind == "contention" else kind
    of = " for what is exposed" if is_exposed_only(part, shares) else ""
    return f"{shown}. Suggested change: {change} ({largest_gain_text(float(parts[part]))}{of})."


def launching(row: pd.Series) -> str:
    """Return how long a host-bound step takes to launch. In its own window, that may exceed the plain step."""
    launch, step = (number(1e3 * float(row[name]), 1) for name in ("step_launch_s", "step_s"))
    if row["step_launch_s"] >= row["step_s"]:
        return f"launching a step takes all of its {step} ms"
    return f"{launch} ms to launch a step of {step} ms"


def _compute_bound(shares: pd.Series, parts: pd.Series, row: pd.Series) -> str:
    words, largest = WORDS["compute"], str(parts.idxmax())
    share = float(parts[largest])
    has_kernel_times, has_communication = pd.notna(row["busy_s"]), pd.notna(shares["wire"])
    kernels = "kernels of " if has_kernel_times else ""
    note = "" if has_kernel_times or has_communication else _UNMEASURED
    shown = f"{words.label}: {kernels}{words.takes} take {percent(float(shares['compute']))} of a step{note}"
    text = f"{shown}. Suggested change: {change_for('compute', row)}"
    if share < NOISE:
        return f"{text}."
    note = _UNMEASURED if largest == "idle" and not has_communication else ""
    return (
        f"{text}. The largest other part is {removed_words(largest, shares)}, {percent(share)}{note}; eliminating it "
        f"gains {largest_gain_text(share)}."
    )


def host_bound(analysis: Analysis) -> str | None:
    """State how many configurations are host-bound, the worst of them, and what to change; None if there are none."""
    configurations = analysis.configurations
    limited = configurations[[value is True for value in configurations["host_bound"]]]
    if limited.empty:
        return None
    ratio = issue_ratio(limited)
    idle = 1 - limited["busy_fraction"].astype(float)
    severity = idle if idle.notna().any() else limited["step_launch_s"].astype(float)
    index = int(severity.fillna(0.0).to_numpy().argmax())
    worst = limited.iloc[index]
    names = [*(name for name in analysis.axes if name != "world_size"), "world_size"]
    label = telling_label(configurations, worst, names, study_ranks(analysis))
    launch = launching(worst)
    if pd.notna(ratio.iloc[index]):
        launch = (
            f"it needs {number(1e3 * worst['step_launch_s'], 1)} ms to launch a step, "
            f"{number(ratio.iloc[index], 1)} times the {number(1e3 * worst['busy_s'], 1)} ms that the GPU needs for "
            f"its kernels, so the GPU is busy for {percent(worst['busy_fraction'])} of the step"
        )
    return (
        f"{len(limited)} of {len(configurations)} configurations {'is' if len(limited) == 1 else 'are'} host-bound "
        f"(CPU launch-bound){', most of all' if len(limited) > 1 else ','} {label}: {launch}. "
        f"Suggested change: {fewer_launches(worst)}, that is, fewer launches or more work per launch."
    )
