"""The answer in words: how efficiency goes, what is fastest, what bounds it, and whether the numbers suffice.

Each sentence is one function of the analysis, and None where the study has nothing to say about it.
"""

import numpy as np
import pandas as pd

from analysis import accuracy_verdict, study_verdict
from analysis.advice import best as best_for
from analysis.bounds import BOUND_SHARE, REGIONS, WORDS, at_most, regions
from analysis.caveats import caveats
from analysis.columns import PHASE_LABELS, characters_per_s
from analysis.communication_verdict import audit, slowdown
from analysis.contest import MOST_WORKS, Contest, contests
from analysis.formatting import (
    configuration_label,
    join,
    named,
    number,
    percent,
    telling_fields,
    value_label,
    with_interval,
)
from analysis.host import fewer_launches, issue_ratio
from analysis.scaling import NEITHER, STRONG, WEAK
from analysis.schema import PHASES
from analysis.study import Analysis, study_ranks

WIDE_INTERVAL = 0.05
"""Half-width of a throughput's interval, relative to it, from which repeats do not suffice for a close comparison."""

MOST_REASONS, LONGEST_REASON = 8, 120
"""that trials without a result are named with, and the characters of one"""

TOO_GOOD = 0.05
"""Efficiency above 1 of weak scaling, from which it is not believed without a reason."""

NOISE = 0.03
"""Gain by the instruments, which there cannot be, from which a machine is called noisy."""


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


def efficiency(analysis: Analysis, label: str) -> str | None:
    """How the largest number of ranks compares with the smallest, from the best series to the worst."""
    rows = _compared(analysis, label)
    if rows.empty:
        return None
    ranks = study_ranks(analysis)
    largest = rows["world_size"].max()
    rows = rows[rows["world_size"] == largest].sort_values("efficiency", ascending=False)
    references = sorted(rows["reference_world_size"].astype(int).unique())
    held = f"the batch per {ranks[0]}" if label == WEAK else "the global batch"
    reference = join([value_label("world_size", size, ranks) for size in references], "or")
    head = f"With {held} held ({label} scaling), {value_label('world_size', int(largest), ranks)}"
    top, bottom = rows.iloc[0], rows.iloc[-1]
    if len(rows) == 1:
        return f"{head} reach {_speed_up(top)} the throughput of {reference}, an efficiency of {_efficiency(top)}."
    return (
        f"{head} reach {_speed_up(top)} the throughput of {reference} at best, an efficiency of {_efficiency(top)} "
        f"({_series_label(analysis, top, label)}), and {_speed_up(bottom)} at worst, {_efficiency(bottom)} "
        f"({_series_label(analysis, bottom, label)})."
    )


def _compared(analysis: Analysis, label: str) -> pd.DataFrame:
    """The rows of such scaling on more ranks than their reference."""
    return analysis.scaling[(analysis.scaling["scaling"] == label) & (analysis.scaling["ideal"] > 1)]


def _speed_up(row: pd.Series) -> str:
    return f"{number(row['speed_up'], 2)} times"


def _efficiency(row: pd.Series) -> str:
    middle, low, high = (100 * float(row[name]) for name in ("efficiency", "efficiency_low", "efficiency_high"))
    value, _, interval = with_interval(middle, low, high, 1).partition(" ")
    return f"{value}\u00a0% {interval}".rstrip()


def _series_label(analysis: Analysis, row: pd.Series, label: str) -> str:
    fields = [name for name in analysis.axes if name not in ("world_size", "nodes")]
    if label == STRONG:
        fields = ["global_batch", *(name for name in fields if name != "batch_per_gpu")]
    return configuration_label(analysis.configurations.loc[row["configuration"]], fields, study_ranks(analysis))


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
    if len(contests(analysis.configurations, analysis.axes, analysis.fields)) == 1:
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
        f"at most {number(at_most(gain), 2)} times as fast."
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
            f"{number(at_most(rest[largest]), 2)} times as fast."
        )
    else:
        shown = f"{words.label}: {words.takes} takes {percent(share)} of a step"
    gain = number(at_most(share), 2)
    return f"{shown}. What helps most is {change}; without that part a step would be at most {gain} times as fast."


