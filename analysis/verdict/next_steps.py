"""What to do next, in words: the trial that narrows a prediction most, and the best configuration for a goal."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.compare.best import MAX_LISTED_WORKLOADS, BestConfiguration, best_configurations
from analysis.load.study_record import GOALS
from analysis.predict.forecast import cores_per_node, ranks_per_node
from analysis.predict.inputs import ReportInputs
from analysis.predict.next_trial import NARROWER, NextTrial, next_trial
from analysis.study import Analysis, study_ranks
from analysis.text import configuration_label, number, percent, value_label
from analysis.verdict.accuracy import soonest


def sentence(analysis: ReportInputs, trial: NextTrial | None) -> str:
    """What to run next, in words."""
    if trial is None:
        return "Next trial: none of those that fit on a node here would narrow the predictions."
    ranks = study_ranks(analysis)
    model = next(model for model in analysis.models if model.number == trial.series)
    fields = model.series.fields | {"batch_per_gpu": trial.batch_per_gpu, "world_size": trial.world_size}
    what = configuration_label(fields, _telling(analysis, fields, ("world_size", "batch_per_gpu")), ranks)
    hours = number(trial.gpu_hours, 4) if trial.gpu_hours < 0.01 else number(trial.gpu_hours, 2)
    text = f"Next trial: one more run with {what} ({hours} {ranks[0]}-hours): {trial.why}"
    if trial.why == NARROWER:
        text += (
            f"; for {value_label('world_size', trial.target, ranks)} the interval's half-width is expected to go from "
            f"{percent(trial.half_width_before, 1)} to {percent(trial.half_width_after, 1)} of the step"
        )
    cores = cores_per_node(analysis)
    if ranks_per_node(analysis) is None and cores and trial.world_size > cores:
        text += f". It needs a host with {trial.world_size} cores: those here have {cores} at most"
    return f"{text}."


def best(analysis: Analysis, goal: str) -> str:
    """The best configuration for a goal, the second, and whether they differ beyond noise, for each kind of work.

    goal: throughput (samples a second), cost (samples a GPU-hour) or time-to-accuracy. Raises ValueError for another.
    """
    if goal not in GOALS:
        raise ValueError(f"goal {goal!r} is not known; allowed: {', '.join(GOALS)}")
    if goal == "time-to-accuracy":
        if analysis.accuracy and (said := soonest(analysis.accuracy)):
            return f"Best for time to accuracy: {said}"
        return (
            "Best for time to accuracy: not known, for no trial here was trained to an accuracy; throughput alone does not "
            "tell it, because larger batches need more samples."
        )
    found = analysis.configurations
    if found.empty:
        return f"Best for {goal}: not known, for no trial with timed windows is done."
    scale = pd.Series(1.0, index=found.index) if goal == "throughput" else 3600 / found["world_size"]
    of_works = best_configurations(found, analysis.axes, analysis.fields, scale)
    if len(of_works) > MAX_LISTED_WORKLOADS:
        return f"Best for {goal}: not one, for the models, data sets or sizes of samples make {len(of_works)} kinds of work."
    return " ".join(_of_one_work(analysis, goal, scale, contest) for contest in of_works)


def _of_one_work(analysis: Analysis, goal: str, scale: pd.Series, contest: BestConfiguration) -> str:
    found, ranks = analysis.configurations, study_ranks(analysis)

    def label(index: int) -> str:
        row = {str(name): value for name, value in found.loc[index].items()}
        names = [
            name for name in _telling(analysis, row, ("world_size", "batch_per_gpu")) if name not in contest.workload
        ]
        return configuration_label(row, names, ranks)

    value = float(found["throughput_samples_per_s"].loc[contest.best] * scale.loc[contest.best])
    unit = "samples/s" if goal == "throughput" else f"samples a {ranks[0]}-hour"
    work = configuration_label(contest.workload, contest.workload, ranks)
    text = f"Best for {goal}{f' of {work}' if work else ''}: {label(contest.best)}, {number(value, 0 if value >= 1000 else 1)} {unit}"
    if contest.runner_up is None:
        return f"{text}; nothing else was measured."
    text += f"; second: {label(contest.runner_up)}, {percent(1 - 1 / contest.ratio, 1)} less"
    if contest.within_noise is None:
        return f"{text}. One repeat cannot tell whether they differ."
    return f"{text}, which is {'within' if contest.within_noise else 'beyond'} noise."


def _telling(analysis: Analysis, fields: Mapping[str, Any], first: tuple[str, ...]) -> list[str]:
    """Fields that tell a configuration from the others of its study; how a step is timed is none of them."""
    aside = (*first, *analysis.fields.timing, "nodes")
    return [*first, *(name for name in analysis.axes if name not in aside and fields.get(name) not in (None, ""))]


def next_steps(analysis: ReportInputs) -> list[str]:
    """What to run next, and what is best for cost (the answer says it of throughput); empty where nothing can be predicted."""
    if not analysis.models:
        return []
    return [sentence(analysis, next_trial(analysis)), best(analysis, "cost")]
