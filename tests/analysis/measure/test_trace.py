"""Traces made by hand, with known overlaps: what is read from them, and whether the live account agrees."""

import gzip
import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.load.results import load
from analysis.measure.trace import (
    TraceError,
    check,
    check_trial,
    compare,
    gradient_kernels,
    length_s,
    overlap_s,
    read_kernels,
    uncovered_s,
    union,
)
from analysis.predict.inputs import with_models
from analysis.report.report import write_report
from analysis.report.sections import TABLES
from analysis.study import analyse
from tests.support.frames import FIELDS, record, steps, trial_id, write_study, write_trial

REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
OLD_REDUCE = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"
BROADCAST = "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

Span = tuple[str, float, float]
"""name, begin and end in ms"""

STEP: list[Span] = [
    (BROADCAST, 0.0, 0.1),
    ("forward", 0.1, 4.0),
    ("backward", 4.0, 6.0),
    (REDUCE, 6.0, 9.0),
    ("backward", 6.5, 8.0),
    (REDUCE, 9.0, 12.0),  # waits for the first one
    ("backward", 9.5, 10.0),  # after a gap in which the host was late
    ("Memcpy DtoD (Device -> Device)", 10.0, 10.1),  # the last gradient's way into its bucket
    (REDUCE, 12.0, 14.0),
    ("Memcpy DtoD (Device -> Device)", 10.5, 11.0),  # the first bucket's way out of its own
    ("Memcpy DtoD (Device -> Device)", 14.0, 14.1),
    ("optimizer", 14.1, 15.0),
]
"""a step in the order in which its host launches it: the last gradient at 10.1 ms, all-reduces from 6 to 14 ms"""


def event(name: str, begin_ms: float, end_ms: float, launch: int) -> dict[str, Any]:
    category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    timing = {"ts": 1e9 + 1e3 * begin_ms, "dur": 1e3 * (end_ms - begin_ms)}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, **timing, "args": {"correlation": launch}}


def write_trace(path: Path, spans: Sequence[Span], others: Sequence[dict[str, Any]] = ()) -> str:
    events = [event(*span, launch) for span, launch in zip(spans, count(100, 3), strict=False)]
    path.parent.mkdir(parents=True, exist_ok=True)
    # what ran is written stream by stream, and between what is not of the GPU
    events = [*others, *sorted(events, key=lambda e: ("nccl" in e["name"], e["ts"]))]
    path.write_bytes(gzip.compress(json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()))
    return str(path)


def later(spans: Sequence[Span], ms: float) -> list[Span]:
    return [(name, begin + ms, end + ms) for name, begin, end in spans]


# --------------------------------------------------------------------------------------------------- what is read


def test_the_last_gradient_is_the_last_that_was_launched_before_the_last_all_reduce(tmp_path: Path) -> None:
    kernels = read_kernels(write_trace(tmp_path / "trace.json.gz", [*STEP, *later(STEP, 20)]), 2)
    found = gradient_kernels(kernels, [3, 3])
    assert found["step"].tolist() == [0, 0, 0, 1, 1, 1]
    assert found["bucket"].tolist() == [0, 1, 2, 0, 1, 2]
    assert 1e3 * found["begin_s"].to_numpy() == pytest.approx([6, 9, 12, 26, 29, 32])
    assert 1e3 * found["end_s"].to_numpy() == pytest.approx([9, 12, 14, 29, 32, 34])
    assert 1e3 * found["last_gradient_s"].to_numpy() == pytest.approx([10.1] * 3 + [30.1] * 3)


def test_time_without_a_covering_kernel_has_the_host_s_gaps_and_not_the_copies_out(tmp_path: Path) -> None:
    kernels = read_kernels(write_trace(tmp_path / "trace.json.gz", [*STEP, *later(STEP, 20)]), 2)
    found = uncovered_s(kernels, gradient_kernels(kernels, [3, 3]))
    # 8 ms less the backward pass within them (1.5, 0.5), the way in (0.1) and the way out (0.5)
    assert 1e3 * found.to_numpy() == pytest.approx([5.4, 5.4])


@pytest.mark.parametrize("name", [REDUCE, OLD_REDUCE, "NCCL_AllReduce"])
def test_kernels_of_every_nccl_are_known(tmp_path: Path, name: str) -> None:
    path = write_trace(tmp_path / "trace.json.gz", [("backward", 0.0, 1.0), (name, 1.0, 2.0)])
    assert read_kernels(path, 2)["communication"].tolist() == [False, True]


