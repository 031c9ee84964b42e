"""One or two sentences per question of the report, and the actions that would make its numbers more trustworthy."""

from collections.abc import Mapping

import pandas as pd

from analysis.checks.finding import Finding
from analysis.compare.best import without_emulated
from analysis.compare.bottleneck import WORDS, faster_compute, fewer_launches, larger_compute, largest_gain
from analysis.compare.causes import LEAST_LOST, visible_causes
from analysis.compare.communication_cost import AUDIT_BUDGET, flagged_trials
from analysis.compare.scaling import STRONG, WEAK
from analysis.predict.forecast import (
    FORECAST_FACTORS,
    HOST_BOUND,
    LOADING_BOUND,
    NETWORK,
    NO_SCALING,
    NOT_RESOLVED,
    forecast,
)
from analysis.predict.inputs import ReportInputs
from analysis.predict.next_trial import next_trial
from analysis.read.environment import done_environments
from analysis.study import Analysis, how_to_measure_scaling, study_ranks, workload_label
from analysis.text import (
    SLOWDOWN_LABELS,
    further_repeats,
    join,
    lost_decimals,
    number,
    part_of,
    percent,
    uncapitalised,
    value_label,
)
from analysis.verdict.accuracy import points, wide_half_width
from analysis.verdict.answer import unmeasured
from analysis.verdict.bottleneck import NOISE, launching
from analysis.verdict.communication import latest_rank
from analysis.verdict.lines.improve import MORE_CHANGES, none_applies
from analysis.verdict.lines.scaling import fewer_and_faster, without_breakdown, without_series
from analysis.verdict.lines.step import skips_communication
from analysis.verdict.lines.trust import FINDING_LABELS
from analysis.verdict.next_steps import sentence as next_trial_sentence
from analysis.verdict.own_code import separate_trials, slowed_traces
from analysis.verdict.repeats import WIDE_INTERVAL, Intervals, intervals
from analysis.verdict.trust import TOO_GOOD, HostCaveats, superlinear, without_throughput

MOST_ACTIONS = 6

_CAUSES = {"wait_s": "waiting for the slowest rank", "host_s": "the host", "load_s": "loading"}
"""Causes of lost ranks as a part of a sentence, if their label is not."""

_VISIBLE_GAIN = 1.005
"""Speed-up below which a gain would be stated as 0 %."""

_CAVEATS = {
    HOST_BOUND: "No prediction for the card's configuration: the host bounds its step on 1 or 2 ranks, which says "
    "little about scaling. Use a larger batch, or a compiled or captured step.",
    LOADING_BOUND: "No prediction for the card's configuration: loading bounds its step on 1 or 2 ranks, and more "
    "ranks share the CPUs and the storage of a node. Use more loader workers or another storage.",
    NO_SCALING: "No prediction for the card's configuration: its measured scaling is uncertain by more than a factor "
    "of 2. Add repeats.",
    NETWORK: "Predicted as if all ranks were in one node, without an interval, because no network between nodes was "
    "measured: state one with predict --interconnect.",
    NOT_RESOLVED: "Some predictions have no interval: it exceeds a factor of 2. Add repeats or sizes.",
}


def scale(analysis: Analysis) -> list[str]:
    """State the range of efficiencies on the most ranks of each series, for weak and strong scaling."""
    ranks = study_ranks(analysis)
    rows = analysis.scaling[analysis.scaling["ideal"] > 1]
    if rows.empty:
        sizes = sorted(analysis.configurations["world_size"].astype(int).unique())
        add = how_to_measure_scaling(analysis, max(sizes, default=1))
        if len(sizes) == 1:
            return [f"Measured on {value_label('world_size', sizes[0], ranks)} only: {add}."]
        return [f"No configuration ran on more than one number of {ranks[1]}: {add}."]
    rows = rows[rows["world_size"] == rows.groupby("series")["world_size"].transform("max")]
    real = without_emulated(analysis.configurations.loc[rows["configuration"].astype(int).unique()])
    counted = rows[rows["configuration"].isin(real.index)]
    found = [text for kind in (WEAK, STRONG) if (text := _range(analysis, counted[counted["scaling"] == kind], kind))]
    found += ["Emulated interconnects are not among them."] if found and len(counted) < len(rows) else []
    return [*found, *_fewer_are_faster(analysis)]


