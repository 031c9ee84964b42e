"""Caveats about a user's own training code, which a probe observes."""

from analysis.measure.communication import WINDOW
from analysis.read.own_code import COMMAND_COLUMN
from analysis.study import Analysis
from analysis.text import named, number


def separate_trials(analysis: Analysis) -> list[str]:
    """Return the trials of a user's own code whose ranks exchanged nothing in the traced steps."""
    if analysis.measured.empty:
        return []
    trials = analysis.measured.set_index("trial_id")
    windows = analysis.results.windows
    traced = trials.index.isin(windows.loc[windows["window"] == WINDOW, "trial_id"])
    exchanging = trials.index.isin(analysis.results.collectives["trial_id"])
    of_several = trials[COMMAND_COLUMN].notna() & (trials["world_size"] > 1)
    return [str(trial_id) for trial_id in trials.index[of_several & traced & ~exchanging]]


def without_exchange(analysis: Analysis) -> str | None:
    """Warn about trials whose ranks seem to train separate models."""
    trial_ids = separate_trials(analysis)
    if not trial_ids:
        return None
    return (
        f"In {len(trial_ids)} of {len(analysis.measured)} trials the ranks exchanged nothing in the traced steps, so "
        "each seems to train its own model, and throughput says nothing about data-parallel training. Wrap the model "
        f"in DistributedDataParallel, or average gradients in every step. Trials: {named(trial_ids)}."
    )


def slowed_traces(analysis: Analysis) -> str | None:
    """Warn about trials whose hidden communication is unknown, because the profiler slowed them."""
    ratios = analysis.communication.slowed
    if ratios.empty:
        return None
    shown = named([str(trial_id) for trial_id in ratios.index])
    if ratios.index.isin(analysis.communication.breakdown.index).all():
        missing = "Their exposed communication was timed without it; how much is hidden is unknown."
    else:
        missing = "How ranks wait for each other is not stated for them, as the profiler changes it."
    return (
        f"In {len(ratios)} of {len(analysis.measured)} trials the profiler made a step up to "
        f"{number(float(ratios.max()), 1)} times as long. {missing} Trials: {shown}."
    )
