"""The rewritten stem: what it computes is what the plain one computes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from trainables.models.stem import SpaceToDepthConv
from trainables.requirements import unmet
from trainables.trial import Trial

POOLING = """
import torch
from torch.nn import functional
from trainables.models.pooling import WindowedMaxPool

generator = torch.Generator().manual_seed(0)
for edges in ((8, 8), (14, 10), (7, 9), (1, 2)):
    # rounded, so that windows have several largest pixels
    images = torch.randn(3, 16, *edges, generator=generator).mul(4).round().div(4)
    images = images.contiguous(memory_format=torch.channels_last)
    mine, theirs = (images.clone().requires_grad_() for _ in range(2))
    pooled, expected = WindowedMaxPool()(mine), functional.max_pool2d(theirs, 3, 2, 1)
    gradient = torch.randn(expected.shape, generator=generator)
    pooled.backward(gradient)
    expected.backward(gradient)
    assert torch.equal(pooled, expected), edges
    torch.testing.assert_close(mine.grad, theirs.grad, msg=str(edges))
print("equal")
"""


def test_the_pooling_kernel_gives_the_gradients_of_max_pooling_ties_and_odd_edges_included() -> None:
    pytest.importorskip("triton")
    interpreted = os.environ | {"TRITON_INTERPRET": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", POOLING],
        env=interpreted,
        cwd=Path(__file__).parent.parent,
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.stdout == "equal\n", ended.stderr


@pytest.mark.parametrize("channels", [1, 3])
def test_the_first_convolution_by_cells_of_2x2_pixels_has_the_plain_ones_outputs_and_gradients(channels: int) -> None:
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


def test_a_rewritten_stem_is_for_compiled_resnets_on_gpus() -> None:
    resnet = Trial(model="resnet50", dataset="synthetic", image_size=224, device="cuda", execution="compile")
    assert unmet(resnet.but(rewritten_stem=True)) is None
    assert unmet(resnet.but(rewritten_stem=True, device="cpu")) == (
        "rewritten_stem needs GPUs: its pooling is a kernel of theirs"
    )
    with pytest.raises(ValidationError, match="is slower where no compiler fuses its parts; execution is 'eager'"):
        resnet.but(rewritten_stem=True, execution="eager")
    with pytest.raises(ValidationError, match="for models resnet18 and resnet50 on images of an even edge"):
        resnet.but(rewritten_stem=True, model="vgg19")
    with pytest.raises(ValidationError, match="this is model 'resnet50' at 225 pixels"):
        resnet.but(rewritten_stem=True, image_size=225)
