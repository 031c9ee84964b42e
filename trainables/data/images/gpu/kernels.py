"""Resize and crop images on a GPU with one kernel each.

torch needs several kernels, which take more GPU time from the concurrent training step. ResNet-50 from raw pixels
reached 0.975 of synthetic data's throughput with torch's kernels, 0.985 with these (one H200,
`benchmarks/results/storage` and `storage-gpu`).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

PIXELS = 256
"""output pixels per program"""

COLUMNS = tl.constexpr(7)
"""of the table of images: address, height, width, and x, y, width and height of the box"""


def resize_squares(
    images: Sequence[torch.Tensor], boxes: Sequence[tuple[int, int, int, int]], side: int
) -> torch.Tensor:
    """Resize the box (x, y, width, height) of each image uint8 [3, h, w] to uint8 [n, 3, side, side] in channels_last.

    Images may differ in size. Bilinear with antialiasing: a triangle filter as wide as the scale. Equals
    `torch.nn.functional.interpolate` up to rounding.
    """
    images = [image.contiguous() for image in images]
    device = images[0].device
    rows = [[image.data_ptr(), *image.shape[1:], *box] for image, box in zip(images, boxes, strict=True)]
    table = torch.tensor(rows)
    if device.type == "cuda":  # a copy from pageable memory would wait for the device
        table = table.pin_memory().to(device, non_blocking=True)
    squares = torch.empty((len(images), side, side, 3), dtype=torch.uint8, device=device)
    taps_along, taps_down = (max(_max_taps(box[axis], side) for box in boxes) for axis in (2, 3))
    _resize[(len(images), triton.cdiv(side * side, PIXELS))](table, squares, side, taps_down, taps_along, PIXELS)
    return squares.permute(0, 3, 1, 2)


def crop(images: torch.Tensor, offsets: torch.Tensor, mirrored: torch.Tensor, size: int) -> torch.Tensor:
    """Crop each image uint8 [n, c, h, w] to size x size pixels from its offset (row, column), and mirror some of them.

    `offsets` is int64 [2, n], `mirrored` bool [n]. Returns uint8 [n, c, size, size] in channels_last.
    """
    n, channels = images.shape[:2]
    crops = torch.empty((n, size, size, channels), dtype=torch.uint8, device=images.device)
    grid = (n, triton.cdiv(size * size, PIXELS))
    _crop[grid](images, *images.stride(), offsets, mirrored, n, crops, size, channels, PIXELS)
    return crops.permute(0, 3, 1, 2)


def _max_taps(length: int, side: int) -> int:
    """Return an upper bound of the input pixels per output pixel, when `length` pixels are resized to `side`.

    Their centres lie within the filter's width, twice its reach.
    """
    return int(2 * max(length / side, 1.0)) + 2


@triton.jit
def _resize(table, squares, side, taps_down, taps_along, PIXELS: tl.constexpr):  # type: ignore[no-untyped-def]
    image = tl.program_id(0)
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    exists = pixel < side * side
    entry = table + image * COLUMNS
    start = tl.load(entry).to(tl.pointer_type(tl.uint8))
    height, width = tl.load(entry + 1).to(tl.int32), tl.load(entry + 2).to(tl.int32)
    x, y = tl.load(entry + 3).to(tl.int32), tl.load(entry + 4).to(tl.int32)
    along, down = tl.load(entry + 5).to(tl.int32), tl.load(entry + 6).to(tl.int32)
    first_row, rows, row_centre, row_reach = _taps(pixel // side, down, side)
    first_column, columns, column_centre, column_reach = _taps(pixel % side, along, side)
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
            address = start + (y + row) * width + x + column
            red += weight * tl.load(address, inside, 0).to(tl.float32)
            green += weight * tl.load(address + height * width, inside, 0).to(tl.float32)
            blue += weight * tl.load(address + 2 * height * width, inside, 0).to(tl.float32)
            total += weight
    output = squares + (image.to(tl.int64) * side * side + pixel) * 3
    tl.store(output, (red / total + 0.5).to(tl.uint8), exists)
    tl.store(output + 1, (green / total + 0.5).to(tl.uint8), exists)
    tl.store(output + 2, (blue / total + 0.5).to(tl.uint8), exists)


@triton.jit
def _taps(position, length, side):  # type: ignore[no-untyped-def]
    """Return the filter of output pixel `position` when `length` input pixels are resized to `side`.

    The values are the first input pixel, the number of input pixels, the filter's centre and its reach.
    """
    scale = length.to(tl.float32) / side
    reach = tl.maximum(scale, 1.0)
    centre = scale * (position.to(tl.float32) + 0.5)
    first = tl.maximum((centre - reach + 0.5).to(tl.int32), 0)
    last = tl.minimum((centre + reach + 0.5).to(tl.int32), length)
    return first, last - first, centre, reach


@triton.jit
def _weight(position, centre, reach):  # type: ignore[no-untyped-def]
    return tl.maximum(1.0 - tl.abs(position.to(tl.float32) + 0.5 - centre) / reach, 0.0)


@triton.jit
def _crop(  # type: ignore[no-untyped-def]
    images, image_stride, channel_stride, row_stride, column_stride, offsets, mirrored, n, crops, size,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0)
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    exists = pixel < size * size
    row, column = pixel // size, pixel % size
    column = tl.where(tl.load(mirrored + image), size - 1 - column, column)
    row += tl.load(offsets + image).to(tl.int32)
    column += tl.load(offsets + n + image).to(tl.int32)
    source = images + image.to(tl.int64) * image_stride + row * row_stride + column * column_stride
    target = crops + (image.to(tl.int64) * size * size + pixel) * CHANNELS
    for channel in tl.static_range(CHANNELS):
        tl.store(target + channel, tl.load(source + channel * channel_stride, exists, 0), exists)
