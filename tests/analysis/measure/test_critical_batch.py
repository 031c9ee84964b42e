"""The critical batch and its interval, from epochs with a known noise scale."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.measure.noise_scale import critical_batches, ratio_of_means


def epochs(trace: Any, norm2: Any, trial_id: str = "a") -> pd.DataFrame:
    return pd.DataFrame(
        {"trial_id": trial_id, "epoch": np.arange(1, len(trace) + 1), "noise_trace": trace, "noise_norm2": norm2}
    )


def noisy(phi: float, seeds: int, between: float, rng: np.random.Generator) -> pd.DataFrame:
    """Return trainings of 18 epochs whose |G|^2 varies by 20 % between epochs and by `between` between trainings."""
    frames = []
    for seed in range(seeds):
        norm2 = (1 + 0.2 * rng.standard_normal(18)) * (1 + between * rng.standard_normal())
        frames.append(epochs(np.full(18, phi), norm2, str(seed)))
    return pd.concat(frames)


@pytest.mark.parametrize(("seeds", "between"), [(1, 0.0), (5, 0.0), (5, 0.1)])
def test_the_interval_covers_a_constant_noise_scale_in_about_95_of_100_studies(seeds: int, between: float) -> None:
    rng = np.random.default_rng(3)
    ends = [ratio_of_means(noisy(1500.0, seeds, between, rng))[1:] for _ in range(200)]
    assert 0.91 <= np.mean([low <= 1500 <= high for low, high in ends]) <= 1.0


def test_thirds_follow_a_noise_scale_that_grows_and_the_overall_interval_spans_the_growth() -> None:
    phi = np.repeat([250.0, 1500.0, 2500.0], 6)
    result = critical_batches(pd.concat([epochs(phi, np.ones(18), str(seed)) for seed in range(3)]))
    assert [result[f"noise_batch_{period}"] for period in ("first", "middle", "last")] == [250.0, 1500.0, 2500.0]
    assert [result[f"noise_epochs_{period}"] for period in ("first", "last")] == ["1 to 6", "13 to 18"]
    low, high = result["noise_batch_low"], result["noise_batch_high"]
    assert isinstance(low, float) and isinstance(high, float)
    assert high / low > 2, "equal trainings alone would give an interval of zero width"


def test_an_interval_is_open_above_if_noise_can_hide_the_gradient() -> None:
    value, low, high = ratio_of_means(epochs([10.0] * 6, [5.0, -1, -1, -1, -1, 1]))
    assert value == pytest.approx(30.0)
    assert low < value and math.isinf(high)


def test_a_gradient_hidden_by_noise_has_no_critical_batch() -> None:
    assert all(map(math.isnan, ratio_of_means(epochs([10.0] * 6, [-1.0] * 6))))


def test_two_epochs_have_no_interval_and_no_thirds() -> None:
    result = critical_batches(epochs([10.0, 20.0], [1.0, 1.0]))
    assert result["noise_batch"] == 15.0
    assert all(np.isnan(np.array([result[name] for name in ("noise_batch_low", "noise_batch_first")], dtype=float)))
    assert result["noise_epochs_first"] is None
