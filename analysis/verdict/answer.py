"""The answer in words: how efficiency goes, what is fastest, what bounds it, and whether the numbers suffice.

Each sentence is one function of the analysis, and None where the study has nothing to say about it.
"""

import pandas as pd

from analysis.compare.best import MOST_WORKS, Contest, contests
from analysis.compare.scaling import STRONG, WEAK
from analysis.load.schema import PHASES
from analysis.measure.configurations import characters_per_s
from analysis.study import Analysis, study_ranks
from analysis.text import PHASE_LABELS, configuration_label, number, percent, value_label, with_interval
from analysis.verdict import accuracy as accuracy_verdict
from analysis.verdict import study as study_verdict
from analysis.verdict.bottleneck import bounds, host_bound
from analysis.verdict.communication import slowdown
from analysis.verdict.efficiency import compared_series, efficiency, series_label
from analysis.verdict.next_steps import best as best_for
from analysis.verdict.trust import LONGEST_REASON, MOST_REASONS


def answer(analysis: Analysis) -> list[str]:
    """Sentences that answer the study's question: its ladder, accuracy, efficiency, what it compares, what has no result, and what is fastest."""
    trained = accuracy_verdict.sentences(analysis)
    if analysis.configurations.empty:
        found = [unmeasured(analysis)]
    else:
        scaled = [efficiency(analysis, WEAK), efficiency(analysis, STRONG)]
        asked = [study_verdict.compared(analysis), study_verdict.memory(analysis)]
        found = [*scaled, *asked, unmeasured(analysis), *wanted(analysis)]
    said = [study_verdict.climbed(analysis), *trained, *found]
    return [sentence for sentence in said if sentence]


def unmeasured(analysis: Analysis) -> str | None:
    """How many trials have no result, and why: the commonest reasons."""
    trials = analysis.results.trials
    without = trials[trials["status"] != "done"]
    if without.empty:
        return None
    memory = without["status"].isin(["out_of_memory", "pruned"])
    reasons = without["reason"].mask(memory, "more memory than there is").str.slice(0, LONGEST_REASON)
    counts = reasons.value_counts()
    named = [f"{reason} ({count})" for reason, count in counts.head(MOST_REASONS).items()]
    if more := len(counts) - len(named):
        named.append(f"and {more} more reasons" if more > 1 else "and one more reason")
    verb = "has" if len(without) == 1 else "have"
    return f"Of {len(trials)} trials {len(without)} {verb} no result: {'; '.join(named)}."


def limits(analysis: Analysis) -> list[str]:
    """Sentences on what holds the study's configurations back; empty where no trial is done or no phase is known."""
    if analysis.configurations.empty:
        return []
    found = (study_verdict.parts(analysis), bounds(analysis), host_bound(analysis), growth(analysis))
    return [sentence for sentence in found if sentence]


def wanted(analysis: Analysis) -> list[str | None]:
    """The highest throughput, and after it the best configuration for another goal that the study was run with."""
    goal = analysis.record.goal
    told = goal in (None, "throughput") or (goal == "time-to-accuracy" and analysis.accuracy is not None)
    return [best(analysis), None if told else best_for(analysis, str(goal))]


def best(analysis: Analysis) -> str | None:
    """The highest throughput of each kind of work, and whether the next differs beyond noise."""
    found = contests(analysis.configurations, analysis.axes, analysis.fields)
    if len(found) > MOST_WORKS:
        return f"Its models, data sets or sizes of samples make {len(found)} kinds of work, so none of them is the fastest."
    return " ".join(_best(analysis, contest) for contest in found)


def _best(analysis: Analysis, contest: Contest) -> str:
    found, ranks = analysis.configurations, study_ranks(analysis)
    first = found.iloc[contest.first]
    aside = (*contest.work, *analysis.fields.timing, "world_size")
    names = [*(name for name in analysis.axes if name not in aside), "world_size"]
    value, low, high = (float(first[f"throughput_samples_per_s{end}"]) for end in ("", "_low", "_high"))
    shown = with_interval(value, low, high, 0 if value >= 1000 else 1)
    work = configuration_label(contest.work, contest.work, ranks)
    text = f"The highest throughput{f' of {work}' if work else ''} is {shown} samples/s"
    if pd.notna(characters := characters_per_s(found, analysis.fields).iloc[contest.first]):
        text += f", {number(characters, 0)} characters/s"
    if label := configuration_label(first, names, ranks):
        text += f", with {label}"
    if contest.second is None:
        return f"{text}."
    second = found.iloc[contest.second]
    other = configuration_label(second, [name for name in names if second[name] != first[name]], ranks) or "the next"
    if contest.within_noise is None:
        return f"{text}; one repeat cannot tell whether the next ({other}) differs."
    slower = percent(1 - 1 / contest.ratio, 1)
    if contest.within_noise:
        return f"{text}; the next ({other}) is {slower} slower, which is within noise."
    return f"{text}; the next ({other}) is {slower} slower, beyond noise."


def growth(analysis: Analysis) -> str | None:
    """Which phase grows most where ranks are added at the same batch per rank, in the series that lost most."""
    rows = compared_series(analysis, WEAK)
    rows = rows[rows["world_size"] == rows["world_size"].max()]
    if rows.empty:
        return None
    worst = rows.loc[rows["efficiency"].idxmin()]
    if slowdown(analysis) and worst["configuration"] in set(analysis.communication.slowdown["configuration"]):
        return None  # the account explains the same difference better
    large, small = analysis.configurations.loc[worst["configuration"]], analysis.configurations.loc[worst["reference"]]
    longer = (large[list(PHASES)].astype(float) - small[list(PHASES)].astype(float)).dropna()
    total = large["phases_step_s"] - small["phases_step_s"]
    if longer.empty or pd.isna(total) or total <= 0.02 * small["phases_step_s"]:
        return None
    name = str(longer.idxmax())
    ranks = study_ranks(analysis)
    overlapped = name == "backward_s" and large.get("parallel") != "dp"
    why = ", which holds the all-reduce and the wait for slower ranks" if overlapped else ""
    issue = large["step_launch_s"] - small["step_launch_s"]
    note = ""
    if large["host_bound"] is True and issue > 0:
        note = f" The device waits for the host there, whose time to issue a step grows by {number(1e3 * issue, 1)} ms."
    return (
        f"Where weak scaling loses most ({series_label(analysis, worst, WEAK)}), a step takes {number(1e3 * total, 1)} ms longer on "
        f"{value_label('world_size', int(worst['world_size']), ranks)}; the phase that grows most is {PHASE_LABELS[name]}, "
        f"by {number(1e3 * longer[name], 1)} ms{why}.{note}"
    )
