"""Images on a GPU in one pass each, where torch has rows of kernels, which take the GPU from the training step beside them.

ResNet-50 from raw pixels reached 0.975 of synthetic data with those, 0.985 with these (one H200, `benchmarks/results/storage`
and `storage-gpu`).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

PIXELS = 256
"""that a program makes"""

COLUMNS = tl.constexpr(7)
"""of the table of images: address, height and width, and x, y, width and height of what to take"""


def resized_squares(
    images: Sequence[torch.Tensor], boxes: Sequence[tuple[int, int, int, int]], side: int
) -> torch.Tensor:
    """The box (x, y, width, height) of each image uint8 [3, h, w], as uint8 [n, 3, side, side] in channels_last.

    Bilinear with antialiasing, a triangle filter as wide as the scale: `torch.nn.functional.interpolate` gives the same but
    for the rounding. Each image may have a size of its own.
    """
    images = [image.contiguous() for image in images]
    device = images[0].device
    facts = [[image.data_ptr(), *image.shape[1:], *box] for image, box in zip(images, boxes, strict=True)]
    table = torch.tensor(facts)
    if device.type == "cuda":  # from pageable memory the copy would wait for the device
        table = table.pin_memory().to(device, non_blocking=True)
    squares = torch.empty((len(images), side, side, 3), dtype=torch.uint8, device=device)
    taps_along, taps_down = (max(_most_taps(box[axis], side) for box in boxes) for axis in (2, 3))
    _resize[(len(images), triton.cdiv(side * side, PIXELS))](table, squares, side, taps_down, taps_along, PIXELS)
    return squares.permute(0, 3, 1, 2)


def cropped(images: torch.Tensor, places: torch.Tensor, mirrored: torch.Tensor, size: int) -> torch.Tensor:
    """Of each image uint8 [n, c, h, w] the size x size pixels below and right of (row, column), mirrored or not.

    `places` is int64 [2, n], `mirrored` bool [n]. Gives uint8 [n, c, size, size] in channels_last.
    """
    n, channels = images.shape[:2]
    made = torch.empty((n, size, size, channels), dtype=torch.uint8, device=images.device)
    grid = (n, triton.cdiv(size * size, PIXELS))
    _crop[grid](images, *images.stride(), places, mirrored, n, made, size, channels, PIXELS)
    return made.permute(0, 3, 1, 2)


def _most_taps(length: int, side: int) -> int:
    """How many of `length` pixels one of `side` may see: those whose centres lie within twice its reach."""
    return int(2 * max(length / side, 1.0)) + 2


@triton.jit
def _resize(table, squares, side, taps_down, taps_along, PIXELS: tl.constexpr):  # type: ignore[no-untyped-def]
    image = tl.program_id(0)
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    exists = pixel < side * side
    facts = table + image * COLUMNS
    start = tl.load(facts).to(tl.pointer_type(tl.uint8))
    height, width = tl.load(facts + 1).to(tl.int32), tl.load(facts + 2).to(tl.int32)
    x, y = tl.load(facts + 3).to(tl.int32), tl.load(facts + 4).to(tl.int32)
    along, down = tl.load(facts + 5).to(tl.int32), tl.load(facts + 6).to(tl.int32)
    first_row, rows, row_centre, row_reach = _seen(pixel // side, down, side)
    first_column, columns, column_centre, column_reach = _seen(pixel % side, along, side)
    red = tl.zeros((PIXELS,), tl.float32)
    green = tl.zeros((PIXELS,), tl.float32)
    blue = tl.zeros((PIXELS,), tl.float32)
    total = tl.zeros((PIXELS,), tl.float32)
    for i in range(taps_down):
        row = first_row + i
        weight_down = _weight(row, row_centre, row_reach)
        for j in range(taps_along):
            column = first_column + j
            inside = exists & (i < rows) & (j < columns)
            weight = tl.where(inside, weight_down * _weight(column, column_centre, column_reach), 0.0)
            place = start + (y + row) * width + x + column
            red += weight * tl.load(place, inside, 0).to(tl.float32)
            green += weight * tl.load(place + height * width, inside, 0).to(tl.float32)
            blue += weight * tl.load(place + 2 * height * width, inside, 0).to(tl.float32)
            total += weight
    made = squares + (image.to(tl.int64) * side * side + pixel) * 3
    tl.store(made, (red / total + 0.5).to(tl.uint8), exists)
    tl.store(made + 1, (green / total + 0.5).to(tl.uint8), exists)
    tl.store(made + 2, (blue / total + 0.5).to(tl.uint8), exists)


@triton.jit
def _seen(place, length, side):  # type: ignore[no-untyped-def]
    """Of `length` pixels the first that pixel `place` of `side` sees, and how many; where its centre lies; how far it sees."""
    scale = length.to(tl.float32) / side
    reach = tl.maximum(scale, 1.0)
    centre = scale * (place.to(tl.float32) + 0.5)
    first = tl.maximum((centre - reach + 0.5).to(tl.int32), 0)
    last = tl.minimum((centre + reach + 0.5).to(tl.int32), length)
    return first, last - first, centre, reach


@triton.jit
def _weight(place, centre, reach):  # type: ignore[no-untyped-def]
    return tl.maximum(1.0 - tl.abs(place.to(tl.float32) + 0.5 - centre) / reach, 0.0)


@triton.jit
def _crop(  # type: ignore[no-untyped-def]
    images, image_stride, channel_stride, row_stride, column_stride, places, mirrored, n, made, size,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0)
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    exists = pixel < size * size
    row, column = pixel // size, pixel % size
    column = tl.where(tl.load(mirrored + image), size - 1 - column, column)
    row += tl.load(places + image).to(tl.int32)
    column += tl.load(places + n + image).to(tl.int32)
    read = images + image.to(tl.int64) * image_stride + row * row_stride + column * column_stride
    write = made + (image.to(tl.int64) * size * size + pixel) * CHANNELS
    for channel in tl.static_range(CHANNELS):
        tl.store(write + channel, tl.load(read + channel * channel_stride, exists, 0), exists)