def _fewer_are_faster(analysis: Analysis) -> list[str]:
    """State that fewer ranks of the headline's series train faster than all of them, if they do."""
    best = None if analysis.headline is None else fewer_and_faster(analysis, analysis.headline)
    if best is None:
        return []
    ranks, label = study_ranks(analysis), workload_label(analysis, analysis.headlines[0])
    both = (best, analysis.headline_row)
    few, all_ranks = (value_label("world_size", int(row["world_size"]), ranks) for row in both)
    shown = " against ".join(number(row["throughput_samples_per_s"], 0) for row in both)
    verb = "trains" if best["world_size"] == 1 else "train"
    return [f"{few} {verb}{f' {label}' if label else ''} faster than {all_ranks}: {shown} samples/s."]


def _range(analysis: Analysis, rows: pd.DataFrame, kind: str) -> str | None:
    if rows.empty:
        return None
    rank = study_ranks(analysis)[0]
    constant = f"batch per {rank}" if kind == WEAK else "global batch"
    start = f"At a constant {constant} ({kind} scaling), efficiency"
    resolved = rows[~(rows["efficiency_more"] > 0)]["efficiency"].astype(float)
    if resolved.empty:
        return f"{start} is not resolved (needs {further_repeats(float(rows['efficiency_more'].max()))})."
    low, high = percent(resolved.min()), percent(resolved.max())
    shown = f"is {low}" if low == high else f"ranges from {low} to {high}"
    if len(resolved) == 1:
        return f"{start} {shown}."
    half_width = (rows["efficiency_high"].astype(float) / rows["efficiency_low"].astype(float)) ** 0.5 - 1
    wide = int((half_width[resolved.index] > WIDE_INTERVAL).sum())
    note = f"; {part_of(wide, len(resolved), 'intervals')} wider than ±{percent(WIDE_INTERVAL)}" if wide else ""
    return f"{start} {shown} over {len(resolved)} series{note}."


def what_ran(analysis: Analysis) -> list[str]:
    """State how many trials have no result, and why; or that all are done."""
    return [unmeasured(analysis) or f"All {len(analysis.results.trials)} trials are done."]


def holds_back(analysis: Analysis) -> list[str]:
    """State what bounds the headline configuration, then the largest cause of lost ranks, or which rank is late."""
    if analysis.headline is None:
        return []
    sentences = []
    shares = analysis.headline_regions
    bound = shares["bound"]
    if isinstance(bound, str):
        takes = _takes(analysis, bound)
        label = workload_label(analysis, analysis.headlines[0])
        of_workload = f" of {label}" if label else ""
        sentences.append(f"The step{of_workload} is bound by {WORDS[bound].label}{takes}.")
    if analysis.lost_ranks:
        lost = sum(analysis.lost_ranks.values())
        if lost >= LEAST_LOST:
            one, several = study_ranks(analysis)
            shown = f"{number(lost, lost_decimals(lost))} {f'{one} is' if lost <= 1 else f'{several} are'}"
            row = analysis.headlines[0].scaling
            is_open = row is not None and row["efficiency_high"] >= 1
            note = " (not significantly different from 0)" if is_open else ""
            sentences.append(f"{shown} lost{note}, {largest_cause(analysis.lost_ranks, lost)}.")
    elif (analysis.configurations["world_size"] > 1).any() and pd.isna(shares["wire"]):
        strategy = without_breakdown(analysis.headline_row)
        if not analysis.communication.slowed.empty:
            sentences.append(
                "Communication is unknown, because the profiler slows the steps too much: use a larger batch."
            )
        elif strategy:
            sentences.append(f"{strategy} has no communication breakdown: these parts include its communication.")
        else:
            sentences.append("Communication was not measured separately: rerun with --set communication_steps=10.")
    if len(sentences) < 2 and (late := latest_rank(analysis)):
        sentences.append(late)
    return sentences


def _takes(analysis: Analysis, bound: str) -> str:
    """Return how much of the headline's step the part takes that bounds it, and compute if its share is larger."""
    shares = analysis.headline_regions
    share, words = float(shares[bound]), WORDS[bound]
    if not share > 0:  # or unknown
        return f": {launching(analysis.headline_row)}" if bound == "host" else ""
    shown = f"{percent(share)} of the step{larger_compute(shares)}"
    return f", {shown}" if words.takes == words.label else f": {words.takes}, {shown}"


