"""Collectives of a script, from hand-made rows: transfer, wait, hidden and exposed time."""

from typing import Any

import pandas as pd
import pytest

from analysis.measure.collectives import COLUMNS, by_operation, matched

Call = tuple[int, str, float, float, float]


def frame(calls: list[Call], step: int = 0) -> pd.DataFrame:
    """Return rows of (rank, operation, start_s, end_s, hidden_s), numbered per rank and operation."""
    rows: list[dict[str, Any]] = []
    for rank, operation, start_s, end_s, hidden_s in calls:
        number = sum(row["rank"] == rank and row["operation"] == operation for row in rows)
        common = {"trial_id": "t", "window": "communication", "step": step, "group": None, "group_size": None}
        times = {"start_s": start_s, "end_s": end_s, "hidden_s": hidden_s}
        rows.append(common | times | {"rank": rank, "operation": operation, "bytes": 100, "collective": number})
    return pd.DataFrame(rows)


def test_the_wait_is_the_excess_over_the_last_rank_to_arrive() -> None:
    rows = matched(frame([(0, "all_reduce", 1.0, 4.0, 0.5), (1, "all_reduce", 3.0, 4.0, 0.25)]))
    assert list(rows["transfer_s"]) == [1.0, 1.0]
    assert list(rows["wait_s"]) == [2.0, 0.0]
    assert list(rows["exposed_s"]) == [2.5, 0.75]
    assert list(rows["exposed_transfer_s"]) == [1.0, 0.75]
    assert list(rows["exposed_wait_s"]) == [1.5, 0.0]


def test_calls_of_a_step_are_matched_by_their_number() -> None:
    calls = [(rank, "all_gather", start, start + length, 0.0) for rank, start, length in
             ((0, 0.0, 1.0), (1, 0.0, 2.0), (0, 5.0, 4.0), (1, 5.0, 3.0))]  # fmt: skip
    assert list(matched(frame(calls))["transfer_s"]) == [1.0, 1.0, 3.0, 3.0]


def test_sums_per_step_are_medians_over_steps_and_means_over_ranks() -> None:
    rows = [(rank, step, seconds + rank) for step, seconds in enumerate((1.0, 2.0, 9.0)) for rank in (0, 1)]
    result = by_operation(pd.concat(frame([(rank, "all_reduce", 0.0, end_s, 0.0)], step) for rank, step, end_s in rows))
    assert result.loc[("t", "all_reduce"), "duration_s"] == pytest.approx((2.0 + 3.0) / 2)
    assert result.loc[("t", "all_reduce"), "transfer_s"] == pytest.approx(2.0)
    assert result.loc[("t", "all_reduce"), "wait_s"] == pytest.approx(0.5)
    assert result.loc[("t", "all_reduce"), "calls"] == 1


def test_an_operation_of_few_steps_costs_nothing_in_the_median_step() -> None:
    calls = [frame([(0, "all_reduce", 0.0, 1.0, 0.0)], step) for step in range(3)]
    result = by_operation(pd.concat([*calls, frame([(0, "broadcast", 0.0, 5.0, 0.0)], 1)]))
    assert result.loc[("t", "broadcast"), "duration_s"] == 0.0


def test_no_collectives_are_no_rows() -> None:
    assert list(by_operation(frame([(0, "x", 0.0, 1.0, 0.0)]).iloc[:0]).columns) == COLUMNS
