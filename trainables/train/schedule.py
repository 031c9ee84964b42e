"""The learning rate schedule: scaling with the batch size, warm-up and decay."""

import math
from collections.abc import Callable

from trainables.trial import Trial

STEP_DECAY = (1 / 3, 2 / 3, 8 / 9)
"""fractions of the training after which `decay="step"` divides the rate by ten: epochs 30, 60 and 80 of 90 in Goyal et
al."""

_GROWTH: dict[str, Callable[[float], float]] = {"none": lambda _: 1.0, "linear": float, "sqrt": math.sqrt}
_ADAPTIVE = ("adamw", "lamb")


def learning_rate(trial: Trial, steps_per_epoch: int) -> Callable[[int], float]:
    """Return the function from optimizer step (from 0) to learning rate, for a trial that trains for `epochs`.

    `lr_rule`, with k = global batch / `reference_batch`: "linear" multiplies `learning_rate` by k (Goyal et al. 2017,
    https://arxiv.org/abs/1706.02677, section 2.1). "sqrt" multiplies it by the square root of k, which preserves the
    variance of an update (Krizhevsky 2014, https://arxiv.org/abs/1404.5997, section 5; Hoffer et al. 2017,
    https://arxiv.org/abs/1705.08741, section 4). If k < 1, the rate decreases.

    `warmup`, over the first `warmup_epochs` (rounded to steps): "constant" uses the unscaled rate. "gradual" increases
    the rate linearly, from the unscaled rate at step 0 to the scaled rate at the first step after the warm-up (Goyal et
    al., section 2.2). The warm-up is part of `epochs`; the rate does not decay during it.

    `decay`: "step" multiplies the rate by 0.1 after each fraction of `STEP_DECAY`. "cosine" decreases it to 0 by half a
    cosine, from the end of the warm-up to the end of training (Loshchilov and Hutter 2017,
    https://arxiv.org/abs/1608.03983, equation 5, one cycle).
    """
    scaled = trial.learning_rate * _GROWTH[trial.lr_rule](trial.global_batch / trial.reference_batch)
    warm_steps = 0 if trial.warmup == "none" else round(trial.warmup_epochs * steps_per_epoch)
    all_steps = trial.epochs * steps_per_epoch
    drops = [round(fraction * all_steps) for fraction in STEP_DECAY]

    def rate(step: int) -> float:
        if step < warm_steps:
            fraction = step / warm_steps if trial.warmup == "gradual" else 0.0
            return trial.learning_rate + fraction * (scaled - trial.learning_rate)
        if trial.decay == "step":
            return scaled * 0.1 ** sum(step >= drop for drop in drops)
        if trial.decay == "cosine":
            fraction = (step - warm_steps) / max(1, all_steps - warm_steps)
            return scaled * (1 + math.cos(math.pi * min(1.0, fraction))) / 2
        return scaled

    return rate


def warning(trial: Trial) -> str | None:
    """Return a one-line warning about an unusual learning rate schedule. None if there is nothing to warn about."""
    if trial.lr_rule == "linear" and trial.optimizer in _ADAPTIVE:
        return (
            f"lr_rule 'linear' with optimizer {trial.optimizer!r}: the learning rate of adaptive optimizers is usually "
            "scaled with the square root of the batch size; consider lr_rule 'sqrt'"
        )
    if trial.lr_rule == "none" and trial.warmup != "none":
        return (
            f"warmup {trial.warmup!r} has no effect with lr_rule 'none', because the scaled learning rate equals the "
            "unscaled one; use lr_rule 'linear' or 'sqrt'"
        )
    if trial.epochs and trial.warmup != "none" and trial.warmup_epochs >= trial.epochs:
        return (
            f"warmup_epochs {trial.warmup_epochs:g} is not less than epochs {trial.epochs}: training ends before the "
            "learning rate reaches its scaled value; use fewer warmup_epochs"
        )
    return None
