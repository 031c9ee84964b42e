"""Compare the loss of a configuration with that of the baseline, over the same samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from study.improve.evidence import Evidence
from study.improve.rounds import Configuration, Round


@dataclass(frozen=True)
class LossCheck:
    """Mean losses over the second half of the steps that all trials have.

    difference: of the configuration from the baseline, with the same seed and samples. spread: largest difference
    between two seeds of the baseline. Both NaN if a loss is not known or not finite; is_beyond then tells whether only
    the configuration's is not.
    """

    difference: float
    spread: float
    is_beyond: bool


def check_losses(done: Round, configuration: Configuration, evidence: Evidence) -> LossCheck | None:
    """Compare the losses of a final round; None if the baseline has none."""
    most = max(planned.trial.world_size for planned in done.planned)
    first = [planned for planned in done.blocks[0] if planned.trial.world_size == most]
    seed = next(p.trial.seed for p in first if p.is_timed)
    of_seeds = [p for p in first if p.configuration == ()]
    of_change = [p for p in first if p.configuration == configuration and p.trial.seed == seed]
    losses = {p.trial.trial_id: evidence.losses(p.trial.trial_id) for p in (*of_seeds, *of_change[-1:])}
    steps = min((len(values) for values in losses.values() if len(values)), default=0)  # slow windows have fewer
    baseline = {p.trial.seed: _mean(losses[p.trial.trial_id][:steps]) for p in of_seeds}
    changed = _mean(losses[of_change[-1].trial.trial_id][:steps]) if of_change else math.nan
    known = [loss for loss in baseline.values() if not math.isnan(loss)]
    if math.isnan(baseline[seed]) or len(known) < 2:
        return None
    spread = max(known) - min(known)
    difference = changed - baseline[seed]
    return LossCheck(difference, spread, is_beyond=not abs(difference) <= spread)


def _mean(losses: Sequence[float]) -> float:
    """Return the mean of the second half; NaN if there is none, or one is not finite."""
    return float(np.mean(losses[len(losses) // 2 :])) if len(losses) else math.nan
