"""Compare the loss of a configuration with that of the baseline, over the same samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from analysis.statistics import CONFIDENCE
from study.improve.evidence import Evidence
from study.improve.rounds import Configuration, Round


@dataclass(frozen=True)
class LossCheck:
    """Mean losses over the second half of the steps that all trials have.

    difference: of the configuration from the baseline, with the same seed and samples; NaN if its loss is not finite.
    spread: 95 % limit of the difference between two seeds of the baseline (Student's t), since small changes of the
    arithmetic may let a training diverge as much as another seed does; NaN if no other seed has run. Then only a loss
    that is not finite is beyond it.
    """

    difference: float
    spread: float

    @property
    def is_beyond(self) -> bool:
        return math.isnan(self.difference) or abs(self.difference) > self.spread

    @property
    def problem(self) -> str:
        """Say why the levers that change arithmetic are not kept."""
        moved = "the loss moved beyond the spread of seeds"
        return "the loss is not finite" if math.isnan(self.difference) else moved


def check_losses(done: Round, configuration: Configuration, evidence: Evidence) -> LossCheck | None:
    """Compare the losses of a final round; None if the baseline or the configuration shows none."""
    most = max(planned.trial.world_size for planned in done.timed(()))
    first = [planned for planned in done.blocks[0] if planned.trial.world_size == most]
    seed = next(planned.trial.seed for planned in first if planned.role == "timed")
    of_seeds = [planned for planned in first if planned.configuration == ()]
    of_change = [p for p in first if p.configuration == configuration and p.trial.seed == seed]
    if not of_change:
        return None
    losses = {p.trial.trial_id: evidence.losses(p.trial.trial_id) for p in (*of_seeds, of_change[-1])}
    steps = min((len(values) for values in losses.values() if len(values)), default=0)  # slow windows have fewer
    baseline = {p.trial.seed: _mean(losses[p.trial.trial_id][:steps]) for p in of_seeds}
    changed = _mean(losses[of_change[-1].trial.trial_id][:steps])
    known = [loss for loss in baseline.values() if not math.isnan(loss)]
    if math.isnan(baseline[seed]) or not losses[of_change[-1].trial.trial_id]:
        return None
    return LossCheck(changed - baseline[seed], difference_limit(known))


def difference_limit(losses: Sequence[float]) -> float:
    """Return the 95 % limit of the difference between two draws like these; NaN for fewer than two."""
    if len(losses) < 2:
        return math.nan
    return float(stdtrit(len(losses) - 1, 0.5 + CONFIDENCE / 2) * np.std(losses, ddof=1) * math.sqrt(2))


def _mean(losses: Sequence[float]) -> float:
    """Return the mean of the second half; NaN if there is none, or one is not finite."""
    return float(np.mean(losses[len(losses) // 2 :])) if len(losses) else math.nan