def test_a_trace_may_lie_on_any_file_system_and_hold_much_else(tmp_path: Path) -> None:
    others: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 3, "args": {"correlation": 100}},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "nccl:all_reduce", "ts": 0, "dur": 3, "args": {}},
        {"ph": "X", "cat": "cpu_op", "name": "nccl:all_reduce", "ts": 0, "dur": 3, "args": {}},
    ]
    path = write_trace(tmp_path / "trace.json.gz", [("backward", 0.0, 1.0), (REDUCE, 1.0, 2.0)], others)
    kernels = read_kernels(f"file://{path}", 2)
    assert kernels["name"].tolist() == ["backward", REDUCE]
    assert kernels[["begin_s", "end_s"]].to_numpy() == pytest.approx(np.array([[0, 1e-3], [1e-3, 2e-3]]))


# ------------------------------------------------------------------------------------------------ what is refused


def line(path: str, world_size: int = 2, buckets: list[int] | None = None) -> str:
    with pytest.raises(TraceError) as error:
        gradient_kernels(read_kernels(path, world_size), buckets or [1], path)
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix(f"{path}: ")


def test_a_trace_of_several_ranks_without_communication_is_refused(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.json.gz", [("rcclReduce", 0.0, 1.0), ("backward", 0.0, 1.0)])
    assert line(path) == "none of its 2 kernels begins with 'nccl', though 2 ranks communicate"
    assert len(read_kernels(path, world_size=1)) == 2


def test_a_trace_of_a_cpu_is_refused(tmp_path: Path) -> None:
    others = [{"ph": "X", "cat": "cpu_op", "name": "gloo:all_reduce", "ts": 0, "dur": 3, "args": {}}]
    path = write_trace(tmp_path / "trace.json.gz", [], others)
    assert line(path).startswith("holds no kernel, copy or memset; a trace of a CPU rank")


@pytest.mark.parametrize("buckets", [[2], [3, 3], [1, 1]])
def test_all_reduces_that_are_not_the_buckets_are_refused(tmp_path: Path, buckets: list[int]) -> None:
    path = write_trace(tmp_path / "trace.json.gz", STEP)
    expected = f"holds 3 all-reduce kernels, but its {len(buckets)} steps had {sum(buckets)} buckets"
    assert line(path, buckets=buckets) == expected


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        gzip.compress(b"{}", mtime=0),
        gzip.compress(b"[1]", mtime=0),
        gzip.compress(b'{"traceEvents": [{"cat": "kernel", "name": "k", "ts": 1}]}', mtime=0),
        gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9],
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(content)
    assert line(str(path)).startswith("not a trace that torch.profiler exports (")


values = st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=3), st.just([]), st.just({}))
keys = st.sampled_from(["cat", "name", "ts", "dur", "args"])
events = st.dictionaries(keys, st.one_of(values, st.just("kernel"), st.just({"correlation": 1})), max_size=5)


@settings(deadline=None)
@given(st.one_of(st.binary(), st.lists(st.one_of(values, events), max_size=4)))
def test_whatever_a_file_holds_nothing_else_is_raised(
    tmp_path_factory: pytest.TempPathFactory, content: bytes | list[Any]
) -> None:
    path = tmp_path_factory.mktemp("traces") / "trace.json.gz"
    path.write_bytes(gzip.compress(content if isinstance(content, bytes) else json.dumps(content).encode()))
    with pytest.raises(TraceError):
        read_kernels(str(path), 2)


# --------------------------------------------------------------------------------------------------- interval unions

grid = st.integers(0, 40)
spans = st.lists(st.tuples(grid, grid).map(lambda pair: (min(pair), max(pair))), max_size=8)


def points(intervals: Sequence[tuple[int, int]]) -> set[int]:
    """The unit cells that the intervals cover."""
    return {cell for begin, end in intervals for cell in range(begin, end)}


