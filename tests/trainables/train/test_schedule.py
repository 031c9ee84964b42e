"""Learning rate schedules, compared with values computed by hand."""

import pytest

from trainables.train.schedule import learning_rate, warning
from trainables.trial import Trial

FOUR_TIMES = Trial(learning_rate=0.1, reference_batch=128, batch_per_gpu=512, epochs=3)
"""global batch 512, so k = 4 and sqrt(k) = 2"""


def rates(trial: Trial, steps_per_epoch: int, steps: int) -> list[float]:
    rate = learning_rate(trial, steps_per_epoch)
    return [rate(step) for step in range(steps)]


@pytest.mark.parametrize(("rule", "expected"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_a_rule_scales_the_rate_with_the_batch(rule: str, expected: float) -> None:
    assert rates(FOUR_TIMES.but(lr_rule=rule), 2, 6) == [pytest.approx(expected)] * 6


def test_a_rule_uses_the_global_batch() -> None:
    trial = FOUR_TIMES.but(batch_per_gpu=64, world_size=2, accumulation_steps=4, lr_rule="linear")
    assert rates(trial, 2, 1) == [pytest.approx(0.4)]


def test_a_batch_below_the_reference_has_a_smaller_rate() -> None:
    assert rates(FOUR_TIMES.but(batch_per_gpu=32, lr_rule="linear"), 2, 1) == [pytest.approx(0.025)]


def test_gradual_warm_up_adds_the_same_amount_every_step() -> None:
    trial = FOUR_TIMES.but(lr_rule="linear", warmup="gradual", warmup_epochs=1.5)
    assert rates(trial, 4, 12) == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3, 0.35, *[0.4] * 6])


def test_constant_warm_up_uses_the_unscaled_rate() -> None:
    trial = FOUR_TIMES.but(lr_rule="linear", warmup="constant", warmup_epochs=1)
    assert rates(trial, 2, 6) == pytest.approx([0.1, 0.1, 0.4, 0.4, 0.4, 0.4])


def test_step_decay_divides_by_ten_at_epochs_30_60_and_80_of_90() -> None:
    trial = FOUR_TIMES.but(epochs=90, decay="step")
    found = rates(trial, 1, 90)
    assert found == pytest.approx([0.1] * 30 + [0.01] * 30 + [0.001] * 20 + [0.0001] * 10)


def test_step_decay_starts_after_the_warm_up() -> None:
    trial = FOUR_TIMES.but(epochs=9, decay="step", lr_rule="linear", warmup="constant", warmup_epochs=4)
    assert rates(trial, 1, 9) == pytest.approx([0.1] * 4 + [0.04] * 2 + [0.004] * 2 + [0.0004])


def test_cosine_decay_falls_from_the_scaled_rate_to_zero() -> None:
    trial = FOUR_TIMES.but(epochs=3, decay="cosine", lr_rule="linear", warmup="gradual", warmup_epochs=1)
    # after two warm-up steps, cos of 0, 45, 90 and 135 degrees; after the end, 0
    root = 2**-0.5
    expected = [0.1, 0.25, 0.4, 0.2 * (1 + root), 0.2, 0.2 * (1 - root), 0.0, 0.0]
    assert rates(trial, 2, 8) == pytest.approx(expected)


def test_a_warm_up_longer_than_training_only_rises() -> None:
    trial = FOUR_TIMES.but(epochs=1, decay="cosine", lr_rule="linear", warmup="gradual", warmup_epochs=2)
    assert rates(trial, 4, 4) == pytest.approx([0.1, 0.1375, 0.175, 0.2125])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lr_rule": "linear"}, None),
        ({"lr_rule": "sqrt", "optimizer": "adamw"}, None),
        (
            {"lr_rule": "linear", "optimizer": "adamw"},
            ("lr_rule 'linear'", "optimizer 'adamw'", "consider lr_rule 'sqrt'"),
        ),
        ({"warmup": "gradual"}, ("warmup 'gradual'", "lr_rule 'none'", "use lr_rule 'linear' or 'sqrt'")),
        ({"lr_rule": "linear", "warmup": "gradual"}, ("warmup_epochs 5 ", "epochs 3", "use fewer warmup_epochs")),
    ],
)
def test_an_unusual_schedule_gives_a_warning(changes: dict[str, str], expected: tuple[str, ...] | None) -> None:
    message = warning(FOUR_TIMES.but(**changes))
    if expected is None or message is None:
        assert message is None and expected is None
    else:
        assert all(words in message for words in expected)
