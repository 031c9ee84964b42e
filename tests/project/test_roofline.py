"""The roofline's arithmetic, on operators as a profiler records them."""

from typing import Any

import pytest
import torch

from benchmarks.speed.roofline import LANGUAGE_MODEL, STEPS, as_markdown, class_of, needs, roofline
from trainables.trial import Trial

BF16 = "c10::BFloat16"
TRIAL = Trial(model="resnet18", dataset="synthetic", image_size=64)


def operator(name: str, dims: list[Any], types: list[str], **arguments: Any) -> dict[str, Any]:
    recorded = {"Input Dims": dims, "Input type": types, "External id": 7, **arguments}
    return {"name": name, "cat": "cpu_op", "args": recorded}


CONVOLUTION = operator(
    "aten::cudnn_convolution",
    [[8, 64, 56, 56], [128, 64, 3, 3], [], [], []],
    [BF16, BF16, "ScalarList", "ScalarList", "ScalarList"],
    **{"Concrete Inputs": ["", "", "[1, 1]", "[2, 2]", "[1, 1]"]},
)
FORWARD_FLOPS = 2 * 8 * 128 * 28 * 28 * 64 * 9
IMAGE, WEIGHT, RESULT = 2 * 8 * 64 * 56 * 56, 2 * 128 * 64 * 9, 2 * 8 * 128 * 28 * 28


def test_flops_and_bytes_of_a_convolution() -> None:
    assert needs(CONVOLUTION) == (FORWARD_FLOPS, IMAGE + WEIGHT + RESULT)


def test_gradients_of_a_convolution_are_two_convolutions_or_one_in_the_first_layer() -> None:
    shapes: list[Any] = [[8, 128, 28, 28], [8, 64, 56, 56], [128, 64, 3, 3]]
    backward = operator("aten::convolution_backward", shapes, [BF16] * 3)
    assert needs(backward) == (2 * FORWARD_FLOPS, 2 * RESULT + 2 * IMAGE + 2 * WEIGHT)
    shapes = [[8, 128, 28, 28], [8, 3, 56, 56], [128, 3, 3, 3]]
    first = operator("aten::convolution_backward", shapes, [BF16] * 3)
    assert needs(first) == (2 * 8 * 128 * 28 * 28 * 27, RESULT + 2 * 8 * 3 * 56 * 56 + 2 * 2 * 128 * 27)


def test_flops_and_bytes_of_matrix_products_and_elementwise_operators() -> None:
    assert needs(operator("aten::addmm", [[5], [2, 3], [3, 5]], ["float"] * 3)) == (60, 4 * (5 + 6 + 15 + 10))
    assert needs(operator("aten::add", [[10], [10]], ["float"] * 2)) == (0, 120)
    assert needs(operator("triton_poi_fused_relu_0", [[10], [10], []], [BF16, BF16, "Scalar"])) == (0, 40)
    weights: list[Any] = [[[10], [20]], [[10], [20]]]
    assert needs(operator("aten::_fused_sgd_", weights, ["TensorList"] * 2)) == (0, 240)
    assert needs(operator("aten::empty", [[]], ["ScalarList"])) == (0, 0)


def test_flops_and_bytes_of_causal_attention() -> None:
    """Two products forward, five backward; the causal half is a product of half the size."""
    shape, size = [4, 12, 1024, 64], 2 * 4 * 12 * 1024 * 64
    forward = operator("aten::_scaled_dot_product_flash_attention", [shape] * 3, [BF16] * 3)
    assert needs(forward) == (2 * 4 * 12 * 1024 * 1024 * 64, 4 * size)
    backward = operator("aten::_scaled_dot_product_cudnn_attention_backward", [shape] * 5, [BF16] * 5)
    assert needs(backward) == (5 * 4 * 12 * 1024 * 1024 * 64, 8 * size)
    flash = operator("aten::_flash_attention_forward", [[4, 1024, 12, 64]] * 3, [BF16] * 3)
    assert needs(flash) == needs(forward)


def test_kernels_of_one_operator_share_its_flops_by_their_time() -> None:
    kernels = [
        {"name": name, "cat": "kernel", "dur": micros, "args": {"External id": 7}}
        for name, micros in (("sm90_xmma_fprop", 30.0), ("nchwToNhwc", 10.0))
    ]
    table = roofline([CONVOLUTION, *kernels * STEPS], torch.device("cpu"), TRIAL)
    first, second = table["kernels"]
    assert (first["kernel"], first["calls"], first["seconds"]) == ("sm90_xmma_fprop", 1.0, pytest.approx(30e-6))
    # three steps of both kernels would be three calls of the operator; this trace has one
    assert first["flops"] + second["flops"] == pytest.approx(FORWARD_FLOPS / STEPS)
    assert first["flops"] == pytest.approx(3 * second["flops"])
    assert table["total"]["seconds"] == pytest.approx(40e-6)
    assert table["total"]["floor_s"] is None, "the peak of a CPU is unknown"
    assert "| sm90_xmma_fprop | 1 | 0.030 | 75.0 |" in as_markdown("eager:8", table)


@pytest.mark.parametrize(
    ("kernel", "launched_by", "expected"),
    [
        ("sm90_xmma_wgrad_implicit_gemm", "aten::convolution_backward", "convolution"),
        ("cudnn::bn_fw_tr_1C11_kernel_NHWC", "aten::cudnn_batch_norm", "normalisation"),
        ("triton_red_fused__native_batch_norm_3", "triton_red_fused", "compiled, elementwise and reductions"),
        ("nvjet_hsh_128x256", "aten::addmm", "matrix product"),
        ("vectorized_elementwise_kernel", "aten::clamp_min_", "elementwise"),
        ("ncclDevKernel_AllReduce_Sum_f32", "", "communication"),
    ],
)
def test_kernels_are_classified_by_purpose(kernel: str, launched_by: str, expected: str) -> None:
    assert class_of(kernel, launched_by) == expected


@pytest.mark.parametrize(
    ("kernel", "launched_by", "expected"),
    [
        ("nvjet_hsh_128x256", "aten::mm [[65536, 768], [768, 50304]]", "output layer and loss"),
        ("sm90_xmma_gemm_bf16", "aten::mm [[65536, 768], [768, 2304]]", "matrix product"),
        ("multi_tensor_apply_kernel", "aten::_fused_adamw_ [[[50304, 768]], []]", "optimizer"),
        ("triton_red_fused__log_softmax_1", "triton_red_fused", "output layer and loss"),
        ("triton_per_fused_add_native_layer_norm_2", "triton_per_fused", "layer normalisation"),
        ("cudnn_generated_fort_native_sdpa_sm90", "aten::_cudnn_attention_forward", "attention"),
        ("triton_poi_fused__to_copy_0", "triton_poi_fused", "compiled, elementwise and reductions"),
    ],
)
def test_kernels_of_a_language_model_are_classified_by_layer(kernel: str, launched_by: str, expected: str) -> None:
    assert class_of(kernel, launched_by, LANGUAGE_MODEL) == expected