def largest_cause(lost_ranks: Mapping[str, float], lost: float) -> str:
    """Name the largest cause of lost ranks, with the same rounding as the card, and what has no measured cause."""
    shown = visible_causes(lost_ranks)
    remainder = shown.pop("remainder_s")
    largest = max(shown, key=lambda name: shown[name], default="")
    if not largest or shown[largest] < max(LEAST_LOST, lost / 10):
        return "without a measured cause that matters"
    decimals = lost_decimals(lost)
    unexplained = number(remainder, decimals)
    cause = f"{_CAUSES.get(largest, SLOWDOWN_LABELS[largest])} ({number(shown[largest], decimals)})"
    to = f"{'mainly' if shown[largest] >= lost / 2 else 'the largest part'} to {cause}"
    if remainder <= -lost:
        return f"but measured causes add up to more, {number(lost - remainder, decimals)}"
    if shown[largest] > lost:
        return f"{to}, less what other parts gain"
    if remainder < LEAST_LOST:
        return to
    if remainder < shown[largest]:
        return f"{to}; {unexplained} unexplained"
    return f"{unexplained} of it unexplained; the largest measured cause is {cause}"


def change(analysis: Analysis) -> list[str]:
    """State the largest measured gain, and the largest upper bound."""
    if analysis.headline is None:
        return []
    gains = analysis.gains
    # a gain whose interval contains none is not stated; one without repeats has no interval
    measured = gains[gains["is_measured"] & (gains["gain"] >= _VISIBLE_GAIN) & ~(gains["gain_low"].astype(float) <= 1)]
    measured = measured[measured["is_used"] | measured["is_open"]]
    bounds = gains[~gains["is_measured"].astype(bool)]
    bounds = bounds[~(bounds["gain"].astype(float) < largest_gain(NOISE))]
    sentences = []
    if len(measured):
        best = measured.sort_values("is_used", kind="stable").iloc[0]
        known = "Measured, and already used" if best["is_used"] else "Measured"
        sentences.append(f"{known}: {best['change']} {best['how']} gains {percent(best['gain'] - 1)}.")
    if len(bounds):
        best = bounds.iloc[0]
        gain = best["gain"] - 1
        most = (
            f"{percent(gain, 0 if gain >= 0.1 else 1)} by"
            if pd.notna(best["gain"])
            else "none, as it takes the entire step:"
        )
        sentences.append(f"Upper bound, not measured: {most} {best['how']}.")
    row, bound = analysis.headline_row, analysis.headline_regions["bound"]
    if bound == "host":
        sentences.insert(0, f"The host bounds the step: try {fewer_launches(row)}.")
    elif bound == "compute" and bounds.empty and skips_communication(row):
        sentences.append("Measure communication, which may take any part of the step: --set communication_steps=10.")
    elif bound == "compute" and bounds.empty:
        others = "All else that was measured" if pd.isna(analysis.headline_regions["wire"]) else "All but compute"
        sentences.append(f"{others} takes less than {percent(NOISE)} of the step: try {faster_compute(row)}.")
    label = workload_label(analysis, analysis.headlines[0])
    return [f"This is about {label}.", *sentences] if label and sentences else sentences


def improvement(analysis: Analysis) -> list[str]:
    """State what `improve` found, and how to use it."""
    found = analysis.record.improvement
    if found is None or not found.is_complete:
        return ["The search has not ended; run the same command again."]
    if none_applies(found):
        return [f"No known change applies. To go on, {MORE_CHANGES}."]
    if not found.kept:
        return ["No change that was tried gains significantly, so the configuration stays as it is."]
    sentences = [f"Kept: {join(list(found.kept))}."]
    sentences += [f"With {row.lever}, {row.note}." for row in found.levers if row.is_kept and row.note]
    return [*sentences, f"To use it: {found.command}"] if found.command else sentences


def more(analysis: ReportInputs) -> list[str]:
    """State why there is no prediction or no interval, and which trial would improve the predictions most."""
    if analysis.headline is None:
        return []
    models = analysis.models
    if not models:
        return [f"No prediction: {_without_model(analysis)}."]
    largest = max(model.series.sizes[-1] for model in models)
    rows = forecast(analysis, [largest * factor for factor in FORECAST_FACTORS]).rows
    own = [model.number for model in models if analysis.headline in set(model.series.points["configuration"])]
    caveats = rows[rows["series"].isin(own[:1])]["caveat"].dropna()
    trial = next_trial(analysis)
    return [
        *([] if own else [f"No prediction for the card's configuration: {_without_model(analysis)}."]),
        *[text for caveat, text in _CAVEATS.items() if caveat in set(caveats)],
        *([] if trial is None else [next_trial_sentence(analysis, trial)]),
    ]


