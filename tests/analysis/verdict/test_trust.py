"""Caveats that a report must state for every study: losses, impossible rates, and steps of a paused rank."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.predict.inputs import with_models
from analysis.read.results import load_reduced
from analysis.study import Analysis, analyse
from analysis.verdict.card import card_of
from analysis.verdict.communication import sentences
from analysis.verdict.own_code import separate_trials, slowed_traces, without_exchange
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


LATE_S = 0.02


def script_on_two_ranks(directory: Path, traced_s: float, *, stamped: bool) -> Analysis:
    """Analyse a script whose rank 1 is late by `LATE_S`, of which the trace shows nothing."""
    write_study(directory)
    write_script_trial(directory, traced_s, stamped=stamped)
    return analyse(load_reduced(directory))


def write_script_trial(
    directory: Path, traced_s: float, *, stamped: bool, repeat: int = 0, late_s: float = LATE_S
) -> None:
    """Write a trial of a script whose rank 1 is late.

    traced_s: duration of a traced step, of 0.1 s without the profiler. stamped: the phases window has the last gradient
    and the end of the reductions.
    """
    fields = ONE | {"script": "/home/me/train.py", "world_size": 2, "repeat": repeat}
    plain = steps(fields, 0.1).query("window == 'plain'").assign(step_s=0.1)
    last_s = np.where(plain["rank"] == 1, 0.07 + late_s, 0.07)
    phases = plain.assign(window="phases", last_gradient_s=last_s if stamped else None)
    traced = plain.assign(window="communication", step_s=traced_s, last_gradient_s=0.08)
    windows = [frame.assign(step=frame["step"] + n * len(plain)) for n, frame in enumerate((plain, phases, traced))]
    reduced_s = {"phases": 0.07 + late_s + 0.005, "communication": 0.09}
    buckets = [
        {"rank": row.rank, "window": row.window, "step": row.step, "bucket": 0, "bytes": 4000}
        | {"ready_s": row.last_gradient_s, "end_s": reduced_s[str(row.window)]}
        for frame in windows[1 if stamped else 2 :]
        for row in frame.itertuples()
    ]
    write_trial(directory, record(fields), pd.concat(windows, ignore_index=True), buckets=pd.DataFrame(buckets))


def test_a_profiler_that_hardly_slows_a_script_shows_its_communication(tmp_path: Path) -> None:
    analysis = script_on_two_ranks(tmp_path / "traced", 0.105, stamped=False)
    assert slowed_traces(analysis) is None
    [row] = analysis.communication.breakdown.to_dict("records")
    assert (row["exposed_wait_s"], row["exposed_wire_s"]) == pytest.approx((0, 0.01)), "of the trace"
    analysis = script_on_two_ranks(tmp_path / "stamped", 0.105, stamped=True)
    [row] = analysis.communication.breakdown.to_dict("records")
    assert (row["exposed_wait_s"], row["exposed_wire_s"]) == pytest.approx((LATE_S, 0.005)), "without the profiler"
    assert (row["communication_s"], row["hidden_s"], row["wire_s"]) == pytest.approx((LATE_S + 0.005, 0, 0.01))


def test_a_profiler_that_slows_a_script_hides_how_its_ranks_wait(tmp_path: Path) -> None:
    analysis = script_on_two_ranks(tmp_path, 0.15, stamped=False)
    line = slowed_traces(analysis)
    assert analysis.communication.breakdown.empty
    assert line is not None and "up to 1.5 times as long" in line and line in trust(analysis)


def test_steps_without_a_profiler_show_the_late_rank_of_a_script(tmp_path: Path) -> None:
    analysis = script_on_two_ranks(tmp_path, 0.15, stamped=True)
    [row] = analysis.communication.breakdown.to_dict("records")
    assert (row["exposed_wait_s"], row["exposed_wire_s"]) == pytest.approx((LATE_S, 0.005))
    assert (row["waited_for_rank"], row["gradient_bytes"], row["buckets"]) == (1, 4000, 1)
    assert np.isnan([row["hidden_s"], row["communication_s"]]).all(), "unknown without the trace's times"
    assert analysis.communication.exposed["exposed_wait_s"].tolist() == pytest.approx([LATE_S])
    line = slowed_traces(analysis)
    assert line is not None and "without it" in line and line in trust(analysis)


def test_ranks_of_a_script_that_exchange_nothing_are_stated(tmp_path: Path) -> None:
    alone = script_on_two_ranks(tmp_path / "alone", 0.1, stamped=False)
    line = without_exchange(alone)
    assert line is not None and line in trust(alone)
    [trial] = alone.measured["trial_id"]
    assert separate_trials(alone) == [trial]
    reduced = {"rank": 0, "window": "communication", "step": 40, "operation": "allreduce", "collective": 0}
    times = {"group_size": 2, "bytes": 4000, "start_s": 0.0, "end_s": 0.1, "hidden_s": 0.0, "trial_id": trial}
    exchanged = dataclasses.replace(alone.results, collectives=pd.DataFrame([reduced | times]))
    assert without_exchange(dataclasses.replace(alone, results=exchanged)) is None


def test_a_script_without_losses_has_no_caveat_about_them(tmp_path: Path) -> None:
    frame = steps(ONE, 0.1).assign(loss=np.nan)
    write_study(tmp_path)
    write_trial(tmp_path, record(ONE | {"script": "/home/me/train.py"}), frame)
    assert non_finite_losses(analyse(load_reduced(tmp_path))) is None


def test_a_users_model_may_compute_in_a_narrower_precision_than_its_trial(tmp_path: Path) -> None:
    """1.1 times the peak in fp32, which the trial's precision would be, but not that of bf16."""
    own = ONE | {"workload": "/home/me/mine.py:build"}
    for fields in (ONE, own):
        directory = tmp_path / ("own" if fields is own else "built-in")
        write_study(directory)
        trial = record(fields)
        for rank in trial["environment"]["ranks"]:
            rank["step_flops"] = 6e12
        write_trial(directory, trial, steps(fields, 0.1))
        line = impossible_rates(analyse(load_reduced(directory)))
        assert (line is None) == (fields is own)


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


