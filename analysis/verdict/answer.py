"""The answer to the study's question: efficiency, the best configuration, and what limits it.

Each function returns one sentence, or None if the study has no data for it.
"""

import pandas as pd

from analysis.compare.scaling import STRONG, WEAK
from analysis.read.schema import PHASES
from analysis.study import Analysis, study_ranks
from analysis.text import (
    PHASE_LABELS,
    number,
    value_label,
)
from analysis.verdict import accuracy as accuracy_verdict
from analysis.verdict import study as study_verdict
from analysis.verdict.bottleneck import bounds, host_bound
from analysis.verdict.communication import slowdown
from analysis.verdict.efficiency import compared_series, efficiency, series_label
from analysis.verdict.next_steps import best
from analysis.verdict.reasons import common_reasons

MOST_REASONS, LONGEST_REASON = 8, 120
"""Number of reasons listed for trials without a result, and the maximum characters of one."""


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
    verb = "has" if len(without) == 1 else "have"
    reasons = common_reasons(without, MOST_REASONS, LONGEST_REASON)
    return f"{len(without)} of {len(trials)} trials {verb} no result: {reasons}."


def limits(analysis: Analysis) -> list[str]:
    """Return sentences on what limits the study's configurations; empty if no trial is done or no phase is known."""
    if analysis.configurations.empty:
        return []
    candidates = (study_verdict.step_parts(analysis), bounds(analysis), host_bound(analysis), growth(analysis))
    return [sentence for sentence in candidates if sentence]


def best_for_goal(analysis: Analysis) -> list[str | None]:
    """State the best configuration for throughput, and for the study's goal if that is another one."""
    goal = analysis.record.goal
    is_answered = goal in (None, "throughput") or (goal == "time-to-accuracy" and analysis.accuracy is not None)
    return [best(analysis, "throughput"), None if is_answered else best(analysis, str(goal))]


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
        f"The largest weak-scaling loss ({series_label(analysis, worst, WEAK)}): a step with instruments "
        f"takes {number(1e3 * total_s, 1)} ms longer on {size}. "
        f"The phase that grows most is {PHASE_LABELS[phase]}, by {number(1e3 * longer_s[phase], 1)} ms{contents}.{note}"
    )
