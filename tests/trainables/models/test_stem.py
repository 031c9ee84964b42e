"""The rewritten stem computes the same function and gradients as the original."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from tests.support.system import needs
from trainables.models.rewritten_stem.pooling import max_pool_backward
from trainables.models.rewritten_stem.stem import SpaceToDepthConv, rewrite_stem
from trainables.trial import Trial

POOLING = """
import torch
from torch.nn import functional
from trainables.models.rewritten_stem.pooling import WindowedMaxPool
from trainables.models.rewritten_stem.pooling_kernel import scatter

generator = torch.Generator().manual_seed(0)
for edges in ((8, 8), (14, 10), (7, 9), (1, 2)):
    # rounded, so that windows have several largest pixels
    images = torch.randn(3, 16, *edges, generator=generator).mul(4).round().div(4)
    images = images.contiguous(memory_format=torch.channels_last)
    mine, theirs = (images.clone().requires_grad_() for _ in range(2))
    pooled, expected = WindowedMaxPool()(mine), functional.max_pool2d(theirs, 3, 2, 1)
    gradient = torch.randn(expected.shape, generator=generator).contiguous(memory_format=torch.channels_last)
    (offsets,) = pooled.grad_fn.saved_tensors
    given = torch.empty_like(images)
    scatter(gradient, offsets.contiguous(memory_format=torch.channels_last), given)
    pooled.backward(gradient)
    expected.backward(gradient)
    assert torch.equal(pooled, expected), edges
    torch.testing.assert_close(mine.grad, theirs.grad)
    torch.testing.assert_close(given, theirs.grad)
print("equal")
"""


def test_the_pooling_kernel_computes_the_gradients_of_max_pooling() -> None:
    pytest.importorskip("triton")
    interpreted = os.environ | {"TRITON_INTERPRET": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", POOLING],
        env=interpreted,
        cwd=Path(__file__).parent.parent.parent.parent,
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.stdout == "equal\n", ended.stderr


def test_the_pooling_operator_matches_its_fake_implementation() -> None:
    offsets = torch.randint(0, 9, (2, 4, 5, 6), dtype=torch.uint8)
    offsets[:, :, 0], offsets[:, :, :, 0] = 4, 4  # windows at the edge have pixels outside
    torch.library.opcheck(max_pool_backward, (torch.randn(2, 4, 5, 6), offsets, 10, 12))


@pytest.mark.parametrize("channels", [1, 3])
def test_space_to_depth_convolution_equals_the_plain_one(channels: int) -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(channels, 8, kernel_size=7, stride=2, padding=3, bias=False, dtype=torch.float64)
    images = torch.randn(2, channels, 20, 14, dtype=torch.float64)
    rewritten = SpaceToDepthConv(plain)
    gradient = torch.randn(2, 8, 10, 7, dtype=torch.float64)
    (expected,) = torch.autograd.grad(plain(images), plain.weight, gradient)
    (found,) = torch.autograd.grad(rewritten(images), plain.weight, gradient)
    torch.testing.assert_close(rewritten(images), plain(images))
    torch.testing.assert_close(found, expected)
    assert list(rewritten.state_dict()) == ["weight"]


@needs("g++")
def test_a_compiled_rewritten_stem_has_the_gradients_of_the_plain_one() -> None:
    """Uses only the part of a ResNet that the compiler fuses with the stem."""

    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv1 = nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False)
            self.norm = nn.BatchNorm2d(64)
            self.maxpool: nn.Module = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
            self.conv2 = nn.Conv2d(64, 64, kernel_size=3, padding=1, bias=False)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            pooled = self.maxpool(self.norm(self.conv1(images)).relu())
            return (self.conv2(pooled) + pooled).square().mean()

    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    images = images.contiguous(memory_format=torch.channels_last)
    plain, rewritten = (Stem().to(memory_format=torch.channels_last) for _ in range(2))
    rewrite_stem(rewritten)
    rewritten.compile()
    plain(images).backward()
    rewritten(images).backward()
    for (name, expected), (found_name, found) in zip(
        plain.named_parameters(), rewritten.named_parameters(), strict=True
    ):
        assert name == found_name
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-6)


def test_a_rewritten_stem_requires_a_compiled_resnet() -> None:
    resnet = Trial(model="resnet50", dataset="synthetic", image_size=224, device="cuda", execution="compile")
    assert resnet.but(rewritten_stem=True).rewritten_stem
    for changes in ({"execution": "eager"}, {"model": "vgg19"}, {"image_size": 225}):
        with pytest.raises(ValidationError, match="rewritten_stem requires"):
            resnet.but(rewritten_stem=True, **changes)