def paused(frame: pd.DataFrame, pause_s: float, stopped: int, phase: str) -> pd.DataFrame:
    """Return steps in which a rank stops in a step of the phases window, and the other rank waits in its backward."""
    phases = frame["window"] == "phases"
    step = int(frame.loc[phases, "step"].min()) + 7
    frame = frame.copy()
    for rank in (0, 1):
        here = phases & (frame["step"] == step) & (frame["rank"] == rank)
        frame.loc[here, [phase if rank == stopped else "backward_s", "step_s"]] += pause_s
    frame.loc[phases, "window_s"] += pause_s
    return frame


@pytest.mark.parametrize(
    ("phase", "place"), [("forward_s", "on rank 1, in forward"), ("backward_s", "an unknown rank")]
)
def test_a_rank_that_stopped_is_named_with_its_step_and_time(tmp_path: Path, phase: str, place: str) -> None:
    fields = ONE | {"world_size": 2}
    write_study(tmp_path)
    frame = steps(fields, 0.1, noise=0.02)
    write_trial(tmp_path, record(fields), paused(frame, 20.0, 1, phase))
    for repeat in (1, 2):
        more = fields | {"repeat": repeat}
        write_trial(tmp_path, record(more), steps(more, 0.1, noise=0.02, rng=np.random.default_rng(repeat)))
    analysis = analyse(load_reduced(tmp_path))
    [line] = [line for line in trust(analysis) if "seems to have stopped" in line]
    step = fields["warmup_steps"] + fields["steps"] + 7
    assert "In 1 trial " in line and trial_id(fields) in line
    assert f"step {step}, 0.7 s into the phases window, took 20.1 s instead of 0.1" in line
    assert place in line


