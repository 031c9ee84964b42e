"""Windows that end early: the arithmetic of the interval, and the decision on real ranks."""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, repeat
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchmarks.truth.stopping import generated
from tests.support.gloo import on_ranks
from trainables.measure import stopping
from trainables.measure.run import run
from trainables.measure.stopping import (
    CHECKS,
    CONFIDENCE,
    MAX_BLOCKS,
    MAX_CORRELATION,
    block_correlation,
    block_lengths,
    blocks_between_checks,
    doubling_lengths,
    relative_width,
)
from trainables.measure.windows import plain_blocks, steady_blocks
from trainables.step.context import RankSetup
from trainables.step.timing import CpuClock, StartPart, StepOutput
from trainables.trial import Trial

PAIR = Trial(
    model="mlp", world_size=2, batch_per_gpu=4, warmup_steps=2, steps=40, communication_steps=0, median_width=0.01
)


@given(least=st.integers(0, 500), most=st.integers(1, 500))
def test_blocks_cover_all_steps_and_the_first_check_follows_the_minimum(least: int, most: int) -> None:
    most = max(least, most)
    lengths = block_lengths(least, most)
    assert sum(lengths) == most
    assert 1 <= len(lengths) <= MAX_BLOCKS
    assert all(length > 0 for length in lengths)
    if len(lengths) >= CHECKS[0]:
        assert sum(lengths[: CHECKS[0]]) >= least


@given(first=st.integers(1, 500), most=st.integers(1, 500))
def test_doubling_blocks_end_exactly_at_the_maximum(first: int, most: int) -> None:
    lengths = doubling_lengths(first, most)
    assert sum(lengths) == most
    assert lengths[0] == min(first, most)
    steps_before = list(accumulate(lengths))
    assert all(length == before for length, before in zip(lengths[1:-1], steps_before, strict=False))
    assert all(length <= before for length, before in zip(lengths[1:], steps_before, strict=False))


def test_the_width_is_students_with_the_error_divided_among_all_checks() -> None:
    block_step_s = [0.0100, 0.0102, 0.0101, 0.0099, 0.0103]
    logs = np.log(block_step_s)
    low, high = stats.t.interval(1 - (1 - CONFIDENCE) / len(CHECKS), 4, logs.mean(), stats.sem(logs))
    expected = (math.exp(high) - math.exp(low)) / math.exp(logs.mean())
    assert relative_width(block_step_s) == pytest.approx(expected, rel=1e-12)
    assert relative_width(block_step_s[:4]) == math.inf
    assert relative_width([0.02] * 5) == 0.0


def test_the_width_grows_with_the_correlation_of_neighbouring_blocks() -> None:
    alike, unlike = [0.0100, 0.0100, 0.0101, 0.0102, 0.0102], [0.0100, 0.0102, 0.0101, 0.0100, 0.0102]
    assert block_correlation(list(map(math.log, unlike))) == 0
    assert block_correlation(list(map(math.log, alike))) == MAX_CORRELATION
    assert relative_width(alike) == pytest.approx(3 * relative_width(unlike), rel=1e-3)


def test_the_correlation_of_neighbours_is_estimated() -> None:
    values = generated(np.random.default_rng(4), 1, 20_000, 0.5, 0.01)[0]
    assert block_correlation(values.tolist()) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("correlation", [0.0, 0.3])
def test_the_final_interval_covers_despite_repeated_checks(correlation: float) -> None:
    rng = np.random.default_rng(8)
    covered, windows = 0, 1500
    for blocks in generated(rng, windows, MAX_BLOCKS, correlation, 0.01):
        step_s = np.exp(blocks)
        count = next((n for n in CHECKS if relative_width(step_s[:n].tolist()) <= 0.02), MAX_BLOCKS)
        half = math.asinh(relative_width(step_s[:count].tolist()) / 2)
        covered += abs(np.log(step_s[:count]).mean()) <= half
    assert covered / windows >= 0.95


def test_blocks_run_until_they_are_enough() -> None:
    calls: list[int] = []

    def enough(block_step_s: Sequence[float]) -> bool:
        calls.append(len(block_step_s))
        return len(calls) == 3

    step = repeat(StepOutput(None))  # type: ignore[arg-type]
    blocks = plain_blocks(
        lambda batch, start_part: next(step), repeat(None), [4, 2, 2, 2], CpuClock(), lambda: None, enough
    )
    assert calls == [1, 2, 3]
    assert [len(block.outputs) for block in blocks] == [4, 2, 2]
    assert all(block.seconds > 0 and not block.lead_in for block in blocks)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=MAX_BLOCKS))
