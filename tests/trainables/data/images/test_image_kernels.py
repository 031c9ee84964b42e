"""The GPU kernels for images, run by Triton's interpreter on the CPU and compared with torch's operations."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

RESIZE = """
import torch
from torch.nn.functional import interpolate
from trainables.data.images.gpu.kernels import resize_squares

torch.manual_seed(0)
cases = [
    ((37, 50), (6, 0, 37, 37)),
    ((50, 37), (3, 5, 30, 41)),
    ((20, 24), (2, 0, 20, 20)),
    ((130, 90), (0, 20, 90, 90)),
]
images = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size, _ in cases]
images.append(images[0].transpose(1, 2))  # not contiguous
boxes = [box for _, box in cases] + [(0, 6, 37, 37)]
squares = resize_squares(images, boxes, 32)
assert squares.shape == (5, 3, 32, 32) and squares.is_contiguous(memory_format=torch.channels_last)
for image, (x, y, width, height), square in zip(images, boxes, squares):
    part = image[None, :, y : y + height, x : x + width].float()
    expected = interpolate(part, size=(32, 32), mode="bilinear", antialias=True)[0]
    assert (expected - square.float()).abs().max() < 0.501  # up to rounding
print("equal")
"""

CROP = """
import torch
from trainables.data.images.gpu.kernels import crop

torch.manual_seed(0)
for layout in (torch.contiguous_format, torch.channels_last):
    images = torch.randint(0, 256, (4, 3, 20, 20), dtype=torch.uint8).contiguous(memory_format=layout)
    offsets, mirrored = torch.randint(4, (2, 4, 1)), torch.tensor([[True], [False], [True], [False]])
    crops = crop(images, offsets, mirrored, 17)
    for image, row, column, flip, cropped in zip(images, *offsets, mirrored, crops):
        expected = image[:, row : row + 17, column : column + 17]
        assert torch.equal(cropped, expected.flip(-1) if flip else expected)
    assert crops.is_contiguous(memory_format=torch.channels_last)
print("equal")
"""


@pytest.mark.parametrize("program", [RESIZE, CROP], ids=["resize", "crop"])
def test_kernels_match_torch(program: str) -> None:
    triton = pytest.importorskip("triton")
    if Version(triton.__version__) < Version("3.9") and program is RESIZE:
        pytest.skip("the interpreter of older Triton (3.6) fails on loop bounds with current numpy; its compiler works")
    process = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parent.parent.parent.parent.parent,
        check=False,
        capture_output=True,
        text=True,
    )
    assert process.stdout == "equal\n", process.stderr