def array(intervals: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.array(intervals, dtype=float).reshape(-1, 2)


@given(spans)
def test_a_union_covers_the_same_points_with_disjoint_intervals(given_spans: list[tuple[int, int]]) -> None:
    found = union(array(given_spans))
    assert points([(int(begin), int(end)) for begin, end in found]) == points(given_spans)
    assert (found[1:, 0] > found[:-1, 1]).all()
    assert length_s(array(given_spans)) == len(points(given_spans))
    assert (union(found) == found).all()


@given(spans, spans)
def test_an_overlap_is_what_both_cover(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    assert overlap_s(array(first), array(second)) == len(points(first) & points(second))


# -------------------------------------------------------------------------------------------- live against the trace


def live(
    ranks: int, paths: Sequence[str], last_gradient_ms: float = 10.1
) -> tuple[pd.Series, pd.DataFrame, pd.DataFrame]:
    """A trial with two steps like STEP, each of which began 1 ms before its first kernel, and its buckets and steps."""
    trial = pd.Series({"trial_id": "pair", "device": "cuda", "world_size": ranks, "trace_paths": tuple(paths)})
    rows = [
        {"trial_id": "pair", "rank": rank, "window": window, "step": step}
        for window in ("communication", "profile")
        for rank in range(ranks)
        for step in (30, 31)
    ]
    stamps = [(6.0, 9.0), (8.0, 12.0), (10.1, 14.0)]
    buckets = [
        row | {"bucket": bucket, "bytes": 4 * 2**20, "ready_s": (ready + 1.0) / 1e3, "end_s": (end + 1.0) / 1e3}
        for row in rows
        for bucket, (ready, end) in enumerate(stamps)
    ]
    steps = pd.DataFrame(rows).assign(last_gradient_s=(last_gradient_ms + 1.0) / 1e3)
    return trial, pd.DataFrame(buckets), steps


def traces(folder: Path, ranks: int) -> list[str]:
    """Traces of two steps."""
    return [write_trace(folder / f"rank{rank}.json.gz", [*STEP, *later(STEP, 20)]) for rank in range(ranks)]


def milliseconds(seconds: pd.Series) -> list[float]:
    return (1e3 * seconds.astype(float)).tolist()


def test_a_sound_account_holds(tmp_path: Path) -> None:
    found = check_trial(*live(2, traces(tmp_path, 2)))
    assert found["rank"].tolist() == [0, 1]
    assert found["holds"].all()
    for name, expected in {"communication": 8.0, "hidden": 4.1, "exposed": 3.9}.items():
        assert milliseconds(found[f"{name}_trace_s"]) == pytest.approx([expected] * 2)
        assert milliseconds(found[f"{name}_live_s"]) == pytest.approx([expected] * 2)
        assert milliseconds(found[f"{name}_difference_s"]) == pytest.approx([0.0] * 2, abs=1e-6)
    assert milliseconds(found["uncovered_s"]) == pytest.approx([5.4] * 2)


def test_wire_is_the_shortest_duration_of_any_rank(tmp_path: Path) -> None:
    spans = [("backward", 0.0, 1.0), (REDUCE, 1.0, 3.0), (REDUCE, 3.0, 7.0)]
    waiting = [("backward", 0.0, 1.0), (REDUCE, 0.5, 3.0), (REDUCE, 3.0, 7.0)]
    paths = [
        write_trace(tmp_path / f"rank{rank}.json.gz", [*step, *later(step, 20)])
        for rank, step in enumerate([spans, waiting, waiting])
    ]
    trial, buckets, steps = live(3, paths)
    found = check_trial(trial, buckets[buckets["bucket"] < 2], steps)
    assert milliseconds(found["wire_trace_s"]) == pytest.approx([6.0] * 3)
    assert milliseconds(found["wire_live_s"]) == pytest.approx([6.0] * 3)
    assert milliseconds(found["communication_trace_s"]) == pytest.approx([6.0, 6.5, 6.5])


def test_without_every_rank_s_trace_there_is_no_wire(tmp_path: Path) -> None:
    found = check_trial(*live(2, traces(tmp_path, 2)[1:]))
    assert found["rank"].tolist() == [1]
    assert found[["wire_trace_s", "wire_live_s"]].isna().all(axis=None)


@pytest.mark.parametrize(("late_ms", "holds"), [(0.19, True), (-0.19, True), (0.21, False), (-0.21, False)])
def test_an_account_off_by_more_than_5_percent_does_not_hold(tmp_path: Path, late_ms: float, holds: bool) -> None:
    found = check_trial(*live(2, traces(tmp_path, 2), last_gradient_ms=10.1 + late_ms))
    assert found["holds"].tolist() == [holds] * 2
    # the last bucket is ready when the last gradient is, in both
    assert found["exposed_difference_share"].tolist() == pytest.approx([-late_ms / 3.9] * 2)


@pytest.mark.parametrize(("off_ms", "holds"), [(0.09, True), (0.11, False)])
def test_a_tenth_of_a_millisecond_is_near_enough(off_ms: float, holds: bool) -> None:
    trace = pd.DataFrame({"communication_s": [0.002], "hidden_s": [0.002], "exposed_s": [0.0]})
    found = compare(trace, trace.assign(exposed_s=off_ms / 1e3))
    assert (found["holds"], found["exposed_difference_share"]) == (holds, None)


def test_a_trace_of_another_name_is_refused(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "first.json.gz", STEP)
    with pytest.raises(TraceError, match=r"the name of a trace is rank<R>\.json\.gz"):
        check_trial(*live(2, [path]))


# ---------------------------------------------------------------------------------------------------- in the report


def traced_study(folder: Path, broken: bool = False) -> Path:
    """Results of two trials, on one and on two GPUs; the latter with buckets and traces of its two last steps."""
    write_study(folder)
    for size in (1, 2):
        fields = FIELDS | {"device": "cuda", "world_size": size}
        write_trial(folder, record(fields), steps(fields, 0.1))
    place = folder / "trials" / trial_id(fields)
    paths = traces(place / "traces", 2)
    _, buckets, stamps = live(2, paths)
    buckets.drop(columns="trial_id").to_parquet(place / "buckets.parquet")
    rows = [pd.read_parquet(place / "steps.parquet"), stamps.drop(columns="trial_id").assign(samples=32)]
    pd.concat(rows).astype({"rank": "int32", "step": "int32", "samples": "int32"}).to_parquet(place / "steps.parquet")
    if broken:
        write_trace(place / "traces/rank1.json.gz", [("backward", 0.0, 1.0)])
    return folder


def test_the_table_has_a_row_for_each_trial_with_traces(tmp_path: Path) -> None:
    cells = TABLES["trace"](with_models(analyse(load(traced_study(tmp_path))))).cells()
    expected = {
        "GPUs": "2",
        "traced ranks": "0 and 1",
        "hidden, live (ms)": "4.100",
        "hidden, trace (ms)": "4.100",
        "wire time, live (ms)": "8.000",
        "wire time, trace (ms)": "8.000",
        "uncovered (ms)": "5.400",
        "exposed, live (ms)": "3.900",
        "exposed, trace (ms)": "3.900",
        "agree": "yes",
    }
    assert [{name: row[name] for name in expected} for _, row in cells.iterrows()] == [expected]


def test_a_trace_that_cannot_be_used_is_a_row_with_its_problem(tmp_path: Path) -> None:
    directory = traced_study(tmp_path, broken=True)
    [row] = check(load(directory)).to_dict("records")
    assert row["holds"] is False
    assert row["problem"].endswith(
        "rank1.json.gz: none of its 1 kernels begins with 'nccl', though 2 ranks communicate"
    )
    [cells] = TABLES["trace"](with_models(analyse(load(directory)))).cells().to_dict("records")
    assert (cells["agree"], cells["problem"]) == ("no", row["problem"])


def test_traces_are_found_where_the_results_are_named_by_a_uri(tmp_path: Path) -> None:
    results = load(f"file://{traced_study(tmp_path)}")
    assert all(path.startswith(f"file://{tmp_path}") for paths in results.trials["trace_paths"] for path in paths)
    assert check(results)["holds"].tolist() == [True, True]


@pytest.mark.usefixtures("no_figures")
def test_a_report_has_the_section_where_there_are_traces(tmp_path: Path) -> None:
    with_traces = write_report(traced_study(tmp_path / "traced")).path
    write_study(tmp_path / "plain")
    write_trial(tmp_path / "plain", record(FIELDS), steps(FIELDS, 0.1))
    without = write_report(tmp_path / "plain").path
    for name in ("index.html", "report.md"):
        assert "Communication breakdown: live vs. trace" in Path(with_traces).with_name(name).read_text()
        assert "Communication breakdown: live vs. trace" not in Path(without).with_name(name).read_text()
    assert Path(with_traces).with_name("tables").joinpath("trace.csv").is_file()
    assert not Path(without).with_name("tables").joinpath("trace.csv").exists()