def test_each_run_of_blocks_ends_with_a_check(lengths: list[int]) -> None:
    runs = blocks_between_checks(lengths)
    assert [length for run in runs for length in run] == lengths
    assert list(accumulate(map(len, runs)))[:-1] == [check for check in CHECKS if check < len(lengths)]


class QueuedDevice:
    """The clock and the steps of an asynchronous device. A step takes 1 s, or 1.5 s if the device is idle before it."""

    def __init__(self) -> None:
        self.now_s, self.idle, self.done = 0.0, True, 0

    def step(self, batch: None, start_part: StartPart) -> StepOutput:
        self.now_s += 1.5 if self.idle else 1.0
        self.idle = False
        self.done += 1
        return StepOutput(torch.tensor(float(self.done)))

    def mark(self) -> float:
        return self.now_s

    def seconds(self, first: float, second: float) -> float:
        return second - first

    def passed(self, mark: float) -> bool:
        return True

    def synchronize(self) -> None:
        self.idle = True

    def annotate(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()


def test_steady_blocks_exclude_the_start_up_cost() -> None:
    device, calls = QueuedDevice(), list[int]()

    def enough(block_step_s: Sequence[float]) -> bool:
        calls.append(len(block_step_s))
        return len(calls) == 2

    blocks = steady_blocks(device.step, repeat(None), [[3, 2], [2, 2], [2]], device, lambda: None, enough)
    assert calls == [2, 4], "called after each run, of which there are two"
    assert [block.step_s for block in blocks] == [1.0] * 4
    losses = [[float(output.loss) for output in [*block.lead_in, *block.outputs]] for block in blocks]
    assert losses == [[1, 2, 3, 4], [5, 6], [7, 8, 9], [10, 11]], "steps come in the order in which they ran"
    assert [len(block.lead_in) for block in blocks] == [1, 0, 1, 0]


def measured(rank: int, fields: dict[str, Any]) -> list[dict[str, Any]]:
    # ranks measure different times, but only rank 0 decides
    if fields.pop("narrow_on_rank_0_only"):
        stopping.relative_width = lambda block_step_s: 0.0 if rank == 0 else math.inf
    return run(Trial.model_validate(fields), RankSetup(rank=rank, device=torch.device("cpu"))).tables["steps"]


def test_all_ranks_stop_at_the_block_at_which_rank_0_stops() -> None:
    ranks = on_ranks(2, measured, PAIR.model_dump() | {"narrow_on_rank_0_only": True})
    for rows in ranks:
        plain = [row for row in rows if row["window"] == "plain"]
        assert len(plain) == CHECKS[0] * 2  # blocks of 40 / 20 steps
        spans = {row["block_s"] for row in plain}
        assert plain[0]["window_s"] == pytest.approx(sum(spans))
        [lead] = [row for row in rows if row["window"] == "lead_in"]
        assert lead["step"] == plain[0]["step"] - 1, "one untimed step, right before the only run of blocks"
        assert len([row for row in rows if row["window"] == "phases"]) == CHECKS[0] * 2
        assert all("block_s" not in row for row in rows if row["window"] != "plain")


def test_a_window_whose_width_is_never_reached_takes_all_steps() -> None:
    fields = PAIR.but(world_size=1, parallel="none", median_width=1e-9).model_dump()
    [rows] = on_ranks(1, measured, fields | {"narrow_on_rank_0_only": False})
    assert len([row for row in rows if row["window"] == "plain"]) == PAIR.steps
    assert len([row for row in rows if row["window"] == "lead_in"]) == len(CHECKS)
    assert len([row for row in rows if row["window"] == "phases"]) == PAIR.steps


def test_all_ranks_shorten_slow_windows_alike() -> None:
    trial = PAIR.but(median_width=None, communication_steps=8, window_limit_s=1e-6, sweep_bytes=4)
    for rows in on_ranks(2, measured, trial.model_dump() | {"narrow_on_rank_0_only": False}):
        windows = Counter(row["window"] for row in rows)
        assert windows["plain"] == windows["phases"] == windows["synchronised"] == windows["communication"] == 5
