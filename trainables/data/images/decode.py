"""From encoded images to squares of pixels: one geometry, three decoders.

A decoder is a function `(contents, regions, side, device) -> uint8 [n, 3, side, side]`: it decodes each of n encoded
images, cuts out the rectangle that its region names, and resizes that to `side` x `side` (bilinear with antialiasing).
PIL and torchvision run where they are called, on the CPU; nvjpeg runs on the rank's device. Grey images become RGB, of
16 bits the upper 8 are taken; EXIF orientation is not applied.
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
"""what to cut out of an image of this width and height"""


START_OF_SCAN = 0xDA
"""of a JPEG file's markers the last before its pixels"""


class DecodeError(Exception):
    """An image that cannot be decoded: `place` is its place in the batch."""

    def __init__(self, place: int, what: str) -> None:
        super().__init__(what)
        self.place = place


def centre_square(width: int, height: int) -> Box:
    """The largest square in the middle: resized to a side, it is the image with its short side resized, then cropped."""
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


def pil(contents: Sequence[Any], regions: Sequence[Region], side: int, device: torch.device) -> torch.Tensor:
    """Pillow, one image after the other. Its images lie as [n, side, side, 3] in memory. Raises DecodeError."""
    pixels = np.empty((len(contents), side, side, 3), dtype=np.uint8)
    for place, (content, region) in enumerate(zip(contents, regions, strict=True)):
        try:
            pixels[place] = pil_square(content, region, side)
        except Exception as error:  # a damaged file raises nearly anything
            raise DecodeError(place, reason(error)) from error
    return torch.from_numpy(pixels).permute(0, 3, 1, 2)


def pil_square(content: Any, region: Region, side: int) -> np.ndarray:
    """One image's region as uint8 [side, side, 3], by Pillow."""
    with Image.open(BytesIO(content)) as image:
        return resized(_as_rgb(image), region, side)


def _as_rgb(image: Image.Image) -> Image.Image:
    """An image of any kind in RGB."""
    if image.mode.startswith("I;16"):  # Pillow would make 255 of all that is more
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image if image.mode == "RGB" else image.convert("RGB")


def resized(image: Image.Image, region: Region, side: int) -> np.ndarray:
    """A region of an RGB image, resized to uint8 [side, side, 3]."""
    x, y, width, height = region(*image.size)
    return np.asarray(image.resize((side, side), Image.Resampling.BILINEAR, box=(x, y, x + width, y + height)))


def torchvision(contents: Sequence[Any], regions: Sequence[Region], side: int, device: torch.device) -> torch.Tensor:
    """torchvision's decoder (libjpeg-turbo) and torch's own resizing, one image after the other. Raises DecodeError."""
    pixels = torch.empty((len(contents), 3, side, side), dtype=torch.uint8, memory_format=torch.channels_last)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torchvision.io, which TorchCodec is to replace
        for place, (content, region) in enumerate(zip(contents, regions, strict=True)):
            try:
                image = decode_image(torch.frombuffer(bytearray(content), dtype=torch.uint8), ImageReadMode.RGB)
            except (RuntimeError, ValueError) as error:
                raise DecodeError(place, reason(error)) from error
            if image.dtype == torch.uint16:  # a PNG; torch resizes 8 bits only
                image = (image.int() >> 8).to(torch.uint8)
            pixels[place] = _resized(image, region(image.shape[2], image.shape[1]), side)
    return pixels


def nvjpeg(contents: Sequence[Any], regions: Sequence[Region], side: int, device: torch.device) -> torch.Tensor:
    """nvJPEG, a batch a call; `contents` are uint8 tensors on the host. Raises DataError."""
    try:
        images = decode_jpegs(list(contents), device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise DataError(f"nvjpeg cannot decode an image ({reason(error)}): decode 'pil' names it") from error
    boxes = [region(image.shape[2], image.shape[1]) for image, region in zip(images, regions, strict=True)]
    if device.type == "cuda":
        from trainables.data.images.gpu.kernels import resized_squares  # triton comes with torch's builds for CUDA only

        return resized_squares(images, boxes, side)
    return torch.stack([_resized(image, box, side) for image, box in zip(images, boxes, strict=True)])


def _resized(image: torch.Tensor, box: Box, side: int) -> torch.Tensor:
    """A part of an image uint8 [3, h, w] on the CPU, resized to uint8 [3, side, side]."""
    x, y, width, height = box
    # the kernel for uint8 is three times as fast on pixels with their channels together
    part = image[None, :, y : y + height, x : x + width].contiguous(memory_format=torch.channels_last)
    return interpolate(part, size=(side, side), mode="bilinear", antialias=True)[0]


def as_baseline(content: Any) -> bytes:
    """A JPEG file that nvJPEG decodes: the file itself, or its image encoded anew where it is a PNG or a CMYK JPEG.

    ImageNet has 23 such files under the name .JPEG. Only the header is read of all others, and lost is what it says of a
    camera, by which TorchCodec, and no other, would turn the image. Raises as Pillow does.
    """
    with Image.open(BytesIO(content)) as image:
        if image.format == "JPEG" and image.mode in ("L", "RGB"):
            return _without_exif(bytes(content)) if "exif" in image.info else bytes(content)
        anew = BytesIO()
        _as_rgb(image).save(anew, "JPEG", quality=95)
        return anew.getvalue()


def _without_exif(content: bytes) -> bytes:
    """A JPEG file without its segments of Exif (ITU-T T.81, B.1.1: a marker of two bytes, which more of the byte 0xFF may
    precede, and a length that counts itself)."""
    kept, at = [content[:2]], 2
    while content[at] == 0xFF and content[at + 1] != START_OF_SCAN:
        if content[at + 1] == 0xFF:
            at += 1
            continue
        end = at + 2 + int.from_bytes(content[at + 2 : at + 4], "big")
        if content[at + 4 : at + 10] != b"Exif\0\0":
            kept.append(content[at:end])
        at = end
    return b"".join([*kept, content[at:]])


def reason(error: BaseException) -> str:
    """Why an image cannot be decoded, in one line."""
    if isinstance(error, UnidentifiedImageError):
        return "it is no image"  # Pillow would say at which address the bytes lay
    return one_line(error)