def _without_model(analysis: ReportInputs) -> str:
    """Return why the headline has no prediction although no law was rejected for it."""
    scaling = analysis.scaling
    if (is_own := (scaling["configuration"] == analysis.headline) & (scaling["ideal"] > 1)).any():
        return without_series(analysis, scaling[is_own].iloc[-1])
    several, sizes = study_ranks(analysis)[1], analysis.configurations["world_size"].astype(int)
    return (
        f"it needs one configuration on at least two numbers of {several}: "
        f"{how_to_measure_scaling(analysis, max(sizes, default=1))}"
    )


def actions(analysis: Analysis) -> list[str]:
    """Return what to do to trust the numbers more, the most effective first; one line each."""
    configurations = analysis.configurations
    lines = [] if configurations.empty else _repeats(intervals(configurations))
    lines += _seeds(analysis)
    if superlinear(analysis):
        lines.append(
            f"Find out why scaling is better than ideal by more than {percent(TOO_GOOD)} before using it: "
            "the reference was probably slow."
        )
    if without_throughput(analysis):
        lines.append("Check the trials without throughput, which are excluded.")
    if separate_trials(analysis):
        lines.append("Wrap the model in DistributedDataParallel: the ranks exchange nothing in some trials.")
    if slowed_traces(analysis):
        lines.append("Use a larger batch to see communication: the profiler slows the host too much in some trials.")
    findings = [finding for finding in analysis.findings if finding.name != "few_repeats" or not lines]
    lines += [f"{_finding_label(finding)}: {uncapitalised(finding.what_to_do)}" for finding in findings]
    if not flagged_trials(analysis.measured).empty:
        lines.append(
            f"Read phases with care: measuring them costs more than {percent(AUDIT_BUDGET)} of a step in some trials. "
            "Throughput is not affected."
        )
    done = done_environments(analysis.results.trials)
    hosts = HostCaveats()
    for trial_id, environment in done:
        hosts.add(trial_id, environment)
    lines += _host_actions(hosts, len(done))
    lines = list(dict.fromkeys(lines))
    if len(lines) > MOST_ACTIONS:
        return [*lines[:MOST_ACTIONS], f"{len(lines) - MOST_ACTIONS} more are listed under “All caveats”."]
    return lines


def _finding_label(finding: Finding) -> str:
    label = FINDING_LABELS.get(finding.name, finding.name.replace("_", " "))
    return label[:1].upper() + label[1:]


def _repeats(known: Intervals) -> list[str]:
    if known.single:
        return [f"Run more repeats: {known.single} of {known.of} configurations ran once, which gives no interval."]
    if known.unresolved:
        unresolved = part_of(known.unresolved, known.of, "throughputs")
        return [f"Run {further_repeats(known.more)}: {unresolved} not resolved."]
    if known.wide:
        wide = part_of(known.wide, known.of, "intervals")
        return [f"Run more repeats: {wide} wider than ±{percent(WIDE_INTERVAL)}."]
    return []


def _seeds(analysis: Analysis) -> list[str]:
    """Ask for more seeds if differences in accuracy are known worse than they matter."""
    half_width = wide_half_width(analysis.accuracy)
    if half_width is None:
        return []
    return [f"Run more seeds: the median interval of a difference in accuracy is {points(half_width)}."]


def _host_actions(hosts: HostCaveats, trials: int) -> list[str]:
    lines = []
    if hosts.throttled_trials:
        lines.append(
            f"Improve power or cooling: a GPU was throttled in {len(hosts.throttled_trials)} of {trials} trials."
        )
    if hosts.clock_drop_trials:
        dropped = len(hosts.clock_drop_trials)
        lines.append(f"Lock the clocks or warm up longer: a clock dropped in {dropped} of {trials} trials.")
    if hosts.accompanied:
        lines.append(
            f"Measure alone: another study ran on the host during {hosts.accompanied_trials} of {trials} trials."
        )
    if hosts.overloaded:
        lines.append(f"Free the host: more processes than cores ran in {hosts.overloaded} of {trials} trials.")
    if hosts.niced:
        lines.append(f"Start Ray with RAY_worker_niceness=0: ranks were niced in {hosts.niced} of {trials} trials.")
    return lines
