"""Hand-made traces with known overlaps: what is read from them, and agreement with the live breakdown."""

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

from analysis.measure.trace import (
    TraceError,
    against_live,
    agreement,
    check_trial,
    gradient_kernels,
    length_s,
    overlap_s,
    read_kernels,
    uncovered_s,
    union,
)
from analysis.predict.inputs import with_models
from analysis.read.results import load
from analysis.report.report import write_report
from analysis.report.sections import TABLES
from analysis.study import analyse
from tests.support.frames import FIELDS, record, steps, trial_id, write_study, write_trial

REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
OLD_REDUCE = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"
BROADCAST = "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

Span = tuple[str, float, float]
"""Name, start and end in ms."""

STEP: list[Span] = [
    (BROADCAST, 0.0, 0.1),
    ("forward", 0.1, 4.0),
    ("backward", 4.0, 6.0),
    (REDUCE, 6.0, 9.0),
    ("backward", 6.5, 8.0),
    (REDUCE, 9.0, 12.0),  # waits for the previous one
    ("backward", 9.5, 10.0),  # after a gap because the host was late
    ("Memcpy DtoD (Device -> Device)", 10.0, 10.1),  # copies the last gradient into its bucket
    (REDUCE, 12.0, 14.0),
    ("Memcpy DtoD (Device -> Device)", 10.5, 11.0),  # copies out of the first bucket
    ("Memcpy DtoD (Device -> Device)", 14.0, 14.1),
    ("optimizer", 14.1, 15.0),
]
"""A step in launch order: last gradient at 10.1 ms, all-reduces from 6 to 14 ms."""


def event(name: str, begin_ms: float, end_ms: float, launch: int) -> dict[str, Any]:
    category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    timing = {"ts": 1e9 + 1e3 * begin_ms, "dur": 1e3 * (end_ms - begin_ms)}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, **timing, "args": {"correlation": launch}}


def write_trace(path: Path, spans: Sequence[Span], others: Sequence[dict[str, Any]] = ()) -> str:
    events = [event(*span, launch) for span, launch in zip(spans, count(100, 3), strict=False)]
    path.parent.mkdir(parents=True, exist_ok=True)
    # profilers write GPU events stream by stream, mixed with other events
    events = [*others, *sorted(events, key=lambda e: ("nccl" in e["name"], e["ts"]))]
    path.write_bytes(gzip.compress(json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()))
    return str(path)


def later(spans: Sequence[Span], ms: float) -> list[Span]:
    return [(name, begin + ms, end + ms) for name, begin, end in spans]


# --------------------------------------------------------------------------------------------------- what is read


def test_the_last_gradient_is_the_last_kernel_launched_before_the_last_all_reduce(tmp_path: Path) -> None:
    kernels = read_kernels(write_trace(tmp_path / "trace.json.gz", [*STEP, *later(STEP, 20)]), 2)
    result = gradient_kernels(kernels, [3, 3])
    assert result["step"].tolist() == [0, 0, 0, 1, 1, 1]
    assert result["bucket"].tolist() == [0, 1, 2, 0, 1, 2]
    assert 1e3 * result["begin_s"].to_numpy() == pytest.approx([6, 9, 12, 26, 29, 32])
    assert 1e3 * result["end_s"].to_numpy() == pytest.approx([9, 12, 14, 29, 32, 34])
    assert 1e3 * result["last_gradient_s"].to_numpy() == pytest.approx([10.1] * 3 + [30.1] * 3)


def test_uncovered_time_includes_host_gaps_but_not_copies_out_of_buckets(tmp_path: Path) -> None:
    kernels = read_kernels(write_trace(tmp_path / "trace.json.gz", [*STEP, *later(STEP, 20)]), 2)
    result = uncovered_s(kernels, gradient_kernels(kernels, [3, 3]))
    # 8 ms minus overlapping backward kernels (1.5, 0.5), copies into (0.1) and out of buckets (0.5)
    assert 1e3 * result.to_numpy() == pytest.approx([5.4, 5.4])


@pytest.mark.parametrize("name", [REDUCE, OLD_REDUCE, "NCCL_AllReduce"])
def test_kernels_of_every_nccl_version_are_recognised(tmp_path: Path, name: str) -> None:
    path = write_trace(tmp_path / "trace.json.gz", [("backward", 0.0, 1.0), (name, 1.0, 2.0)])
    assert read_kernels(path, 2)["communication"].tolist() == [False, True]


def test_a_trace_may_be_on_any_file_system_and_contain_other_events(tmp_path: Path) -> None:
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


def error_line(path: str, world_size: int = 2, buckets: list[int] | None = None) -> str:
    with pytest.raises(TraceError) as error:
        gradient_kernels(read_kernels(path, world_size), buckets or [1], path)
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix(f"{path}: ")


