"""Models of the registry: logits of the asked shape, from images of any number of channels."""

import pytest
import torch

from trainables.registry import MODELS, SMALLEST_IMAGES, load
from trainables.trial import Trial


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_logits_for_the_smallest_image_that_a_trial_may_have(name: str, channels: int) -> None:
    size = SMALLEST_IMAGES.get(name, 8)
    assert Trial(model=name, image_size=size).image_size == size
    with torch.device("meta"):
        model = load(MODELS[name])(10, channels, size)
        assert model(torch.empty(2, channels, size, size)).shape == (2, 10)


def test_most_of_vgg19_is_its_first_linear_layer() -> None:
    with torch.device("meta"):
        model = load(MODELS["vgg19"])(1000, 3, 224)
    sizes = sorted(parameter.numel() for parameter in model.parameters())
    assert sum(sizes) == 143_667_240  # table 2 of the paper: 144 million
    assert sizes[-1] == 7 * 7 * 512 * 4096
