"""What to do next: the trial that narrows a prediction most for its cost, and the best configuration for a goal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from analysis.accuracy_verdict import soonest
from analysis.columns import study_ranks
from analysis.contest import MOST_WORKS, Contest, contests
from analysis.fitting import log_jacobian
from analysis.forecast import cores_per_node, ranks_per_node
from analysis.formatting import configuration_label, number, percent, value_label
from analysis.goals import GOALS
from analysis.prediction import Model, half_width, models
from analysis.scaling import Analysis
from analysis.statistics import CONFIDENCE

THIRD_SIZE = "no law can be checked on two numbers of ranks, and a third one does"
NARROWER = "most variance of the prediction removed per GPU-hour"


@dataclass(frozen=True)
class NextTrial:
    """One more run: of which series, on how many ranks, at which batch; and what it is expected to bring.

    gpu_hours: of ranks, for the windows of a trial like those of the series, without its start. target: number of ranks
    of the prediction in question. half_width_before, half_width_after: of its 95 % interval of the step, relative (0.1 is
    10 %); NaN where no spread is known. why: `THIRD_SIZE` or `NARROWER`.
    """

    series: int
    world_size: int
    batch_per_gpu: int
    gpu_hours: float
    target: int
    half_width_before: float
    half_width_after: float
    why: str


def next_trial(analysis: Analysis, found: Sequence[Model] | None = None, target: int | None = None) -> NextTrial | None:
    """The cheapest way to narrow a prediction at `target` ranks (left out: twice the largest that can be run here).

    For each candidate, a run of a series on fewer ranks than that which a node here holds, the variance of the predicted log
    step is computed as if it had been made. It would add its row j of the law's Jacobian to the design, and so take
    (c'Mj)² / (1 + j'Mj) off c'Mc, the variance of the prediction, with M the inverse of J'J and c the Jacobian at the
    target (c-optimality; Atkinson, Donev and Tobias, Optimum Experimental Designs, 2007, chapter 10). What the shown interval
    has beyond that spread, which is the law's error where it was held out and the disagreement of laws, shrinks with the
    distance to the nearest number of ranks (`prediction.LawError`). And it would add a degree of freedom to Student's t.
    Best is what removes most variance per GPU-hour. Where some series has two numbers of ranks only, the cheapest third
    one comes before all that. None where nothing can be gained.
    """
    found = list(models(analysis) if found is None else found)
    limit = ranks_per_node(analysis)
    candidates: list[NextTrial] = []
    for model in found:
        steps = steps_of_a_trial(analysis, model)
        possible = _sizes(model, limit)
        goal = target or 2 * possible[-1]
        sizes = [size for size in possible if size < goal]
        candidates += [c for size in sizes if (c := expected(model, size, goal, steps)) is not None]
    thirds = [candidate for candidate in candidates if candidate.why == THIRD_SIZE]
    if thirds:
        return min(thirds, key=lambda candidate: candidate.gpu_hours)
    worth = [(_gain(candidate) / candidate.gpu_hours, candidate) for candidate in candidates if _gain(candidate) > 0]
    return max(worth, key=lambda pair: pair[0])[1] if worth else None


def sentence(analysis: Analysis, trial: NextTrial | None) -> str:
    """What to run next, in words."""
    if trial is None:
        return "Next trial: none of those that fit on a node here would narrow the predictions."
    ranks = study_ranks(analysis)
    model = next(model for model in models(analysis) if model.number == trial.series)
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
    of_works = contests(analysis, scale)
    if len(of_works) > MOST_WORKS:
        return f"Best for {goal}: not one, for the models, data sets or sizes of samples make {len(of_works)} kinds of work."
    return " ".join(_of_one_work(analysis, goal, scale, contest) for contest in of_works)


def _of_one_work(analysis: Analysis, goal: str, scale: pd.Series, contest: Contest) -> str:
    found, ranks = analysis.configurations, study_ranks(analysis)

    def label(index: int) -> str:
        row = {str(name): value for name, value in found.loc[index].items()}
        names = [name for name in _telling(analysis, row, ("world_size", "batch_per_gpu")) if name not in contest.work]
        return configuration_label(row, names, ranks)

    value = float(found["throughput_samples_per_s"].loc[contest.first] * scale.loc[contest.first])
    unit = "samples/s" if goal == "throughput" else f"samples a {ranks[0]}-hour"
    work = configuration_label(contest.work, contest.work, ranks)
    text = f"Best for {goal}{f' of {work}' if work else ''}: {label(contest.first)}, {number(value, 0 if value >= 1000 else 1)} {unit}"
    if contest.second is None:
        return f"{text}; nothing else was measured."
    text += f"; second: {label(contest.second)}, {percent(1 - 1 / contest.ratio, 1)} less"
    if contest.within_noise is None:
        return f"{text}. One repeat cannot tell whether they differ."
    return f"{text}, which is {'within' if contest.within_noise else 'beyond'} noise."


def _telling(analysis: Analysis, fields: Mapping[str, Any], first: tuple[str, ...]) -> list[str]:
    """Fields that tell a configuration from the others of its study; how a step is timed is none of them."""
    aside = (*first, *analysis.fields.timing, "nodes")
    return [*first, *(name for name in analysis.axes if name not in aside and fields.get(name) not in (None, ""))]


def _sizes(model: Model, limit: int | None) -> list[int]:
    """Numbers of ranks to consider: those measured, and powers of two up to the GPUs of a node here (on CPUs: up to twice
    what was measured)."""
    largest = limit or 2 * model.series.sizes[-1]
    powers = [2**k for k in range(largest.bit_length()) if 2**k <= largest]
    return sorted(size for size in {*powers, *model.series.sizes} if model.series.batch(size) % 1 == 0)


def expected(model: Model, size: int, target: int, steps: float) -> NextTrial | None:
    """What one more run of so many steps on `size` ranks would bring; None where the law cannot be asked there."""
    series, chosen = model.series, model.chosen
    here, there = series.at([size]), series.at([target])
    new = size not in series.sizes
    if chosen.law.lacks(here) or chosen.law.lacks(there):
        return None
    gpu_hours = size * steps * float(chosen.step_s(here)[0]) / 3600
    third = len(series.sizes) == 2 and new
    if len(series.sizes) == 2 and not new:
        return None
    before = float(chosen.leverage(there)[0])
    j, c = (log_jacobian(chosen.law, points, chosen.values)[0] for points in (here, there))
    removed = float((c @ chosen.covariance @ j) ** 2 / (1 + j @ chosen.covariance @ j))
    run = model.run_spread
    half = float(half_width(model, there)[0])
    noise = run.variance * (1 + before)
    t, t_after = stdtrit([run.degrees, run.degrees + 1], 0.5 + CONFIDENCE / 2)
    law = max((half / t) ** 2 - noise, 0.0)
    left = noise - run.variance * removed + law * _nearer(series.sizes, size, target) ** 2
    batch = round(series.batch(size))
    after = half * float(t_after / t * np.sqrt(left / (noise + law))) if noise + law > 0 else half
    why = THIRD_SIZE if third else NARROWER
    return NextTrial(model.number, size, batch, gpu_hours, target, np.expm1(half), np.expm1(after), why)


def _nearer(sizes: Sequence[int], more: int, target: int) -> float:
    """How far, on a logarithmic axis, the target is from the nearest number of ranks with `more` among them, over without."""
    before, after = (np.abs(np.log(target / np.array(of))).min() for of in (sizes, [*sizes, more]))
    return float(after / before) if before else 0.0


def _gain(candidate: NextTrial) -> float:
    """Variance removed, in units that are the same for all."""
    before, after = np.log1p(candidate.half_width_before), np.log1p(candidate.half_width_after)
    return float(before**2 - after**2)


def steps_of_a_trial(analysis: Analysis, model: Model) -> float:
    """Steps of all windows of a trial of the series, the median."""
    trials = analysis.configurations.loc[model.series.points["configuration"], "trial_ids"].explode()
    windows = analysis.results.windows
    windows = windows[windows["trial_id"].isin(trials) & (windows["rank"] == 0)]
    return float(windows.groupby("trial_id")["steps"].sum().median())