def test_a_trace_of_several_ranks_without_communication_is_an_error(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.json.gz", [("rcclReduce", 0.0, 1.0), ("backward", 0.0, 1.0)])
    message = error_line(path)
    assert "2 kernels" in message
    assert "'nccl'" in message
    assert "2 ranks" in message
    assert len(read_kernels(path, world_size=1)) == 2


def test_a_trace_of_a_cpu_rank_is_an_error(tmp_path: Path) -> None:
    others = [{"ph": "X", "cat": "cpu_op", "name": "gloo:all_reduce", "ts": 0, "dur": 3, "args": {}}]
    path = write_trace(tmp_path / "trace.json.gz", [], others)
    assert error_line(path).startswith("contains no kernel, copy or memset")


@pytest.mark.parametrize("buckets", [[2], [3, 3], [1, 1]])
def test_a_wrong_number_of_all_reduces_is_an_error(tmp_path: Path, buckets: list[int]) -> None:
    path = write_trace(tmp_path / "trace.json.gz", STEP)
    message = error_line(path, buckets=buckets)
    assert "3 all-reduce kernels" in message
    assert f"expected {sum(buckets)}" in message
    assert f"{len(buckets)} steps" in message


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
def test_an_invalid_trace_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(content)
    assert error_line(str(path)).startswith("not a trace exported by torch.profiler (")


values = st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=3), st.just([]), st.just({}))
keys = st.sampled_from(["cat", "name", "ts", "dur", "args"])
events = st.dictionaries(keys, st.one_of(values, st.just("kernel"), st.just({"correlation": 1})), max_size=5)


