"""The trial that narrows a prediction most for its cost."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from analysis.predict.fit import log_jacobian
from analysis.predict.forecast import ranks_per_node
from analysis.predict.inputs import ReportInputs
from analysis.predict.model import Model, half_width
from analysis.statistics import CONFIDENCE
from analysis.study import Analysis

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


def next_trial(
    analysis: ReportInputs, found: Sequence[Model] | None = None, target: int | None = None
) -> NextTrial | None:
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
    found = list(analysis.models if found is None else found)
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
