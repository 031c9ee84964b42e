"""Caveats that a report must state for every study: losses, impossible rates, and steps of a paused rank."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.read.results import load_reduced
from analysis.study import Analysis, analyse
from analysis.verdict.trust import impossible_rates, non_finite_losses, trust
from tests.support.frames import FIELDS, record, steps, trial_id, write_study, write_trial

ONE = FIELDS | {"steps": 12}
OTHER = ONE | {"repeat": 1}


def analysed(directory: Path, frame: pd.DataFrame, **of_rank: Any) -> Analysis:
    """Analyse one trial with these steps and an ordinary one. `of_rank`: evidence of the first one's ranks."""
    write_study(directory)
    trial = record(ONE)
    for rank in trial["environment"]["ranks"]:
        rank.update(of_rank)
    write_trial(directory, trial, frame)
    write_trial(directory, record(OTHER), steps(OTHER, 0.1))
    return analyse(load_reduced(directory))


@pytest.mark.parametrize(("first", "count", "throughout"), [(0, 27, 1), (20, 7, 0)])
def test_losses_that_are_not_finite_are_stated(tmp_path: Path, first: int, count: int, throughout: int) -> None:
    frame = steps(ONE, 0.1)
    analysis = analysed(tmp_path, frame.assign(loss=frame["loss"].where(frame["step"] < first)))
    line = non_finite_losses(analysis)
    assert line is not None and line in trust(analysis)
    assert line.startswith(f"In 1 of 2 trials the loss is not a finite number, in {throughout} of them in every step")
    assert f"{trial_id(ONE)} ({count} steps)" in line


def test_finite_losses_are_no_caveat(tmp_path: Path) -> None:
    assert non_finite_losses(analysed(tmp_path, steps(ONE, 0.1))) is None


def test_a_script_without_losses_has_no_caveat_about_them(tmp_path: Path) -> None:
    frame = steps(ONE, 0.1).assign(loss=np.nan)
    write_study(tmp_path)
    write_trial(tmp_path, record(ONE | {"script": "/home/me/train.py"}), frame)
    assert non_finite_losses(analyse(load_reduced(tmp_path))) is None


@pytest.mark.parametrize(("flops", "is_possible"), [(1e9, True), (1e15, False)])
def test_a_rate_beyond_the_cores_of_the_host_is_a_caveat(tmp_path: Path, flops: float, is_possible: bool) -> None:
    """16 cores do at most 53 TFLOP/s in fp32; the step takes 0.1 s."""
    analysis = analysed(tmp_path, steps(ONE, 0.1), step_flops=flops)
    line = impossible_rates(analysis)
    assert (line is None) == is_possible
    if line:
        assert line in trust(analysis)
        assert trial_id(ONE) in line and trial_id(OTHER) not in line
        assert "187.8 times" in line