def test_a_pause_of_the_plain_window_names_the_trial(tmp_path: Path) -> None:
    """The median of three repeats would hide it."""
    third = ONE | {"repeat": 2}
    write_trial(tmp_path, record(third), steps(third, 0.1))
    frame = steps(ONE, 0.1)
    frame.loc[frame["window"] == "plain", "window_s"] += 20.0
    analysis = analysed(tmp_path, frame)
    [line] = [line for line in trust(analysis) if "seems to have stopped" in line]
    assert "In 1 trial " in line
    assert f"{trial_id(ONE)}: its plain window took 21.2 s instead of 1.2 s" in line


def test_the_card_does_not_trust_a_trial_with_a_paused_rank(tmp_path: Path) -> None:
    fields = ONE | {"world_size": 2}
    write_study(tmp_path)
    for repeat in range(3):
        more = fields | {"repeat": repeat}
        frame = steps(more, 0.1, noise=0.002, rng=np.random.default_rng(repeat))
        frame = paused(frame, 20.0, 1, "forward_s") if repeat == 1 else frame
        write_trial(tmp_path, record(more), frame)
    found = card_of(with_models(analyse(load_reduced(tmp_path)))).trust
    assert found.level == "poor"
    assert "a rank was paused" in found.reason


def test_noise_is_no_pause(tmp_path: Path) -> None:
    analysis = analysed(tmp_path, steps(ONE, 0.1, noise=0.5))
    assert "paused_rank" not in {finding.name for finding in analysis.findings}


@pytest.mark.parametrize("traced_s", [0.1, 0.15])
def test_a_script_without_buckets_in_its_trace_has_exposed_communication(tmp_path: Path, traced_s: float) -> None:
    write_study(tmp_path)
    write_script_trial(tmp_path, traced_s, stamped=True)
    [path] = tmp_path.glob("trials/*/buckets.parquet")
    pd.read_parquet(path).query("window == 'phases'").to_parquet(path)
    analysis = analyse(load_reduced(tmp_path))
    [row] = analysis.communication.breakdown.to_dict("records")
    assert (row["exposed_wait_s"], row["waited_for_rank"]) == (pytest.approx(LATE_S), 1)
    assert np.isnan(row["wire_s"])
    assert any(line.startswith("Exposed communication takes") for line in sentences(analysis))


def test_trials_with_and_without_a_noted_last_gradient_are_broken_down_together(tmp_path: Path) -> None:
    write_study(tmp_path)
    for repeat, late_s in enumerate((None, 0.0, LATE_S, 0.0)):
        write_script_trial(tmp_path, 0.1, stamped=late_s is not None, repeat=repeat, late_s=late_s or 0.0)
    breakdown = analyse(load_reduced(tmp_path)).communication.breakdown
    assert breakdown["exposed_wait_s"].tolist() == pytest.approx([0, 0, LATE_S, 0])
    assert breakdown["waited_for_rank"].fillna(-1).tolist() == [-1, -1, 1, -1]


def test_steps_that_wait_for_slow_loaders_are_no_pauses(tmp_path: Path) -> None:
    """Of 8 loader processes, every eighth step waits for all: 0.6 s, in steps of 0.02 s."""
    fields = ONE | {"steps": 48}
    frame = steps(fields, 0.02, noise=0.02)
    for name in ("phases", "plain"):
        here = frame["window"] == name
        late = here & (frame["step"] % 8 == 0)
        frame.loc[late, ["load_wait_s", "step_s"]] += 0.6
        frame.loc[here, "window_s"] += 0.6 * late.sum()
    write_study(tmp_path)
    write_trial(tmp_path, record(fields), frame)
    analysis = analyse(load_reduced(tmp_path))
    assert not {"paused_rank", "periodic_steps", "bimodal_steps"} & {finding.name for finding in analysis.findings}
    assert analysis.regions["bound"].tolist() == ["load"]
