"""The critical batch over the course of a training, from the gradient noise scale of its epochs.

McCandlish et al. 2018 (https://arxiv.org/abs/1812.06162), section 2.3: the critical batch is approximately tr(Sigma) /
|G|^2, and it grows during training. Numerator and denominator are averaged over epochs and trainings before they are
divided, because their ratio is biased. The interval is that of a jackknife over blocks of epochs and over trainings
(Quenouille 1956, https://doi.org/10.1093/biomet/43.3-4.353; Efron and Tibshirani 1993, chapter 11). The spread between
trainings alone would tell nothing about how much the critical batch differs between epochs.
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.special import stdtrit

PERIODS = ("first", "middle", "last")
"""Thirds of the epochs."""

BLOCKS = 6
"""Blocks of successive epochs per interval, or fewer with fewer epochs."""

MIN_BLOCKS = 3
"""Two blocks have one degree of freedom, whose interval spans orders of magnitude."""


def critical_batches(epochs: pd.DataFrame) -> dict[str, float | int | str | None]:
    """Return the critical batch of equal trainings in samples, of all epochs and of thirds of them.

    epochs: rows of epochs.parquet of these trainings.

    noise_batch: over all epochs. noise_batch_first, _middle, _last: over thirds; NaN with fewer than three epochs. Each
    has `_low` and `_high` (95 %), see `ratio_of_means`. noise_n: trainings. noise_epochs_*: "1 to 6".
    """
    known = epochs.dropna(subset=["noise_trace", "noise_norm2"])
    result: dict[str, float | int | str | None] = {"noise_n": int(known["trial_id"].nunique())}
    result |= _named("noise_batch", known)
    numbers = np.sort(known["epoch"].unique())
    thirds = np.array_split(numbers, len(PERIODS)) if len(numbers) >= len(PERIODS) else [numbers[:0]] * len(PERIODS)
    for period, part in zip(PERIODS, thirds, strict=True):
        result |= _named(f"noise_batch_{period}", known[known["epoch"].isin(part)])
        result[f"noise_epochs_{period}"] = f"{part.min()} to {part.max()}" if len(part) else None
    return result


def _named(name: str, epochs: pd.DataFrame) -> dict[str, float]:
    return dict(zip((name, f"{name}_low", f"{name}_high"), ratio_of_means(epochs), strict=True))


def ratio_of_means(epochs: pd.DataFrame) -> tuple[float, float, float]:
    """Return mean tr(Sigma) / mean |G|^2 over epochs and trainings, with the ends of its 95 % interval.

    The variance of the logarithm is the sum of two jackknife variances, over blocks of epochs and over trainings, with
    Satterthwaite's degrees of freedom. All are NaN if a mean is not positive. The interval is NaN with fewer than
    three blocks of epochs, and its upper end infinite if a mean without some block or training is not positive.
    """
    trace, norm2 = (epochs[name].to_numpy(dtype=float) for name in ("noise_trace", "noise_norm2"))
    if not len(trace) or trace.mean() <= 0 or norm2.mean() <= 0:
        return math.nan, math.nan, math.nan
    point = float(trace.mean() / norm2.mean())
    numbers = np.sort(epochs["epoch"].unique())
    blocks = [epochs["epoch"].isin(part).to_numpy() for part in np.array_split(numbers, min(BLOCKS, len(numbers)))]
    if len(blocks) < MIN_BLOCKS:
        return point, math.nan, math.nan
    trainings = [(epochs["trial_id"] == trial_id).to_numpy() for trial_id in epochs["trial_id"].unique()]
    parts = [_jackknife(trace, norm2, left_out) for left_out in (blocks, trainings) if len(left_out) > 1]
    variance = sum(part for part, _, _ in parts)
    squares = sum(part**2 / degrees for part, degrees, _ in parts)
    degrees = variance**2 / squares if squares > 0 else float(parts[0][1])
    half = float(stdtrit(degrees, 0.975)) * math.sqrt(variance)
    is_open = any(hidden for _, _, hidden in parts)
    return point, point * math.exp(-half), math.inf if is_open else point * math.exp(half)


def _jackknife(trace: np.ndarray, norm2: np.ndarray, left_out: Sequence[np.ndarray]) -> tuple[float, int, bool]:
    """Return the jackknife variance of the logarithm of the ratio, its degrees, and whether a mean was not positive."""
    means = [(trace[~part].mean(), norm2[~part].mean()) for part in left_out]
    logs = np.array([math.log(a / b) for a, b in means if a > 0 and b > 0])
    spread = logs - logs.mean() if len(logs) else logs
    count = len(left_out)
    return (count - 1) / count * float(spread @ spread), count - 1, len(logs) < count
