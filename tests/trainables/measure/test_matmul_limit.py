"""The measured rate of matrix products, on the CPU."""

import time
from typing import Any

import pytest
import torch

from trainables.measure import matmul_limit
from trainables.measure.matmul_limit import matmul_limits, matmul_rate, product_in
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


def test_a_process_measures_each_number_format_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_limit, "EDGE", 64)
    monkeypatch.setattr(matmul_limit, "LIMIT_S", 0.01)
    monkeypatch.setattr(matmul_limit, "_MEASURED", {})
    first = matmul_limits(CPU, fp32)
    assert first.keys() == {"fp32"} and first["fp32"] > 0
    assert matmul_limits(CPU, bf16).keys() == {"bf16"} and matmul_limits(CPU, fp16_master).keys() == {"fp16"}
    assert matmul_limits(CPU, fp32) == first
