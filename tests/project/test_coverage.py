"""The report's 95 % intervals contain the true value as often as they claim; the benchmark in full, a tenth here."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from analysis.compare.scaling import scaling_rows
from analysis.measure.configurations import configurations
from analysis.measure.measures import MEASURES
from analysis.statistics import intervals, log_estimates, ratios_to_reference
from benchmarks.truth.coverage import FIELDS, LAYOUTS, Case, Outcome, cases, estimates, former, product, repeats
from tests.support.frames import DECLARED
from tests.support.sizes import sampled

pytestmark = pytest.mark.statistics

STUDIES = sampled(4_000)

CASES = {case.name: case for case in cases()}

ONE_GROUP_PER_REPEAT = [
    "1+1+1 repeats, equal groups",
    "1+1+1 repeats, groups differ by 3 sigma",
    "1+1+1 repeats, 3 sigma, spreads differ, groups too",
    "1+1+1 repeats, two kinds, shared by 3 sigma",
    "1+1+1 repeats, shared by 1 sigma, 10 % missing",
    "1x5 repeats, groups differ by 1 sigma",
    "1x5 repeats, shared by 3 sigma, one group split",
]


def outcome(name: str) -> Outcome:
    """Return the coverage of a case; restricted likelihood, which unbalanced studies need, takes longer."""
    case = CASES[name]
    return product(case, *repeats(case, STUDIES // 8 if case.missing or case.split else STUDIES))


@pytest.mark.parametrize("name", ONE_GROUP_PER_REPEAT)
def test_intervals_of_speed_ups_cover_94_to_97_percent_with_one_group_per_repeat(name: str) -> None:
    shares = outcome(name).speed_up
    chance = 3 * float(shares.std(ddof=1)) / math.sqrt(len(shares))
    assert 0.94 - chance <= shares.mean() <= 0.97 + chance


def test_a_shared_shift_of_three_groups_is_the_worst_case_of_throughput() -> None:
    assert 0.90 <= outcome("1+1+1 repeats, shared by 3 sigma").value.mean() <= 0.95
    assert outcome("2+1 repeats, shared by 3 sigma").value.mean() < 0.92, "two groups do not suffice"


def test_five_groups_give_speed_up_intervals_at_most_0_6_times_as_wide_as_before() -> None:
    for kind in ("equal groups", "groups differ by 1 sigma", "shared by 1 sigma"):
        before = CASES[f"2+1 repeats, {kind}"]
        width = former(before, *repeats(before, STUDIES)).speed_up_width
        assert outcome(f"1x5 repeats, {kind}").speed_up_width <= 0.6 * width


def test_the_former_rule_missed_groups_that_differ() -> None:
    case = CASES["3+2 repeats, groups differ by 3 sigma"]
    assert former(case, *repeats(case, STUDIES)).value.mean() < 0.85


@pytest.mark.parametrize("missing", [0.0, 0.2])
def test_the_benchmark_computes_what_the_report_does(missing: float) -> None:
    case = replace(CASES["1x5 repeats, shared by 1 sigma"], configurations=6)
    rng = np.random.default_rng(5)
    means = repeats(case, 3)[0]
    means[rng.random(means.shape) < missing] = np.nan
    frame = estimates(means, np.zeros(6, dtype=int))
    for study, values in enumerate(means):
        trials = pd.DataFrame(
            [
                {"c": c, "worker_group": str(group), "value": math.exp(log)}
                for c, row in enumerate(values)
                for group, log in enumerate(row)
                if not math.isnan(log)
            ]
        )
        expected = log_estimates(trials, "c", "value")
        found = frame.iloc[6 * study : 6 * study + 6].reset_index(drop=True)
        names = [*FIELDS, "log_mean", "sample"]
        pd.testing.assert_frame_equal(found[names], expected[names], check_names=False, check_dtype=False)
        pd.testing.assert_frame_equal(intervals(found), intervals(expected), check_names=False)


def test_the_scaling_table_has_the_intervals_of_the_estimates() -> None:
    rng = np.random.default_rng(6)
    rows = [
        {"batch_per_gpu": batch, "world_size": size, "repeat": repeat, "throughput_samples_per_s": value}
        for batch in (32, 64, 128)
        for size in (1, 4)
        for repeat in range(3)
        for value in [100.0 * batch * size**0.9 * math.exp(0.01 * rng.standard_normal())]
    ]
    frame = pd.DataFrame(rows).assign(status="done", device="cuda", nodes=1)
    frame["worker_group"] = frame["repeat"].map(str)
    frame["trial_id"] = frame.index.map(str)
    frame["step_s"] = frame["batch_per_gpu"] * frame["world_size"] / frame["throughput_samples_per_s"]
    found = configurations(frame.reindex(columns=list(dict.fromkeys([*frame.columns, *MEASURES]))))
    scaling = scaling_rows(found, DECLARED).query("scaling == 'weak' and ideal > 1")
    keys = frame.groupby(["batch_per_gpu", "world_size"]).ngroup()
    expected = ratios_to_reference(
        log_estimates(frame.assign(key=keys), "key", "throughput_samples_per_s"), pd.Series({1: 0, 3: 2, 5: 4})
    )
    for name, end in (("speed_up", "ratio"), ("speed_up_low", "low"), ("speed_up_high", "high")):
        assert scaling[name].tolist() == pytest.approx(expected[end].tolist())
    assert found["throughput_samples_per_s"].tolist() == pytest.approx(
        (found["global_batch"] / found["step_s"]).tolist()
    ), "throughput and step time of a row never contradict each other"


def test_every_layout_has_every_kind_of_spread() -> None:
    kinds = {label: {name.partition(", ")[2] for name in CASES if name.startswith(label)} for label in LAYOUTS}
    assert kinds["2+1"] == kinds["3+2"] <= kinds["1+1+1"] == kinds["1x5"]
    assert len(kinds["2+1"]) == 8
    assert all(isinstance(case, Case) for case in CASES.values())
