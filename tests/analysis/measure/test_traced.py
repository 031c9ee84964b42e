"""Breakdown from traces of all ranks, from hand-made rows with known parts."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.compare.communication import slowed_by_trace, trial_breakdown
from analysis.measure.communication import bucket_rows
from analysis.measure.traced import traced_breakdown
from analysis.read.parquet import plain_frame
from analysis.read.schema import frame_schema

GATHER = {"operation": "all_gather", "group": None, "bytes": 100, "collective": 0}
SCATTER = {"operation": "reduce_scatter", "group": None, "bytes": 100, "collective": 0}


def calls(rank: int, gather: tuple[float, float, float], scatter: tuple[float, float, float]) -> list[dict[str, Any]]:
    """Return the rows of a step: (start, end, hidden) of an all-gather and of a reduce-scatter."""
    step = {"trial_id": "t", "window": "profile", "step": 0, "rank": rank}
    return [
        step | call | dict(zip(("start_s", "end_s", "hidden_s"), times, strict=True))
        for call, times in ((GATHER, gather), (SCATTER, scatter))
    ]


def window(rank: int, name: str, **values: float) -> dict[str, Any]:
    names = ("collectives_s", "exposed_collectives_s", "kernels_s", "step_s", "load_wait_s")
    return {"trial_id": "t", "rank": rank, "window": name, **dict.fromkeys(names, np.nan), **values}


def windows(*exposed_s: float, step_s: float = 10.0) -> pd.DataFrame:
    """Return the windows of ranks with these exposed seconds; collectives take 4 s on each."""
    rows = []
    for rank, seconds in enumerate(exposed_s):
        traced = {"collectives_s": 4.0, "exposed_collectives_s": seconds, "kernels_s": 6.0}
        rows.append(window(rank, "profile", step_s=step_s, **traced))
        rows.append(window(rank, "phases", step_s=10.0, load_wait_s=0.5 * rank))
    return pd.DataFrame(rows)


def breakdown(collectives: list[dict[str, Any]], rows: pd.DataFrame) -> dict[str, Any]:
    [result] = traced_breakdown(pd.DataFrame(collectives), rows).to_dict("records")
    return {str(name): value for name, value in result.items()}


def test_ranks_that_are_late_in_turn_both_wait_and_transfer() -> None:
    """Rank 1 is late at the first collective and rank 0 at the second, by a second each."""
    rows = [
        *calls(0, (0.0, 2.0, 0.0), (5.0, 6.0, 0.0)),
        *calls(1, (1.0, 2.0, 0.0), (4.0, 6.0, 0.0)),
    ]
    found = breakdown(rows, windows(3.0, 3.0))
    assert found["exposed_wire_s"] == pytest.approx(2.0)
    assert found["exposed_wait_s"] == pytest.approx(1.0)
    assert pd.isna(found["waited_for_rank"])


def test_a_late_rank_is_named_and_the_wait_is_that_of_the_other() -> None:
    rows = [
        *calls(0, (0.0, 2.0, 0.0), (4.0, 6.0, 1.0)),
        *calls(1, (1.0, 2.0, 0.0), (5.0, 6.0, 1.0)),
    ]
    found = breakdown(rows, windows(3.0, 1.0))
    assert found["waited_for_rank"] == 1
    assert found["exposed_wire_s"] == pytest.approx(3.0 * 2.0 / 3.0)
    assert found["exposed_wait_s"] == pytest.approx(1.0) == found["lateness_s"]
    assert found["late_by_load_s"] == pytest.approx(0.5)
    assert found["hidden_s"] + found["exposed_s"] == found["communication_s"] == 4.0
    assert found["wire_s"] + found["wait_s"] == 4.0
    assert (found["kernel_s"], found["communication_step_s"], found["traced"]) == (6.0, 10.0, 1.0)


def test_waiting_for_a_late_rank_behind_computation_is_its_hidden_lateness() -> None:
    """Rank 0 waits 3 s at its first collective, during which it computes, and 1 s at its last."""
    rows = [
        *calls(0, (0.0, 4.0, 4.0), (7.0, 9.0, 0.0)),
        *calls(1, (3.0, 4.0, 1.0), (8.0, 9.0, 0.0)),
    ]
    found = breakdown(rows, windows(2.0, 1.0))
    assert found["waited_for_rank"] == 1
    assert found["lateness_s"] == pytest.approx(1.0)
    assert found["hidden_lateness_s"] == pytest.approx(2.0)


def test_scripts_without_buckets_are_divided_in_the_same_way() -> None:
    rows = [
        *calls(0, (0.0, 2.0, 0.0), (4.0, 6.0, 1.0)),
        *calls(1, (1.0, 2.0, 0.0), (5.0, 6.0, 1.0)),
    ]
    of_strategy, seen = breakdown(rows, windows(3.0, 1.0)), windows(3.0, 1.0).replace("profile", "communication")
    collectives = pd.DataFrame(rows).assign(window="communication")
    [of_script] = traced_breakdown(collectives, seen).to_dict("records")
    assert of_script == of_strategy
    without_totals = seen.assign(collectives_s=np.nan)
    assert traced_breakdown(collectives, without_totals).empty


def test_hidden_communication_costs_nothing() -> None:
    rows = [*calls(0, (0.0, 1.0, 1.0), (2.0, 3.0, 1.0)), *calls(1, (0.0, 1.0, 1.0), (2.0, 3.0, 1.0))]
    found = breakdown(rows, windows(0.0, 0.0))
    assert (found["exposed_s"], found["exposed_wire_s"], found["hidden_s"]) == (0.0, 0.0, 4.0)


def test_a_profiler_that_slows_the_step_leaves_no_breakdown() -> None:
    rows = [*calls(0, (0.0, 1.0, 0.0), (2.0, 3.0, 0.0)), *calls(1, (0.0, 1.0, 0.0), (2.0, 3.0, 0.0))]
    trials = pd.DataFrame({"trial_id": ["t"], "own_code": [None]})
    no_buckets = bucket_rows(
        plain_frame([], frame_schema("buckets")), plain_frame([], frame_schema("steps")), trials.assign(device="cpu")
    )
    for step_s, kept in ((10.5, ["t"]), (12.0, [])):
        seen = windows(2.0, 2.0, step_s=step_s)
        traced = traced_breakdown(pd.DataFrame(rows), seen)
        assert list(trial_breakdown(no_buckets, slowed_by_trace(trials, seen), seen, traced).index) == kept


def test_without_traces_there_are_no_rows() -> None:
    assert traced_breakdown(pd.DataFrame(calls(0, (0.0, 1.0, 0.0), (2.0, 3.0, 0.0))).iloc[:0], windows(1.0)).empty