def growth(analysis: Analysis) -> str | None:
    """Which phase grows most where ranks are added at the same batch per rank, in the series that lost most."""
    rows = _compared(analysis, WEAK)
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
        f"Where weak scaling loses most ({_series_label(analysis, worst, WEAK)}), a step takes {number(1e3 * total, 1)} ms longer on "
        f"{value_label('world_size', int(worst['world_size']), ranks)}; the phase that grows most is {PHASE_LABELS[name]}, "
        f"by {number(1e3 * longer[name], 1)} ms{why}.{note}"
    )


def superlinear(analysis: Analysis) -> str | None:
    """A doubt about weak scaling that is better than ideal, by more than its interval where there is one."""
    rows = _compared(analysis, WEAK)
    rows = rows[rows["efficiency_low"].fillna(rows["efficiency"]) > 1 + TOO_GOOD]
    if rows.empty:
        return None
    best_row = rows.sort_values("efficiency").iloc[-1]
    rank = study_ranks(analysis)[0]
    return (
        f"In {len(rows)} place{'' if len(rows) == 1 else 's'} weak scaling is better than ideal, at best {_efficiency(best_row)} "
        f"({_series_label(analysis, best_row, WEAK)}). More {rank}s do not make each of them faster: either the reference was slowed "
        "(clocks, noise, too few cores for its loaders) or the two do not compute the same. Find out which before you use it."
    )


def without_throughput(analysis: Analysis) -> str | None:
    """Timed trials that are done and stand in no comparison, for the time of one of their ranks is not known."""
    trained = set(analysis.accuracy.runs["trial_id"]) if analysis.accuracy else set()
    rows = analysis.measured[analysis.measured["throughput_samples_per_s"].isna()]
    names = [name for name in rows["trial_id"] if name not in trained]
    if not names:
        return None
    verb = "has" if len(names) == 1 else "have"
    return (
        f"{len(names)} of {len(analysis.measured)} trials {verb} no throughput, for the time of a rank is unknown, and no part in any "
        f"comparison: look at the steps of {named(names)}."
    )


def trust(analysis: Analysis) -> list[str]:
    """Whether to believe the numbers: notes of the study, repeats, spread, worker groups, instruments, hosts and GPUs, rows left out."""
    found = analysis.configurations
    lines = [*analysis.record.notes, *accuracy_verdict.trust(analysis)]
    if line := without_throughput(analysis):
        lines.append(line)
    if found.empty:
        return [*lines, *caveats(analysis)]
    lone = int((found["n"] == 1).sum())
    fewest, most = int(found["n"].min()), int(found["n"].max())
    repeats = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    if lone:
        lines.append(
            f"{lone} of {len(found)} configurations ran once, so they have no interval: run the study with more repeats."
        )
    columns = ["throughput_samples_per_s_low", "throughput_samples_per_s_high"]
    half = (found[columns[1]] - found[columns[0]]) / 2 / found["throughput_samples_per_s"]
    if half.notna().any():
        wide = int((half > WIDE_INTERVAL).sum())
        advice = (
            f"{wide} of {len(found)} are wider than ±{percent(WIDE_INTERVAL)}: compare those with care, or add repeats."
            if wide
            else f"None is wider than ±{percent(WIDE_INTERVAL)}."
        )
        count = f"{repeats} repeat{'' if repeats == '1' else 's'} of each configuration"
        lines.append(f"{count}; the middle one's 95 % interval of throughput is ±{percent(half.median(), 1)}. {advice}")
    differ = int(found["groups_differ"].sum())
    if differ:
        lines.append(
            f"In {differ} of {len(found)} configurations worker groups differ by more than chance, so their intervals count groups, "
            "not repeats, and are wide; more groups would narrow them."
        )
    if unlikely := superlinear(analysis):
        lines.append(unlikely)
    cost = found["instruments_ratio"] - 1
    if costly := audit(analysis):
        lines.append(costly)
    if (cost < -NOISE).any():
        lines.append(
            f"In {int((cost < -NOISE).sum())} of {len(found)} configurations a step took up to {percent(-cost.min(), 1)} "
            "longer without instruments than with them, which only noise can do: use more steps, or a quieter machine."
        )
    lines += [f"{finding.sentence} {finding.what_to_do}" for finding in analysis.findings]
    lines += caveats(analysis)
    alone = int((analysis.scaling["scaling"] == NEITHER).sum())
    if alone:
        lines.append(
            f"{alone} of {len(found)} configurations are neither weak nor strong scaling: nothing like them ran on other sizes."
        )
    return lines


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
