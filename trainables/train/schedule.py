"""The learning rate of every step: scaled with the batch, warmed up, and decayed."""

import math
from collections.abc import Callable

from trainables.trial import Trial

STEP_DECAY = (1 / 3, 2 / 3, 8 / 9)
"""shares of all epochs after which `decay="step"` divides the rate by ten: Goyal et al.'s epochs 30, 60 and 80 of 90"""

_GROWTH: dict[str, Callable[[float], float]] = {"none": lambda _: 1.0, "linear": float, "sqrt": math.sqrt}
_ADAPTIVE = ("adamw", "lamb")


def learning_rate(trial: Trial, steps_per_epoch: int) -> Callable[[int], float]:
    """The learning rate by optimizer step, counted from 0, of a trial that trains for `epochs`.

    `lr_rule`, with k = global batch / `reference_batch`: "linear" gives k times `learning_rate` (Goyal et al. 2017,
    https://arxiv.org/abs/1706.02677, section 2.1), "sqrt" the square root of k times it, which keeps the variance of an
    update (Krizhevsky 2014, https://arxiv.org/abs/1404.5997, section 5; Hoffer et al. 2017,
    https://arxiv.org/abs/1705.08741, section 4). k below 1 shrinks it.

    `warmup`, over the first `warmup_epochs` (whole steps, rounded): "constant" holds the unscaled rate; "gradual" adds
    the same amount every step, from the unscaled rate at step 0 to the scaled one at the first step after them (Goyal et
    al., section 2.2). Warm-up lies inside the `epochs`, and nothing decays in it.

    `decay`: "step" multiplies by 0.1 after each of `STEP_DECAY`; "cosine" falls to 0 at the end, by half a cosine from
    the end of the warm-up (Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983, equation 5, one cycle).
    """
    scaled = trial.learning_rate * _GROWTH[trial.lr_rule](trial.global_batch / trial.reference_batch)
    warm_steps = 0 if trial.warmup == "none" else round(trial.warmup_epochs * steps_per_epoch)
    all_steps = trial.epochs * steps_per_epoch
    drops = [round(share * all_steps) for share in STEP_DECAY]

    def rate(step: int) -> float:
        if step < warm_steps:
            share = step / warm_steps if trial.warmup == "gradual" else 0.0
            return trial.learning_rate + share * (scaled - trial.learning_rate)
        if trial.decay == "step":
            return scaled * 0.1 ** sum(step >= drop for drop in drops)
        if trial.decay == "cosine":
            passed = (step - warm_steps) / max(1, all_steps - warm_steps)
            return scaled * (1 + math.cos(math.pi * min(1.0, passed))) / 2
        return scaled

    return rate


def warning(trial: Trial) -> str | None:
    """One line about a learning rate that few would defend; None where there is nothing to say."""
    if trial.lr_rule == "linear" and trial.optimizer in _ADAPTIVE:
        return (
            f"lr_rule 'linear' with optimizer {trial.optimizer!r}: an update that is divided by its own size does not "
            "shrink with the gradient's noise, and its rate is usually scaled by the square root of the batch; "
            "consider lr_rule 'sqrt'"
        )
    if trial.lr_rule == "none" and trial.warmup != "none":
        return (
            f"warmup {trial.warmup!r} changes nothing with lr_rule 'none': it leads from the unscaled learning rate to "
            "the scaled one; use lr_rule 'linear' or 'sqrt'"
        )
    if trial.epochs and trial.warmup != "none" and trial.warmup_epochs >= trial.epochs:
        return (
            f"warmup_epochs {trial.warmup_epochs:g} of {trial.epochs} epochs: training ends before the learning rate is "
            "the scaled one; use fewer warmup_epochs"
        )
    return None