@settings(deadline=None)
@given(st.one_of(st.binary(), st.lists(st.one_of(values, events), max_size=4)))
def test_arbitrary_content_only_raises_trace_errors(
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
    """Return the unit cells that the intervals cover."""
    return {cell for begin, end in intervals for cell in range(begin, end)}


def array(intervals: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.array(intervals, dtype=float).reshape(-1, 2)


@given(spans)
def test_a_union_covers_the_same_points_with_disjoint_intervals(given_spans: list[tuple[int, int]]) -> None:
    result = union(array(given_spans))
    assert points([(int(begin), int(end)) for begin, end in result]) == points(given_spans)
    assert (result[1:, 0] > result[:-1, 1]).all()
    assert length_s(array(given_spans)) == len(points(given_spans))
    assert (union(result) == result).all()


@given(spans, spans)
def test_an_overlap_is_covered_by_both(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    assert overlap_s(array(first), array(second)) == len(points(first) & points(second))


# -------------------------------------------------------------------------------------------- live against the trace


def live(
    ranks: int, paths: Sequence[str], last_gradient_ms: float = 10.1
) -> tuple[pd.Series, pd.DataFrame, pd.DataFrame]:
    """Return a trial with two steps like STEP, with its buckets and steps.

    Every step starts 1 ms before its first kernel.
    """
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
    """Write traces of two steps per rank."""
    return [write_trace(folder / f"rank{rank}.json.gz", [*STEP, *later(STEP, 20)]) for rank in range(ranks)]


def milliseconds(seconds: pd.Series) -> list[float]:
    return (1e3 * seconds.astype(float)).tolist()


def test_a_correct_breakdown_agrees(tmp_path: Path) -> None:
    result = check_trial(*live(2, traces(tmp_path, 2)))
    assert result["rank"].tolist() == [0, 1]
    assert result["holds"].all()
    for name, expected in {"communication": 8.0, "hidden": 4.1, "exposed": 3.9}.items():
        assert milliseconds(result[f"{name}_trace_s"]) == pytest.approx([expected] * 2)
        assert milliseconds(result[f"{name}_live_s"]) == pytest.approx([expected] * 2)
        assert milliseconds(result[f"{name}_difference_s"]) == pytest.approx([0.0] * 2, abs=1e-6)
    assert milliseconds(result["uncovered_s"]) == pytest.approx([5.4] * 2)


def test_wire_time_is_the_shortest_duration_over_ranks(tmp_path: Path) -> None:
    spans = [("backward", 0.0, 1.0), (REDUCE, 1.0, 3.0), (REDUCE, 3.0, 7.0)]
    waiting = [("backward", 0.0, 1.0), (REDUCE, 0.5, 3.0), (REDUCE, 3.0, 7.0)]
    paths = [
        write_trace(tmp_path / f"rank{rank}.json.gz", [*step, *later(step, 20)])
        for rank, step in enumerate([spans, waiting, waiting])
    ]
    trial, buckets, steps = live(3, paths)
    result = check_trial(trial, buckets[buckets["bucket"] < 2], steps)
    assert milliseconds(result["wire_trace_s"]) == pytest.approx([6.0] * 3)
    assert milliseconds(result["wire_live_s"]) == pytest.approx([6.0] * 3)
    assert milliseconds(result["communication_trace_s"]) == pytest.approx([6.0, 6.5, 6.5])


def test_wire_time_requires_the_traces_of_all_ranks(tmp_path: Path) -> None:
    result = check_trial(*live(2, traces(tmp_path, 2)[1:]))
    assert result["rank"].tolist() == [1]
    assert result[["wire_trace_s", "wire_live_s"]].isna().all(axis=None)


@pytest.mark.parametrize(("late_ms", "holds"), [(0.19, True), (-0.19, True), (0.21, False), (-0.21, False)])
def test_a_breakdown_off_by_more_than_5_percent_disagrees(tmp_path: Path, late_ms: float, holds: bool) -> None:
    result = check_trial(*live(2, traces(tmp_path, 2), last_gradient_ms=10.1 + late_ms))
    assert result["holds"].tolist() == [holds] * 2
    # the last bucket is ready when the last gradient is, in both
    assert result["exposed_difference_share"].tolist() == pytest.approx([-late_ms / 3.9] * 2)


@pytest.mark.parametrize(("off_ms", "holds"), [(0.09, True), (0.11, False)])
def test_differences_up_to_a_tenth_of_a_millisecond_agree(off_ms: float, holds: bool) -> None:
    trace = pd.DataFrame({"communication_s": [0.002], "hidden_s": [0.002], "exposed_s": [0.0]})
    result = against_live(trace, trace.assign(exposed_s=off_ms / 1e3))
    assert (result["holds"], result["exposed_difference_share"]) == (holds, None)


def test_a_trace_with_another_file_name_is_an_error(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "first.json.gz", STEP)
    with pytest.raises(TraceError, match=r"rank<R>\.json\.gz"):
        check_trial(*live(2, [path]))


# ---------------------------------------------------------------------------------------------------- in the report


def traced_study(folder: Path, broken: bool = False) -> Path:
    """Write two trials, on one and two GPUs. The latter has buckets and traces of its last two steps."""
    write_study(folder)
    for size in (1, 2):
        fields = FIELDS | {"device": "cuda", "world_size": size}
        write_trial(folder, record(fields), steps(fields, 0.1))
    trial_folder = folder / "trials" / trial_id(fields)
    paths = traces(trial_folder / "traces", 2)
    _, buckets, stamps = live(2, paths)
    buckets.drop(columns="trial_id").to_parquet(trial_folder / "buckets.parquet")
    rows = [pd.read_parquet(trial_folder / "steps.parquet"), stamps.drop(columns="trial_id").assign(samples=32)]
    pd.concat(rows).astype({"rank": "int32", "step": "int32", "samples": "int32"}).to_parquet(
        trial_folder / "steps.parquet"
    )
    if broken:
        write_trace(trial_folder / "traces/rank1.json.gz", [("backward", 0.0, 1.0)])
    return folder


def test_the_table_has_one_row_per_trial_with_traces(tmp_path: Path) -> None:
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


def test_an_unusable_trace_is_a_row_with_its_problem(tmp_path: Path) -> None:
    directory = traced_study(tmp_path, broken=True)
    [row] = agreement(load(directory)).to_dict("records")
    assert row["holds"] is False
    assert "rank1.json.gz: " in row["problem"]
    assert "'nccl'" in row["problem"]
    [cells] = TABLES["trace"](with_models(analyse(load(directory)))).cells().to_dict("records")
    assert (cells["agree"], cells["problem"]) == ("no", row["problem"])


def test_traces_are_found_if_the_results_folder_is_a_uri(tmp_path: Path) -> None:
    results = load(f"file://{traced_study(tmp_path)}")
    assert all(path.startswith(f"file://{tmp_path}") for paths in results.trials["trace_paths"] for path in paths)
    assert agreement(results)["holds"].tolist() == [True, True]


@pytest.mark.usefixtures("no_figures")
def test_a_report_has_the_trace_section_only_with_traces(tmp_path: Path) -> None:
    with_traces = write_report(traced_study(tmp_path / "traced")).path
    write_study(tmp_path / "plain")
    write_trial(tmp_path / "plain", record(FIELDS), steps(FIELDS, 0.1))
    without_traces = write_report(tmp_path / "plain").path
    for name in ("index.html", "report.md"):
        assert "Communication breakdown: live vs. trace" in Path(with_traces).with_name(name).read_text()
        assert "Communication breakdown: live vs. trace" not in Path(without_traces).with_name(name).read_text()
    assert Path(with_traces).with_name("tables").joinpath("trace.csv").is_file()
    assert not Path(without_traces).with_name("tables").joinpath("trace.csv").exists()
