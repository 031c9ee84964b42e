"""Floating-point operations of a step, compared with counts by hand and from the literature."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from trainables.models.mlp import mlp
from trainables.registry import MODELS, SAMPLE_DATASETS, SEQUENCE_MODELS, load
from trainables.step.context import RankSetup, rank_context
from trainables.step.flops import counted_flops, step_flops
from trainables.trial import Trial


def test_operations_of_a_perceptron_match_a_count_by_hand() -> None:
    images = torch.zeros(16, 1, 28, 28, dtype=torch.uint8)
    first, second = 784 * 64, 64 * 10
    # the first layer's inputs need no gradient, so it has two products where the second has three
    assert step_flops(partial(mlp, 10, 1, 28), images, "mlp by hand", 28) == 2 * 16 * (2 * first + 3 * second)


def test_operations_of_resnet50_match_the_published_forward_pass() -> None:
    """The forward pass has 4.089 billion multiply-adds (torchvision, ResNet50_Weights: GFLOPS 4.09)."""
    build = partial(load(MODELS["resnet50"]), 1000, 3, 224)
    flops = step_flops(build, torch.zeros(2, 3, 224, 224), "resnet50", 224)
    first = 2 * 112 * 112 * 64 * 3 * 49  # the gradient with respect to the images is not computed
    assert flops == pytest.approx(2 * (3 * 2 * 4.089e9 - first), rel=1e-3)


@pytest.mark.parametrize("model", ["mlstm64", "transformer_tiny"])
def test_operations_of_data_parallel_are_those_of_all_its_replicas(model: str) -> None:
    trial = Trial(model=model, dataset="text_sample", batch_per_gpu=2, sequence_length=8)
    threads = Trial.model_construct(**trial.model_dump() | {"parallel": "dp", "world_size": 2})
    with rank_context(trial, RankSetup(0, torch.device("cpu"))) as context:
        on_one, on_two = (replace(context, trial=each, device=torch.device("cuda", 0)) for each in (trial, threads))
        tokens = torch.zeros(4, 8, dtype=torch.uint8)
        of_one, of_two = on_one.blueprint_flops((tokens[:2], None)), on_two.blueprint_flops((tokens, None))
        assert of_one and of_two == 2 * of_one
        of_one, of_two = (each.parts_of_flops()["causal_attention_flops"] for each in (on_one, on_two))
        assert (of_one is None and of_two is None) if model == "mlstm64" else of_one and of_two == 2 * of_one


@pytest.mark.parametrize("name", MODELS)
def test_operations_of_every_model_are_counted(name: str) -> None:
    if name in SEQUENCE_MODELS:
        dataset = SAMPLE_DATASETS[MODELS[name].reads]
        trial = Trial(model=name, dataset=dataset, batch_per_gpu=2, sequence_length=4)
        build = partial(load(MODELS[name]), MODELS[name].vocabulary or 256, trial)
        inputs = torch.zeros(2, 4, dtype=torch.uint8)
    else:
        edge = max(32, MODELS[name].smallest_image)
        build = partial(load(MODELS[name]), 10, 3, edge)
        inputs = torch.zeros(2, 3, edge, edge, dtype=torch.uint8)
    with torch.device("meta"):
        largest = max(parameter.numel() for parameter in build().parameters())
    assert (step_flops(build, inputs, name, inputs.shape[-1]) or 0) > largest


def test_images_cropped_on_the_device_are_counted_at_the_cropped_size() -> None:
    build = partial(load(MODELS["resnet18"]), 10, 3, 64)
    stored, trained = (step_flops(build, torch.zeros(2, 3, edge, edge), "resnet18 at 64", 64) for edge in (74, 64))
    assert stored == trained


def test_operations_that_are_not_counted_are_none_and_not_zero() -> None:
    weight = nn.Parameter(torch.ones(3))
    assert counted_flops(lambda: (weight * 2).sum()) is None


def test_a_compiled_model_is_counted_like_an_eager_one() -> None:
    model, inputs = nn.Linear(4, 2), torch.ones(3, 4)
    eager = counted_flops(lambda: model(inputs).sum())
    model.compile(backend="aot_eager")
    assert counted_flops(lambda: model(inputs).sum()) == eager == 2 * 2 * 3 * 4 * 2
