"""Metrics that a study exports to Prometheus, and metrics that the dashboard queries."""

import importlib.util
import re
from pathlib import Path

import pytest

from analysis.read.schema import PHASES, STATUSES
from study.orchestrate.metrics import EPOCH_METRICS, TRIAL_METRICS, Efficiencies, MakeGauge, Metrics, counts
from study.orchestrate.twin.in_process import LocalGauge
from tests.support.dashboard import METRICS, OF_GPUS, OF_OTHER_STUDIES, ROOT
from tests.support.trials import quick_trial

MONITORING = ROOT / "docs" / "monitoring.md"


@pytest.fixture
def gauges() -> dict[str, LocalGauge]:
    """All gauges that `make` created, by name."""
    return {}


@pytest.fixture
def make(gauges: dict[str, LocalGauge]) -> MakeGauge:
    return lambda name, **options: gauges.setdefault(name, LocalGauge(name, **options))


def test_progress_counts_every_trial_once_and_only_the_latest_is_current(
    gauges: dict[str, LocalGauge], make: MakeGauge
) -> None:
    metrics = Metrics("s", counts({"a": "done", "b": "failed", "old": "done"}, ["b", "c", "d"]), make)
    trials = gauges["scaling_study_trials"].values
    zeros = {("s", status): 0 for status in STATUSES}
    assert trials == zeros | {("s", "done"): 2, ("s", "left"): 3}
    metrics.ended("b", "done", {"step_s": 0.5, "slowest_rank": 1.0})
    metrics.ended("c", "timeout", {})
    assert trials == zeros | {("s", "done"): 3, ("s", "timeout"): 1, ("s", "left"): 1}
    assert gauges["scaling_study_current"].values == {("s", "b"): 0, ("s", "c"): 1}
    assert gauges["scaling_study_step_s"].values == {("s", "b"): 0.5}
    assert "scaling_study_slowest_rank" not in gauges, "measures outside TRIAL_METRICS are not exported"


def test_repeat_sets_current_values_again_but_not_those_of_earlier_trials(
    gauges: dict[str, LocalGauge], make: MakeGauge
) -> None:
    metrics = Metrics("s", {"left": 3}, make)
    metrics.epoch_ended("c", {"epoch": 1})  # a concurrent training
    metrics.ended("a", "done", {"step_s": 0.5})
    metrics.ended("b", "done", {"step_s": 0.7})
    for gauge in gauges.values():
        gauge.values.clear()  # Ray drops old values
    metrics.repeat()
    assert gauges["scaling_study_step_s"].values == {("s", "b"): 0.7}
    assert gauges["scaling_study_current"].values == {("s", "b"): 1}
    assert gauges["scaling_study_epoch"].values == {("s", "c"): 1.0}
    assert gauges["scaling_study_trials"].values[("s", "left")] == 1


def test_windows_count_running_trials_and_disappear_when_none_is_left(
    gauges: dict[str, LocalGauge], make: MakeGauge
) -> None:
    metrics = Metrics("s", {"left": 2}, make)
    metrics.running(["warm-up", "plain steps", "plain steps"])
    windows = gauges["scaling_study_window"].values
    assert windows == {("s", "warm-up"): 1, ("s", "plain steps"): 2}
    metrics.running(["plain steps"])
    assert windows == {("s", "warm-up"): 0, ("s", "plain steps"): 1}
    windows.clear()  # Ray drops old values
    metrics.repeat()
    assert windows == {("s", "plain steps"): 1}


def test_efficiency_is_relative_to_the_same_configuration_on_one_rank_so_far() -> None:
    efficiencies = Efficiencies()
    assert efficiencies.of(quick_trial(world_size=2), 150.0) is None, "nothing is known of one rank"
    assert efficiencies.of(quick_trial(world_size=1), 100.0) == 1.0
    assert efficiencies.of(quick_trial(world_size=2), 150.0) == 0.75
    assert efficiencies.of(quick_trial(world_size=2, batch_per_gpu=16), 150.0) is None, "another configuration"
    efficiencies.of(quick_trial(world_size=1, repeat=1), 140.0)
    assert efficiencies.of(quick_trial(world_size=2, repeat=1), 180.0) == 0.75, "the median of both repeats"
    assert efficiencies.of(quick_trial(world_size=2), None) is None, "a failed trial"


def test_the_documentation_names_every_metric() -> None:
    (table,) = re.findall(r"^\| metric .*?\n\n", MONITORING.read_text(), flags=re.DOTALL | re.MULTILINE)
    named = {name for name in re.findall(r"`(?:scaling_study|\.\.\.)_(\w+)`", table)}
    published = {*TRIAL_METRICS, *EPOCH_METRICS, "trials", "current", "window"}
    assert named <= published
    assert published - named <= set(PHASES), "phases are named by examples"


def test_the_dashboard_queries_metrics_of_ray_and_all_of_the_study() -> None:
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    agent = Path(spec.origin).parent / "dashboard/modules/reporter/reporter_agent.py"
    published = (*TRIAL_METRICS, *EPOCH_METRICS, "trials", "current", "window")
    study_metrics = {f"ray_scaling_study_{name}" for name in published}
    ray_metrics = {f"ray_{name}" for name in re.findall(r'"(node_\w+)"', agent.read_text())}
    assert set(METRICS) <= study_metrics | ray_metrics
    assert {*OF_GPUS, *OF_OTHER_STUDIES} <= set(METRICS)
    assert study_metrics <= set(METRICS), "a metric that is published has a panel"
