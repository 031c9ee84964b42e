"""Collectives of hand-made traces: rows, buckets, and what was hidden."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from trainables.measure.collectives import BOUNDARY, TraceRows, kernel_seconds, read_trace, trace_rows
from trainables.probe.session import rank_tables


def event(name: str, category: str, start: float, duration: float, **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": duration, "args": arguments}


def kernel(
    name: str, correlation: int, issued: float, start: float, duration: float, **more: Any
) -> list[dict[str, Any]]:
    launch = event("cudaLaunchKernel", "cuda_runtime", issued, 1.0, correlation=correlation)
    return [launch, event(name, "kernel", start, duration, correlation=correlation, **more)]


NCCL = {
    "Collective name": "allreduce",
    "dtype": "Float",
    "In msg nelems": 1000,
    "Group size": 2,
    "Process Group Name": "0",
}
BACKWARD = "autograd::engine::evaluate_function: AddmmBackward0"


def rows_of(events: list[dict[str, Any]], rank: int, step: int) -> TraceRows:
    content = gzip.compress(json.dumps({"traceEvents": events}).encode())
    return trace_rows(read_trace(content), rank, [step], "communication")


OF_DDP = [
    event(BOUNDARY, "user_annotation", 1000.0, 1.0),
    event(BOUNDARY, "user_annotation", 1400.0, 1.0),
    *kernel("previous_step", 1, 900.0, 950.0, 150.0),  # the device reaches the step at 1100
    event(BACKWARD, "cpu_op", 1010.0, 200.0),
    *kernel("gemm", 2, 1020.0, 1100.0, 100.0),  # until 1200
    *kernel("ncclDevKernel_AllReduce", 3, 1030.0, 1210.0, 190.0, **NCCL),  # until 1400
    *kernel("gemm", 4, 1040.0, 1200.0, 100.0),  # until 1300
    *kernel("ncclDevKernel_AllReduce", 5, 1150.0, 1400.0, 50.0, **NCCL),  # until 1450
    *kernel("adam", 6, 1300.0, 1450.0, 20.0),
]
"""a step with two buckets, whose first one is hidden in part"""


def test_the_time_of_kernels_is_that_without_collectives_and_copies_to_the_device() -> None:
    copies = [
        event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 1500.0, 70.0),
        event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 1460.0, 30.0),  # 10 of it while adam runs
    ]
    assert kernel_seconds([*OF_DDP, *copies]) == pytest.approx((150 + 200 + 20 + 20) * 1e-6)
    assert kernel_seconds([event(BACKWARD, "cpu_op", 0.0, 5.0)]) is None


def test_nccl_kernels_become_buckets_with_the_time_at_which_the_device_was_ready() -> None:
    found = rows_of(OF_DDP, 1, 7)
    assert found.totals[7]["kernels_s"] == pytest.approx(220e-6), "without collectives and the previous step"
    times = [(row["step"], row["bytes"], row["ready_s"], row["end_s"]) for row in found.buckets]
    assert times == [
        (7, 4000, pytest.approx(100e-6), pytest.approx(300e-6)),
        (7, 4000, pytest.approx(200e-6), pytest.approx(350e-6)),
    ]
    assert found.last_gradients_s == {7: pytest.approx(200e-6)}
    assert [row["hidden_s"] for row in found.collectives] == [pytest.approx(90e-6), 0.0]
    assert [(row["operation"], row["group"], row["group_size"], row["collective"]) for row in found.collectives] == [
        ("allreduce", "0", 2, 0),
        ("allreduce", "0", 2, 1),
    ]


def test_traced_steps_of_scripts_have_kernel_times_and_totals_of_collectives_only_without_buckets(
    tmp_path: Path,
) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": OF_DDP}))
    windows = {6: "plain", 7: "communication"}
    rows = [{"window": name, "step": step, "samples": 8, "step_s": 4e-4} for step, name in windows.items()]
    found = rank_tables({"rows": rows}, 1, set(), file, keep_trace=False)
    plain, traced = found.tables["steps"]
    assert len(found.tables["buckets"]) == 2
    assert traced["kernels_s"] == pytest.approx(220e-6)
    assert "collectives_s" not in traced
    assert "kernels_s" not in plain


def test_other_collectives_in_the_backward_pass_leave_no_buckets() -> None:
    scatter = NCCL | {"Collective name": "_reduce_scatter_base"}
    events = [
        event(BOUNDARY, "user_annotation", 0.0, 1.0),
        event(BACKWARD, "cpu_op", 10.0, 20.0),
        *kernel("gemm", 1, 11.0, 20.0, 10.0),
        *kernel("ncclDevKernel_ReduceScatter", 2, 15.0, 30.0, 10.0, **scatter),
        event(BOUNDARY, "user_annotation", 100.0, 1.0),
    ]
    found = rows_of(events, 0, 3)
    assert found.buckets == []
    assert [row["operation"] for row in found.collectives] == ["reduce_scatter_base"]
