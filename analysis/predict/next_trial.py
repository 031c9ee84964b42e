"""Find the trial that narrows a prediction most for its cost."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from analysis.predict.fit import log_jacobian
from analysis.predict.forecast import ranks_per_node
from analysis.predict.inputs import ReportInputs
from analysis.predict.model import ScalingModel, half_width
from analysis.statistics import CONFIDENCE
from analysis.study import Analysis

THIRD_SIZE = "the law cannot be checked on two numbers of ranks; a third one allows it"


NARROWER = "most variance of the prediction removed per GPU-hour"

LEAST_GAIN = 0.1
"""A run that narrows an interval by a smaller share than this is not worth its GPU time."""


@dataclass(frozen=True)
class NextTrial:
    """One more run: its series, number of ranks and batch, and the expected effect.

    gpu_hours: ranks x hours of the windows of a trial like those of the series, without its start. target: number of
    ranks of the prediction to narrow. half_width_before, half_width_after: relative half width of its 95 % interval of
    the step (0.1 is 10 %); NaN if no spread is known. why: `THIRD_SIZE` or `NARROWER`.
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
    analysis: ReportInputs, models: Sequence[ScalingModel] | None = None, target: int | None = None
) -> NextTrial | None:
    """Return the most cost-effective run to narrow a prediction at `target` ranks; None if no run is worth it.

    target: default is twice the largest number of ranks that one node of this study holds, or that number if no network
    between nodes was measured. A candidate is a run of a
    series on fewer ranks than the target and at most those of a node. It is worth it if it narrows the interval by at
    least `LEAST_GAIN`. Series without a prediction or without an interval at the target are left out.

    For each candidate, the variance of the predicted log step is computed as if the run had been made. A run adds its
    row j of the law's Jacobian to the design. It reduces the variance of the prediction c'Mc by (c'Mj)² / (1 + j'Mj),
    with M the inverse of J'J and c the Jacobian at the target (c-optimality; Atkinson, Donev and Tobias, Optimum
    Experimental Designs, 2007, chapter 10). The rest of the shown interval, which is the held-out error of the law and
    the disagreement of laws, shrinks with the distance to the nearest number of ranks (`model.LawError`). The run also
    adds a degree of freedom to Student's t. The best candidate removes most variance per GPU-hour.

    If a series has only two numbers of ranks, the cheapest third one takes precedence.
    """
    models = list(analysis.models if models is None else models)
    limit = ranks_per_node(analysis)
    candidates: list[NextTrial] = []
    for model in models:
        if model.series.host_bound:
            continue
        steps = steps_of_a_trial(analysis, model)
        possible = _sizes(model, limit)
        goal = target or (2 * possible[-1] if limit is None or model.series.knows_network else possible[-1])
        has_interval = model.series.knows_network or model.series.nodes_of(goal, limit) == 1
        if goal <= model.series.sizes[-1] or not (has_interval or len(model.series.sizes) == 2):
            continue
        sizes = [size for size in possible if size < goal]
        candidates += [c for size in sizes if (c := expected(model, size, goal, steps)) is not None]
    thirds = [candidate for candidate in candidates if candidate.why == THIRD_SIZE]
    if thirds:
        return min(thirds, key=lambda candidate: candidate.gpu_hours)
    worth = [c for c in candidates if c.half_width_after <= (1 - LEAST_GAIN) * c.half_width_before]
    return max(worth, key=lambda candidate: _gain(candidate) / candidate.gpu_hours, default=None)


def _sizes(model: ScalingModel, limit: int | None) -> list[int]:
    """Return the numbers of ranks to consider: the measured ones and powers of two.

    The limit is the number of ranks per node or, if unknown, twice the largest measured size.
    """
    largest = limit or 2 * model.series.sizes[-1]
    powers = [2**k for k in range(largest.bit_length()) if 2**k <= largest]
    return sorted(size for size in {*powers, *model.series.sizes} if model.series.batch(size) % 1 == 0)


def expected(model: ScalingModel, size: int, target: int, steps: float) -> NextTrial | None:
    """Return the expected effect of one more run of `steps` steps on `size` ranks.

    None if the law is undefined at either size, or if the series would still have only two numbers of ranks.
    """
    series, chosen = model.series, model.chosen
    run_points, target_points = series.at([size]), series.at([target])
    is_new = size not in series.sizes
    if chosen.law.missing_input(run_points) or chosen.law.missing_input(target_points):
        return None
    gpu_hours = size * steps * float(chosen.step_s(run_points)[0]) / 3600
    is_third = len(series.sizes) == 2 and is_new
    if len(series.sizes) == 2 and not is_new:
        return None
    before = float(chosen.leverage(target_points)[0])
    j, c = (log_jacobian(chosen.law, points, chosen.values)[0] for points in (run_points, target_points))
    removed = float((c @ chosen.covariance @ j) ** 2 / (1 + j @ chosen.covariance @ j))
    run = model.run_spread
    half = float(half_width(model, target_points)[0])
    noise = run.variance * (1 + before)
    t, t_after = stdtrit([run.degrees, run.degrees + 1], 0.5 + CONFIDENCE / 2)
    law = max((half / t) ** 2 - noise, 0.0)
    remaining = noise - run.variance * removed + law * _nearer(series.sizes, size, target) ** 2
    batch = round(series.batch(size))
    after = half * float(t_after / t * np.sqrt(remaining / (noise + law))) if noise + law > 0 else half
    why = THIRD_SIZE if is_third else NARROWER
    return NextTrial(model.number, size, batch, gpu_hours, target, np.expm1(half), np.expm1(after), why)


def _nearer(sizes: Sequence[int], more: int, target: int) -> float:
    """Return by which factor a run on `more` ranks shortens the distance from the target to the nearest measured size.

    Distances are logarithmic.
    """
    before, after = (np.abs(np.log(target / np.array(of))).min() for of in (sizes, [*sizes, more]))
    return float(after / before) if before else 0.0


def _gain(candidate: NextTrial) -> float:
    """Return the variance removed, in the same unit for all candidates."""
    before, after = np.log1p(candidate.half_width_before), np.log1p(candidate.half_width_after)
    return float(before**2 - after**2)


def steps_of_a_trial(analysis: Analysis, model: ScalingModel) -> float:
    """Return the median number of steps per trial of the series, over all windows."""
    trials = analysis.configurations.loc[model.series.points["configuration"], "trial_ids"].explode()
    windows = analysis.results.windows
    windows = windows[windows["trial_id"].isin(trials) & (windows["rank"] == 0)]
    return float(windows.groupby("trial_id")["steps"].sum().median())
