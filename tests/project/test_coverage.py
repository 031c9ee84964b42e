"""The report's 95 % intervals contain the true speed-up and efficiency as often as they claim."""

import pytest

from analysis.compare.scaling import scaling_rows
from analysis.measure.configurations import configurations
from benchmarks.truth.coverage import SIZE, TRUE_SPEED_UP, covered, trials
from tests.support.frames import DECLARED
from tests.support.sizes import sampled

pytestmark = pytest.mark.statistics

STUDIES = sampled(4_000, 5)


def test_with_five_repeats_94_to_96_percent_of_intervals_contain_the_true_value() -> None:
    counts = covered(STUDIES, 5)
    assert set(counts) == {"speed_up", "efficiency"}
    assert all(0.94 <= count / STUDIES <= 0.96 for count in counts.values())


def test_with_two_repeats_intervals_are_wider_than_necessary_but_not_too_narrow() -> None:
    assert 0.97 <= covered(STUDIES, 2)["speed_up"] / STUDIES <= 0.99


def test_equal_worker_groups_widen_intervals_little() -> None:
    assert 0.945 <= covered(STUDIES, 5, groups=2)["speed_up"] / STUDIES <= 0.97


def test_generated_studies_have_the_stated_speed_up() -> None:
    rows = scaling_rows(configurations(trials(500, 5, 1, 0.0)), DECLARED)
    rows = rows[rows["world_size"] == SIZE]
    assert len(rows) == 500
    assert set(rows["scaling"]) == {"weak"}
    assert rows["speed_up"].mean() == pytest.approx(TRUE_SPEED_UP, rel=0.002)
    assert rows["efficiency"].mean() == pytest.approx(TRUE_SPEED_UP / SIZE, rel=0.002)
