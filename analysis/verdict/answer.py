"""The answer to the study's question: efficiency, the best configuration, and what limits it.

Each function returns one sentence, or None if the study has no data for it.
"""

import pandas as pd

from analysis.compare.best import MAX_LISTED_WORKLOADS, BestConfiguration, best_configurations
from analysis.compare.scaling import STRONG, WEAK
from analysis.measure.configurations import characters_per_s
from analysis.read.schema import PHASES
from analysis.study import Analysis, study_ranks
from analysis.text import (
    PHASE_LABELS,
    configuration_label,
    not_resolved,
    number,
    percent,
    significance,
    value_label,
    with_interval,
)
from analysis.verdict import accuracy as accuracy_verdict
from analysis.verdict import study as study_verdict
from analysis.verdict.bottleneck import bounds, host_bound
from analysis.verdict.communication import slowdown
from analysis.verdict.efficiency import compared_series, efficiency, series_label
from analysis.verdict.next_steps import best as best_for
from analysis.verdict.trust import LONGEST_REASON, MOST_REASONS


def answer(analysis: Analysis) -> list[str]:
    """Answer the study's question: ladder, accuracy, efficiency, comparisons, missing results, best configuration."""
    candidates = [study_verdict.ladder(analysis), *accuracy_verdict.sentences(analysis)]
    if not analysis.configurations.empty:
        candidates += [efficiency(analysis, WEAK), efficiency(analysis, STRONG)]
        candidates += [study_verdict.comparisons(analysis), study_verdict.memory(analysis)]
    candidates.append(unmeasured(analysis))
    if not analysis.configurations.empty:
        candidates += best_for_goal(analysis)
    return [sentence for sentence in candidates if sentence]


def unmeasured(analysis: Analysis) -> str | None:
    """State how many trials have no result, and the most common reasons."""
    trials = analysis.results.trials
    without = trials[trials["status"] != "done"]
    if without.empty:
        return None
    memory = without["status"].isin(["out_of_memory", "pruned"])
    reasons = without["reason"].mask(memory, "out of memory").str.slice(0, LONGEST_REASON)
    counts = reasons.value_counts()
    listed = [f"{reason} ({count})" for reason, count in counts.head(MOST_REASONS).items()]
    if more := len(counts) - len(listed):
        listed.append(f"{more} more reason{'s' if more > 1 else ''}")
    verb = "has" if len(without) == 1 else "have"
    return f"{len(without)} of {len(trials)} trials {verb} no result: {'; '.join(listed)}."


def limits(analysis: Analysis) -> list[str]:
    """Return sentences on what limits the study's configurations; empty if no trial is done or no phase is known."""
    if analysis.configurations.empty:
        return []
    candidates = (study_verdict.step_parts(analysis), bounds(analysis), host_bound(analysis), growth(analysis))
    return [sentence for sentence in candidates if sentence]


def best_for_goal(analysis: Analysis) -> list[str | None]:
    """State the highest throughput, then the best configuration for the study's goal if that is another one."""
    goal = analysis.record.goal
    is_answered = goal in (None, "throughput") or (goal == "time-to-accuracy" and analysis.accuracy is not None)
    return [best(analysis), None if is_answered else best_for(analysis, str(goal))]


def best(analysis: Analysis) -> str | None:
    """State the highest throughput of each workload, and whether the runner-up differs significantly."""
    workloads = best_configurations(analysis.configurations, analysis.axes, analysis.fields)
    if len(workloads) > MAX_LISTED_WORKLOADS:
        return f"The study mixes {len(workloads)} workloads, so there is no single fastest configuration."
    return " ".join(_best_of_workload(analysis, workload) for workload in workloads)


def _best_of_workload(analysis: Analysis, workload: BestConfiguration) -> str:
    configurations, ranks = analysis.configurations, study_ranks(analysis)
    first = configurations.iloc[workload.best]
    excluded = (*workload.workload, *analysis.fields.timing, "world_size")
    names = [*(name for name in analysis.axes if name not in excluded), "world_size"]
    value, low, high = (float(first[f"throughput_samples_per_s{end}"]) for end in ("", "_low", "_high"))
    workload_label = configuration_label(workload.workload, workload.workload, ranks)
    start = f"The highest throughput{f' of {workload_label}' if workload_label else ''} is"
    if (more := float(first["throughput_samples_per_s_more"])) > 0:
        return f"{start} {not_resolved(more)}."
    text = f"{start} {with_interval(value, low, high, 0 if value >= 1000 else 1)} samples/s"
    if pd.notna(characters := characters_per_s(configurations, analysis.fields).iloc[workload.best]):
        text += f", {number(characters, 0)} characters/s"
    if label := configuration_label(first, names, ranks):
        text += f", with {label}"
    if workload.runner_up is None:
        return f"{text}."
    second = configurations.iloc[workload.runner_up]
    differing = [name for name in names if second[name] != first[name]]
    text += f"; the runner-up ({configuration_label(second, differing, ranks) or 'otherwise equal'}) is"
    if workload.more > 0:
        return f"{text} slower by a ratio that is {not_resolved(workload.more)}."
    text += f" {percent(1 - 1 / workload.ratio, 1)} slower"
    if workload.within_noise is None:
        return f"{text}, but one repeat cannot tell whether they differ."
    return f"{text} ({significance(workload.within_noise)})."


def growth(analysis: Analysis) -> str | None:
    """State which phase grows most with more ranks, for the series that loses most under weak scaling.

    None if the communication breakdown already explains that slowdown, or if the step grows by 2 % or less.
    """
    rows = compared_series(analysis, WEAK)
    rows = rows[rows["world_size"] == rows["world_size"].max()]
    if rows.empty:
        return None
    worst = rows.loc[rows["efficiency"].idxmin()]
    if slowdown(analysis) and worst["configuration"] in set(analysis.communication.slowdown["configuration"]):
        return None
    large, small = analysis.configurations.loc[worst["configuration"]], analysis.configurations.loc[worst["reference"]]
    longer_s = (large[list(PHASES)].astype(float) - small[list(PHASES)].astype(float)).dropna()
    total_s = large["phases_step_s"] - small["phases_step_s"]
    if longer_s.empty or pd.isna(total_s) or total_s <= 0.02 * small["phases_step_s"]:
        return None
    phase = str(longer_s.idxmax())
    includes_all_reduce = phase == "backward_s" and large.get("parallel") != "dp"
    contents = ", which includes the all-reduce and the wait for slower ranks" if includes_all_reduce else ""
    launch_s = large["step_launch_s"] - small["step_launch_s"]
    note = ""
    if large["host_bound"] is True and launch_s > 0:
        note = (
            f" The device waits for the host there: the time to launch a step grows by {number(1e3 * launch_s, 1)} ms."
        )
    size = value_label("world_size", int(worst["world_size"]), study_ranks(analysis))
    return (
        f"The largest weak-scaling loss ({series_label(analysis, worst, WEAK)}): a step takes "
        f"{number(1e3 * total_s, 1)} ms longer on {size}. "
        f"The phase that grows most is {PHASE_LABELS[phase]}, by {number(1e3 * longer_s[phase], 1)} ms{contents}.{note}"
    )
