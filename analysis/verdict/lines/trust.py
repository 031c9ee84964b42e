"""How far the numbers of the card can be trusted, and the reason in a few words."""

from collections.abc import Sequence

from analysis.checks.pause import PAUSED
from analysis.compare.communication_cost import flagged_trials
from analysis.read.environment import done_environments
from analysis.study import Analysis
from analysis.text import MISSING, percent
from analysis.verdict.accuracy import difference_half_width, points, wide_half_width
from analysis.verdict.lines.value import Quantity, Trust
from analysis.verdict.own_code import separate_trials
from analysis.verdict.repeats import WIDE_INTERVAL
from analysis.verdict.trust import TOO_GOOD, HostCaveats, commits

GOOD, FAIR, POOR = "good", "fair", "poor"

POOR_INTERVAL = 0.2
"""Relative half-width of the interval above which trust is poor."""

POOR_POINTS = 0.05
"""Half-width of the interval of a difference in accuracy, as a share, above which trust is poor."""

FEWEST_GROUPS = 3
"""Worker groups from which on trust can be good; a study on CPU ranks runs as many by default, on GPUs five."""

MOST_CAVEATS = 2
"""Maximum caveats that the reason lists; the others are counted."""

A_RANK_WAS_PAUSED = "a rank was paused"

FINDING_LABELS = {
    "drift": "speed drifted",
    "change_point": "speed changed midway",
    "slow_rank": "one rank is slower",
    "warm_up": "warm-up too short",
    "bimodal_steps": "two classes of steps",
    "periodic_steps": "slow steps recur",
    "rare_steps": "throughput depends on a few long steps",
    "first_step": "slow first step",
}
"""Findings of the data checks in a few words. Too few repeats are stated by the number of groups."""


def trust_in(
    analysis: Analysis, configurations: Sequence[int], shown: Quantity | None, others: Sequence[Analysis] = ()
) -> Trust:
    """Judge the numbers of these configurations, their references included. shown: the first number of the card.

    others: see `card.card_of`.

    poor: one repeat, a paused rank, an interval that is not resolved or wider than `POOR_INTERVAL`, or scaling better
    than ideal.
    fair: an interval wider than `WIDE_INTERVAL`, fewer than `FEWEST_GROUPS` worker groups, or any caveat about the
    trials of these configurations. good: none of these.
    """
    rows = analysis.configurations.loc[list(configurations)]
    repeats, groups = int(rows["n"].min()), int(rows["groups"].min())
    half_width = shown.half_width if shown else None
    trial_ids = [trial for ids in rows["trial_ids"] for trial in ids]
    caveats = [*_of_accuracy(analysis), *_caveats(analysis, trial_ids, others)]
    is_paused = A_RANK_WAS_PAUSED in caveats
    if repeats == 1:
        return Trust(POOR, _reason(["1 repeat, so no interval", *caveats]), groups)
    if shown is not None and shown.further_repeats is not None:
        return Trust(POOR, _reason([f"{_count(groups)}, {shown.unresolved}", *caveats]), groups)
    width = f"±{percent(half_width, 1)}" if half_width is not None else f"interval {MISSING}"
    reason = [f"{_count(groups)}, {width}"]
    is_too_good = shown is not None and shown.name.startswith("efficiency") and (shown.low or 0) > 1 + TOO_GOOD
    if is_too_good:
        reason.append(f"better than ideal by more than {percent(TOO_GOOD)}: the reference was slow")
    if is_too_good or is_paused or half_width is None or half_width > POOR_INTERVAL:
        return Trust(POOR, _reason([*reason, *caveats]), groups, half_width)
    is_fair = half_width > WIDE_INTERVAL or groups < FEWEST_GROUPS or bool(caveats)
    return Trust(FAIR if is_fair else GOOD, _reason([*reason, *caveats]), groups, half_width)


def trust_in_accuracy(analysis: Analysis, others: Sequence[Analysis] = ()) -> Trust:
    """Judge the accuracies of trainings by their seeds; see `trust_in` for the levels.

    poor: one seed, or half an interval above `POOR_POINTS`. fair: above `compare.accuracy.RELEVANT_LOSS`.
    """
    accuracy = analysis.accuracy
    assert accuracy is not None, "only studies that train"
    cells = accuracy.cells[accuracy.cells["n"] > 0]
    if cells.empty:
        return Trust(POOR, "no validation set, so no accuracy")
    fewest = int(cells["n"].min())
    caveats = _caveats(analysis, list(accuracy.runs["trial_id"]), others)
    if fewest < 2:
        return Trust(POOR, _reason(["1 seed, so no interval", *caveats]))
    half_width = difference_half_width(accuracy)
    width = "" if half_width is None else f", differences {points(half_width)}"
    reason = _reason([f"{fewest} seeds{width}", *caveats])
    if half_width is not None and half_width > POOR_POINTS:
        return Trust(POOR, reason)
    is_wide = wide_half_width(accuracy) is not None
    return Trust(FAIR if fewest < FEWEST_GROUPS or is_wide or caveats else GOOD, reason)


def _of_accuracy(analysis: Analysis) -> list[str]:
    """Return a caveat if the study also trains, and its differences in accuracy are known worse than they matter."""
    half_width = wide_half_width(analysis.accuracy)
    return [] if half_width is None else [f"differences in accuracy {points(half_width)}"]


def _count(groups: int) -> str:
    """Return the number of worker groups in plain words: each is a separate start of all processes."""
    return f"{groups} separate start{'' if groups == 1 else 's'}"


def _reason(parts: Sequence[str]) -> str:
    """Return the first part and at most `MOST_CAVEATS` further ones; the rest is counted."""
    first, caveats = parts[0], list(parts[1:])
    more = len(caveats) - MOST_CAVEATS
    listed = [*caveats[:MOST_CAVEATS], *([f"{more} more caveat{'' if more == 1 else 's'}"] if more > 0 else [])]
    return "; ".join([first, *listed])


def _caveats(analysis: Analysis, trial_ids: Sequence[str], others: Sequence[Analysis]) -> list[str]:
    """Return caveats about these trials, and about left out ones, in a few words; the worst first."""
    chosen = set(trial_ids)
    hosts = HostCaveats()
    for trial_id, environment in done_environments(analysis.results.trials):
        if trial_id in chosen:
            hosts.add(trial_id, environment)
    lines = [*hosts.labels(), *(["several commits"] if commits(analysis) else [])]
    if chosen & set(separate_trials(analysis)):
        lines.insert(0, "ranks exchange nothing: not data-parallel")
    found = dict.fromkeys(finding.name for finding in analysis.findings if chosen & set(finding.trial_ids))
    if PAUSED in found:
        lines.insert(0, A_RANK_WAS_PAUSED)
    lines += [f"unread field {name}" for name in analysis.unread]
    lines += [FINDING_LABELS[name] for name in found if name in FINDING_LABELS]
    if chosen & set(flagged_trials(analysis.measured)["trial_id"]):
        lines.append("measurement overhead above 2 %")
    left_out = sum(len(other.results.trials) for other in others)
    return [
        *lines,
        *([f"{left_out} trial{'' if left_out == 1 else 's'} of another environment left out"] if left_out else []),
    ]
