"""What a study tells Prometheus, and what the dashboard asks it for."""

import importlib.util
import re
from pathlib import Path

import pytest

from analysis.load.schema import STATUSES
from study.orchestrate.metrics import OF_TRIAL, MakeGauge, Metrics, counts
from study.orchestrate.twin.in_process import LocalGauge
from tests.support.dashboard import METRICS, OF_GPUS


@pytest.fixture
def gauges() -> dict[str, LocalGauge]:
    """Every gauge that `make` made, by its name."""
    return {}


@pytest.fixture
def make(gauges: dict[str, LocalGauge]) -> MakeGauge:
    return lambda name, **options: gauges.setdefault(name, LocalGauge(name, **options))


def test_progress_counts_every_trial_once_and_only_the_latest_is_current(
    gauges: dict[str, LocalGauge], make: MakeGauge
) -> None:
    metrics = Metrics("s", counts({"a": "done", "b": "failed", "old": "done"}, ["b", "c", "d"]), make)
    trials = gauges["scaling_study_trials"].values
    nothing = {("s", status): 0 for status in STATUSES}
    assert trials == nothing | {("s", "done"): 2, ("s", "left"): 3}
    metrics.ended("b", "done", {"step_s": 0.5, "slowest_rank": 1.0})
    metrics.ended("c", "timeout", {})
    assert trials == nothing | {("s", "done"): 3, ("s", "timeout"): 1, ("s", "left"): 1}
    assert gauges["scaling_study_current"].values == {("s", "b"): 0, ("s", "c"): 1}
    assert gauges["scaling_study_step_s"].values == {("s", "b"): 0.5}
    assert "scaling_study_slowest_rank" not in gauges, "a number that no dashboard shows costs a series a trial"


def test_what_still_holds_is_told_again_and_what_was_of_earlier_trials_is_not(
    gauges: dict[str, LocalGauge], make: MakeGauge
) -> None:
    metrics = Metrics("s", {"left": 3}, make)
    metrics.epoch_ended("c", {"epoch": 1})  # a training beside the others
    metrics.ended("a", "done", {"step_s": 0.5})
    metrics.ended("b", "done", {"step_s": 0.7})
    for gauge in gauges.values():
        gauge.values.clear()  # as Ray forgets them
    metrics.repeat()
    assert gauges["scaling_study_step_s"].values == {("s", "b"): 0.7}
    assert gauges["scaling_study_current"].values == {("s", "b"): 1}
    assert gauges["scaling_study_epoch"].values == {("s", "c"): 1.0}
    assert gauges["scaling_study_trials"].values[("s", "left")] == 1


def test_the_dashboard_asks_only_for_metrics_that_are_ours_or_rays() -> None:
    found = importlib.util.find_spec("ray")
    assert found is not None
    assert found.origin is not None
    agent = Path(found.origin).parent / "dashboard/modules/reporter/reporter_agent.py"
    ours = {f"ray_scaling_study_{name}" for name in (*OF_TRIAL, "trials", "current")}
    rays = {f"ray_{name}" for name in re.findall(r'"(node_\w+)"', agent.read_text())}
    assert set(METRICS) <= ours | rays
    assert set(OF_GPUS) <= set(METRICS)
