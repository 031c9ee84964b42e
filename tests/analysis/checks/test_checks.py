"""Data checks: silent on clean studies, and each finds its injected fault."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.signal import lfilter

from analysis.checks.finding import FALSE_ALARM, CheckData, Finding
from analysis.checks.steps import CHECKS, findings
from analysis.read.reduce import REQUIRED_COLUMNS, windows
from analysis.read.results import load
from analysis.read.step_shape import step_shapes
from analysis.study import analyse
from analysis.tables.checks import data_checks
from analysis.verdict.trust import trust
from tests.support.frames import gpu_law, grid, write_results
from tests.support.sizes import sampled

CONFIGURATIONS, REPEATS, STEPS = 20, 5, 24
TRIALS = CONFIGURATIONS * REPEATS
STUDIES = sampled(60, 6)

Change = Callable[[pd.DataFrame, pd.DataFrame], None]


def unchanged(trials: pd.DataFrame, steps: pd.DataFrame) -> None:
    """A clean study."""


def spiky(trials: pd.DataFrame, steps: pd.DataFrame) -> None:
    """A clean study, although a random twentieth of the steps takes 1.5 times as long."""
    rng = np.random.default_rng(len(steps) + int(1e6 * steps["step_s"].iloc[0]))
    key = steps["trial"] * STEPS + steps["step"]
    steps.loc[key.map(dict(enumerate(rng.random(TRIALS * STEPS) < 0.05))), "step_s"] *= 1.5


def drifting(trials: pd.DataFrame, steps: pd.DataFrame) -> None:
    """A clean study on a host whose speed drifts by 3 %, with a correlation of 0.9 between neighbouring steps."""
    rng = np.random.default_rng(len(steps) + int(1e6 * steps["step_s"].iloc[0]))
    shocks = 0.03 * (1 - 0.9**2) ** 0.5 * rng.standard_normal((TRIALS, STEPS + 100))
    drift = lfilter([1.0], [1.0, -0.9], shocks, axis=1)[:, 100:]
    steps["step_s"] *= np.exp(drift[steps["trial"], steps["step"]])


def study(seed: int, change: Change = unchanged) -> CheckData:
    """Return 20 configurations on 1, 2 or 4 ranks, with five repeats in randomised blocks of 24 steps, 2 % noise each.

    `change` modifies, in place, the trials (throughput_samples_per_s, started_at) and the steps (columns trial, a
    number, and nominal_s).
    """
    rng = np.random.default_rng(seed)
    configuration = np.concatenate([rng.permutation(CONFIGURATIONS) for _ in range(REPEATS)])
    world_size = 2 ** (configuration % 3)
    nominal_s = 0.01 * (1 + configuration)
    trials = pd.DataFrame(
        {
            "trial_id": [f"c{c}-r{i // CONFIGURATIONS}" for i, c in enumerate(configuration)],
            "configuration": configuration,
            "started_at": 1.7e9 + 30.0 * np.arange(TRIALS) + 5 * rng.random(TRIALS),
            "throughput_samples_per_s": 100 / nominal_s * np.exp(0.01 * rng.standard_normal(TRIALS)),
        }
    )
    trial = np.repeat(np.arange(TRIALS), STEPS * world_size)
    within = np.concatenate([np.arange(STEPS * size) for size in world_size])
    step, rank = within % STEPS, within // STEPS
    common = np.exp(0.02 * rng.standard_normal((TRIALS, STEPS)))[trial, step]
    steps = pd.DataFrame({"trial": trial, "rank": rank, "step": step, "nominal_s": nominal_s[trial]})
    steps["step_s"] = steps["nominal_s"] * common
    for name, part in (("load_wait_s", 0.1), ("forward_s", 0.3), ("backward_s", 0.5)):
        steps[name] = part * steps["nominal_s"] * np.exp(0.03 * rng.standard_normal(len(steps)))
    steps["plain_times"] = 1.0  # step of the plain window / that of the phases window
    change(trials, steps)
    steps = steps.assign(trial_id=trials["trial_id"].to_numpy()[trial], window="phases", samples=32, window_s=1.0)
    plain = steps.assign(window="plain", step_s=steps["step_s"] * steps["plain_times"])
    steps = pd.concat([steps, plain], ignore_index=True)
    steps = steps.reindex(columns=list(REQUIRED_COLUMNS))
    return CheckData(trials, step_shapes(steps), windows(steps))


def names(result: list[Finding]) -> set[str]:
    return {finding.name for finding in result}


@pytest.mark.statistics
def test_the_false_alarm_rate_of_every_check_is_at_most_5_percent() -> None:
    counts = dict.fromkeys(CHECKS, 0)
    for seed in range(STUDIES):
        for name in names(findings(study(seed, (unchanged, spiky, drifting)[seed % 3]))):
            counts[name] += 1
    # A check with a rate of 5 % stays below this with a probability of 99 %.
    limit = stats.binom.ppf(0.99, STUDIES, FALSE_ALARM)
    assert all(count <= limit for count in counts.values()), counts


def falling(trials: pd.DataFrame, steps: pd.DataFrame) -> None:
    hours = (trials["started_at"] - trials["started_at"].min()) / 3600
    trials["throughput_samples_per_s"] *= 1 - 0.06 * hours


def jump(trials: pd.DataFrame, steps: pd.DataFrame) -> None:
    trials.loc[trials.index >= 65, "throughput_samples_per_s"] *= 0.95


def slow_first(trials: pd.DataFrame, steps: pd.DataFrame) -> None:
    steps.loc[(steps["step"] == 0) & (trials["configuration"].to_numpy()[steps["trial"]] == 3), "step_s"] *= 2


def slow_start(trials: pd.DataFrame, steps: pd.DataFrame) -> None:
    of_configuration = trials["configuration"].to_numpy()[steps["trial"]] == 7
    steps.loc[of_configuration & (steps["step"] < 6), "step_s"] *= 1.12


def every_sixth(trials: pd.DataFrame, steps: pd.DataFrame) -> None:
    of_configuration = trials["configuration"].to_numpy()[steps["trial"]] == 5
    steps.loc[of_configuration & (steps["step"] % 6 == 4), "step_s"] *= 1.5


def rollouts(trials: pd.DataFrame, steps: pd.DataFrame) -> None:
    steps.loc[steps["step"] == 7, "plain_times"] = 10.0


def two_speeds(trials: pd.DataFrame, steps: pd.DataFrame) -> None:
    steps.loc[(steps["trial"] == 11) & (steps["step"].isin([2, 3, 5, 8, 11, 12, 13, 17, 19, 20])), "step_s"] *= 1.4


def slow_rank_1(trials: pd.DataFrame, steps: pd.DataFrame) -> None:
    steps.loc[steps["rank"] == 1, "forward_s"] *= 1.15


FAULTS: dict[str, tuple[Change, str, Callable[[str], bool]]] = {
    "drift": (falling, "falls by 4", lambda trial_id: True),
    "change_point": (jump, "repeats of the same configurations are 5", lambda t: int(t[-1]) >= 3),
    "first_step": (slow_first, "takes 2.1 times the median of the others, up to 4", lambda t: t.startswith("c3-")),
    "warm_up": (slow_start, "the window starts 15", lambda t: t.startswith("c7-")),
    "periodic_steps": (every_sixth, "most clearly every 6 steps", lambda t: t.startswith("c5-")),
    "rare_steps": (rollouts, "1 of 24 steps, 10", lambda trial_id: True),
    "bimodal_steps": (two_speeds, "steps fall into two classes", lambda t: t == "c12-r0"),
    "slow_rank": (slow_rank_1, "Rank 1 has the longest forward pass in ", lambda t: int(t[1:].split("-")[0]) % 3 > 0),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_check_finds_its_fault_and_lists_the_trials(name: str) -> None:
    change, words, is_affected = FAULTS[name]
    result = [finding for finding in findings(study(0, change)) if finding.name == name]
    assert len(result) == 1
    assert words in result[0].sentence
    assert result[0].what_to_do.endswith(".")
    assert result[0].trial_ids
    wrong = [trial_id for trial_id in result[0].trial_ids if not is_affected(trial_id)]
    assert len(wrong) <= 0.1 * len(result[0].trial_ids), wrong


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_triggers_no_other_check(name: str) -> None:
    change, _, _ = FAULTS[name]
    expected_too = {"periodic_steps": {"bimodal_steps"}, "warm_up": {"bimodal_steps"}}.get(name, set())
    assert names(findings(study(1, change))) - expected_too <= {name}


def test_rare_steps_of_a_few_trials_or_of_long_windows_are_no_finding() -> None:
    def in_some(trials: pd.DataFrame, steps: pd.DataFrame) -> None:
        steps.loc[(steps["step"] == 7) & (steps["trial"] < TRIALS // 3), "plain_times"] = 10.0

    def short(trials: pd.DataFrame, steps: pd.DataFrame) -> None:
        steps.loc[steps["step"] == 7, "plain_times"] = 2.0

    for change in (in_some, short):
        assert "rare_steps" not in names(findings(study(2, change)))


def test_configurations_with_two_repeats_are_reported(tmp_path: Path) -> None:
    data = study(0)
    keep = data.trials["configuration"].ne(2) | data.trials.groupby("configuration").cumcount().lt(2)
    result = CHECKS["few_repeats"](CheckData(data.trials[keep], data.shapes, data.windows))
    assert result[0].sentence.startswith("1 of 20 configurations ran twice")
    assert "1.6 times" in result[0].sentence
    assert set(result[0].trial_ids) == {"c2-r0", "c2-r1"}
    assert CHECKS["few_repeats"](data) == []


def test_a_study_without_trials_has_no_finding() -> None:
    data = study(0)
    assert findings(CheckData(data.trials.iloc[:0], data.shapes.iloc[:0], data.windows.iloc[:0])) == []


def test_a_single_trial_has_no_finding() -> None:
    data = study(0)
    single = data.trials.iloc[:1]
    frames = [frame[frame["trial_id"].isin(single["trial_id"])] for frame in (data.shapes, data.windows)]
    assert findings(CheckData(single, *frames)) == []


def test_the_report_lists_findings_and_fixes(tmp_path: Path) -> None:
    def law(fields: dict[str, Any]) -> dict[str, Any]:
        result = gpu_law(fields)
        result.pop("communication")
        return result | {"step_s": result["step_s"] * (1.0 if fields["repeat"] < 3 else 1.1)}

    trials = grid(
        {"device": "cuda", "steps": 20, "cpus_per_rank": 8, "loader_workers": 4},
        batch_per_gpu=[32, 128, 512],
        repeat=range(6),
    )
    analysis = analyse(load(write_results(tmp_path / "results", trials, law, noise=0.01)))
    table = data_checks(analysis)
    assert table.frame["check"].tolist() == ["change point"]
    assert "trial_ids" in table.frame
    assert "change point" in table.to_markdown()
    silent = "drift, first step, warm up, periodic steps, rare steps, bimodal steps, slow rank and few repeats."
    assert silent in table.note
    assert any(
        line.startswith("From minute 0 of the study on, repeats of the same configurations are")
        for line in trust(analysis)
    )
