"""The kernels for images on a GPU, run by Triton's interpreter on the CPU, against torch's own operations."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

RESIZED = """
import torch
from torch.nn.functional import interpolate
from trainables.data.images.gpu.kernels import resized_squares

torch.manual_seed(0)
cases = [((37, 50), (6, 0, 37, 37)), ((50, 37), (3, 5, 30, 41)), ((20, 24), (2, 0, 20, 20)), ((130, 90), (0, 20, 90, 90))]
images = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size, _ in cases]
images.append(images[0].transpose(1, 2))  # not in one piece
boxes = [box for _, box in cases] + [(0, 6, 37, 37)]
found = resized_squares(images, boxes, 32)
assert found.shape == (5, 3, 32, 32) and found.is_contiguous(memory_format=torch.channels_last)
for image, (x, y, width, height), square in zip(images, boxes, found):
    part = image[None, :, y : y + height, x : x + width].float()
    expected = interpolate(part, size=(32, 32), mode="bilinear", antialias=True)[0]
    assert (expected - square.float()).abs().max() < 0.501  # rounded
print("equal")
"""

CROPPED = """
import torch
from trainables.data.images.gpu.kernels import cropped

torch.manual_seed(0)
for layout in (torch.contiguous_format, torch.channels_last):
    images = torch.randint(0, 256, (4, 3, 20, 20), dtype=torch.uint8).contiguous(memory_format=layout)
    places, mirrored = torch.randint(4, (2, 4, 1)), torch.tensor([[True], [False], [True], [False]])
    found = cropped(images, places, mirrored, 17)
    for image, row, column, flip, crop in zip(images, *places, mirrored, found):
        expected = image[:, row : row + 17, column : column + 17]
        assert torch.equal(crop, expected.flip(-1) if flip else expected)
    assert found.is_contiguous(memory_format=torch.channels_last)
print("equal")
"""


@pytest.mark.parametrize("program", [RESIZED, CROPPED], ids=["resized", "cropped"])
def test_images_of_unlike_sizes_are_resized_and_cropped_as_torch_does_it(program: str) -> None:
    triton = pytest.importorskip("triton")
    if Version(triton.__version__) < Version("3.9") and program is RESIZED:
        pytest.skip(
            "the interpreter of older Triton (3.6) cannot read a loop's bound with today's numpy; its compiler can"
        )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parent.parent.parent.parent.parent,
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.stdout == "equal\n", ended.stderr
