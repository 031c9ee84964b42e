"""The measured rate of matrix products, on the CPU."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from trainables.measure import matmul_limit
from trainables.measure.matmul_limit import KEPT_S, kept, matmul_limits, matmul_rate, product_in
from trainables.scratch import VARIABLE
from trainables.step.precision import bf16, fp16_master, fp32

CPU = torch.device("cpu")


def test_the_rate_is_that_of_one_product() -> None:
    rate = matmul_rate(lambda: time.sleep(0.004), 8e6, CPU, 0.1)
    assert 0.5 * 8e6 / 0.004 < rate < 8e6 / 0.004


def test_products_have_the_operations_of_their_edge_and_their_number_format() -> None:
    torch.manual_seed(0)
    products: dict[str, Any] = {kind: product_in(kind, 32, CPU)() for kind in ("fp32", "bf16", "fp16")}
    assert [value.shape for value in products.values()] == [(32, 32)] * 3
    assert [value.dtype for value in products.values()] == [torch.float32, torch.bfloat16, torch.float16]


def test_a_process_measures_each_number_format_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "scratch"))
    monkeypatch.setattr(matmul_limit, "EDGE", 64)
    monkeypatch.setattr(matmul_limit, "LIMIT_S", 0.01)
    monkeypatch.setattr(matmul_limit, "_MEASURED", {})
    first = matmul_limits(CPU, fp32)
    assert first.keys() == {"fp32"} and first["fp32"] > 0
    assert matmul_limits(CPU, bf16).keys() == {"bf16"} and matmul_limits(CPU, fp16_master).keys() == {"fp16"}
    assert matmul_limits(CPU, fp32) == first


def test_a_limit_is_measured_again_when_it_is_old_or_its_file_is_damaged(tmp_path: Path) -> None:
    path, measured = tmp_path / "limit.json", list[float]()

    def measure() -> float:
        measured.append(100.0 + len(measured))
        return measured[-1]

    assert [kept(path, measure), kept(path, measure)] == [100.0, 100.0]
    now_s = time.time()
    os.utime(path, (now_s, now_s - KEPT_S - 1))
    assert [kept(path, measure), kept(path, measure)] == [101.0, 101.0]
    for damage in (b"", b"{}", b"-5.0", b"\xff", b"Infinity"):
        path.write_bytes(damage)
        assert kept(path, measure) == measured[-1] == kept(path, measure)
    assert len(measured) == 7


def test_a_limit_is_not_read_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("5.0")
    (tmp_path / "limit.json").symlink_to(tmp_path / "other.json")
    assert kept(tmp_path / "limit.json", lambda: 7.0) == 7.0
    assert (tmp_path / "other.json").read_text() == "5.0"
