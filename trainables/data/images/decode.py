"""Decode images to squares of pixels: one geometry, three decoders.

A decoder is a function `(contents, regions, side, device) -> uint8 [n, 3, side, side]`. It decodes n encoded images,
cuts the region out of each, and resizes it to `side` x `side` (bilinear with antialiasing). PIL and torchvision run on
the CPU in the calling process; nvjpeg runs on the rank's device. Grey images become RGB, 16-bit images keep their upper
8 bits, and EXIF orientation is ignored.
"""

import warnings
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch.nn.functional import interpolate
from torchvision.io import ImageReadMode, decode_image

from trainables.data.images.gpu.jpeg import decode_jpegs
from trainables.data.source import DataError
from trainables.messages import one_line

Box = tuple[int, int, int, int]
"""x, y, width, height in pixels"""

Region = Callable[[int, int], Box]
"""(width, height) of an image -> the box to cut out"""

START_OF_SCAN = 0xDA
"""the last marker before the pixels of a JPEG file"""


class DecodeError(Exception):
    """An image cannot be decoded. `position` is its position in the batch."""

    def __init__(self, position: int, problem: str) -> None:
        super().__init__(problem)
        self.position = position


def centre_square(width: int, height: int) -> Box:
    """Return the largest centred square. Resizing it equals resizing the short side and then cropping the centre."""
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


def pil(contents: Sequence[Any], regions: Sequence[Region], side: int, device: torch.device) -> torch.Tensor:
    """Decode with Pillow, one image at a time, to memory in channels_last. Raises DecodeError."""
    pixels = np.empty((len(contents), side, side, 3), dtype=np.uint8)
    for position, (content, region) in enumerate(zip(contents, regions, strict=True)):
        try:
            pixels[position] = pil_square(content, region, side)
        except Exception as error:  # a damaged file raises nearly anything
            raise DecodeError(position, reason(error)) from error
    return torch.from_numpy(pixels).permute(0, 3, 1, 2)


def pil_square(content: Any, region: Region, side: int) -> np.ndarray:
    """Decode one image with Pillow, and return its region as uint8 [side, side, 3]."""
    with Image.open(BytesIO(content)) as image:
        return resize_region(_as_rgb(image), region, side)


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # Pillow would clip all values to 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image if image.mode == "RGB" else image.convert("RGB")


def resize_region(image: Image.Image, region: Region, side: int) -> np.ndarray:
    """Resize a region of an RGB image to uint8 [side, side, 3]."""
    x, y, width, height = region(*image.size)
    return np.asarray(image.resize((side, side), Image.Resampling.BILINEAR, box=(x, y, x + width, y + height)))


def torchvision(contents: Sequence[Any], regions: Sequence[Region], side: int, device: torch.device) -> torch.Tensor:
    """Decode with torchvision (libjpeg-turbo) and resize with torch, one image at a time. Raises DecodeError."""
    pixels = torch.empty((len(contents), 3, side, side), dtype=torch.uint8, memory_format=torch.channels_last)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torchvision.io will be replaced by TorchCodec
        for position, (content, region) in enumerate(zip(contents, regions, strict=True)):
            try:
                image = decode_image(torch.frombuffer(bytearray(content), dtype=torch.uint8), ImageReadMode.RGB)
            except (RuntimeError, ValueError) as error:
                raise DecodeError(position, reason(error)) from error
            if image.dtype == torch.uint16:  # a PNG; torch resizes only 8 bits
                image = (image.int() >> 8).to(torch.uint8)
            pixels[position] = _resize_box(image, region(image.shape[2], image.shape[1]), side)
    return pixels


def nvjpeg(contents: Sequence[Any], regions: Sequence[Region], side: int, device: torch.device) -> torch.Tensor:
    """Decode a batch with nvJPEG. `contents` are uint8 tensors on the host. Raises DataError."""
    try:
        images = decode_jpegs(list(contents), device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise DataError(
            f"nvjpeg cannot decode an image ({reason(error)}); use decode 'pil' to find out which"
        ) from error
    boxes = [region(image.shape[2], image.shape[1]) for image, region in zip(images, regions, strict=True)]
    if device.type == "cuda":
        from trainables.data.images.gpu.kernels import resize_squares  # only CUDA builds of torch have triton

        return resize_squares(images, boxes, side)
    return torch.stack([_resize_box(image, box, side) for image, box in zip(images, boxes, strict=True)])


def _resize_box(image: torch.Tensor, box: Box, side: int) -> torch.Tensor:
    """Resize a box of an image uint8 [3, h, w] on the CPU to uint8 [3, side, side]."""
    x, y, width, height = box
    # The uint8 kernel is three times as fast in channels_last.
    part = image[None, :, y : y + height, x : x + width].contiguous(memory_format=torch.channels_last)
    return interpolate(part, size=(side, side), mode="bilinear", antialias=True)[0]


def as_baseline(content: Any) -> bytes:
    """Return a JPEG file that nvJPEG decodes: the file itself, or its image re-encoded if it is a PNG or a CMYK JPEG.

    ImageNet has 23 such files named .JPEG. Of all others, only the header is read. Its Exif segments are removed,
    because TorchCodec, unlike the other libraries, would rotate the image by them. Raises the exceptions of Pillow.
    """
    with Image.open(BytesIO(content)) as image:
        if image.format == "JPEG" and image.mode in ("L", "RGB"):
            return _without_exif(bytes(content)) if "exif" in image.info else bytes(content)
        encoded = BytesIO()
        _as_rgb(image).save(encoded, "JPEG", quality=95)
        return encoded.getvalue()


def _without_exif(content: bytes) -> bytes:
    """Remove the Exif segments of a JPEG file.

    A segment is a two-byte marker, which fill bytes 0xFF may precede, and a length that includes itself (ITU-T T.81,
    B.1.1).
    """
    segments, start = [content[:2]], 2
    while content[start] == 0xFF and content[start + 1] != START_OF_SCAN:
        if content[start + 1] == 0xFF:
            start += 1
            continue
        end = start + 2 + int.from_bytes(content[start + 2 : start + 4], "big")
        if content[start + 4 : start + 10] != b"Exif\0\0":
            segments.append(content[start:end])
        start = end
    return b"".join([*segments, content[start:]])


def reason(error: BaseException) -> str:
    """Return why an image cannot be decoded, in one line."""
    if isinstance(error, UnidentifiedImageError):
        return "not an image"  # Pillow's message has a memory address
    return one_line(error)
