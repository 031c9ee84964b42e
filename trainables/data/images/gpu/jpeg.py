"""JPEG files to pixels on a rank's device: one function before three libraries that lead to nvJPEG.

The first of them that is installed and fits is used: nvImageCodec, which keeps its decoder and the images that it writes
into from one batch to the next; TorchCodec; torchvision, whose decoders have moved to TorchCodec.

On the CPU all three decode by libjpeg-turbo, with which the path through the device is tested without one.
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image

Decoder = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""files uint8 [bytes] on the host to images uint8 [3, h, w] on the device"""

USUAL = 0.95
"""of a batch's files are not wider, and as many not higher, than those for which a decoder has memory from the beginning"""

_OF_THREAD = threading.local()


def decode_jpegs(contents: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """uint8 [3, h, w] on the device of each JPEG file (uint8 [bytes], on the host), to be read before the next call.

    Raises RuntimeError, which does not say which image cannot be decoded.
    """
    if device.type == "cuda":
        # the GPU's JPEG engine does not wait for the stream that it is given, and writes into memory that kernels of this
        # stream may still read: the host has to wait (https://github.com/meta-pytorch/torchcodec/pull/1634, for torchvision
        # https://github.com/pytorch/vision/issues/9606)
        torch.cuda.current_stream(device).synchronize()
    return library(device)(contents)


def library(device: torch.device) -> Decoder:
    """What decodes on this device for this thread: the images of two threads, which nvImageCodec reuses, must not meet."""
    own = vars(_OF_THREAD)
    if str(device) not in own:
        own[str(device)] = first_that_loads(device)
    return own[str(device)]


def forget_decoders() -> None:
    """Frees this thread's decoders and their images; those of another end with it."""
    vars(_OF_THREAD).clear()


def first_that_loads(device: torch.device) -> Decoder:
    """nvImageCodec, TorchCodec, or torchvision, which is always there."""
    with suppress(ImportError, OSError, RuntimeError):
        return NvImageCodec(device)
    with suppress(ImportError, OSError, RuntimeError):  # what was built for another torch does not load
        return decoder_of("torchcodec.decoders", device)
    return decoder_of("torchvision.io", device)


def decoder_of(module: str, device: torch.device) -> Decoder:
    """TorchCodec's or torchvision's: the former has taken over the latter's decoders, with their arguments."""
    decode_jpeg = import_module(module).decode_jpeg

    def decode(contents: list[torch.Tensor]) -> list[torch.Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return decode_jpeg(contents, mode="RGB", device=device)

    return decode


@cache
def _decodes(device: torch.device) -> bool:
    """Whether nvImageCodec decodes JPEG files here, asked of a decoder that is not used again: one whose first batch is a
    single image leaves the GPU's engine idle from then on (0.9 on an H200: 1,000 images/s in place of 15,000)."""
    smallest = BytesIO()
    Image.new("RGB", (16, 16)).save(smallest, "JPEG")
    codec = import_module("nvidia.nvimgcodec")
    files = [codec.CodeStream(np.frombuffer(smallest.getvalue(), dtype=np.uint8))]
    return _new_decoder(codec, device, files).decode(files)[0] is not None


def _new_decoder(codec: Any, device: torch.device, files: Sequence[Any]) -> Any:
    """A decoder with memory for batches like `files`.

    Without that the engine's memory grows with each batch that needs more of it, and the device stands still meanwhile:
    ResNet-50 at batch 256 reached 0.957 of synthetic data in place of 0.972 (H200, `storage-nvimagecodec` and `storage-ahead`
    under benchmarks/results). Files larger than nearly all of these still make it grow: memory for the largest, which may be
    forty times a usual photograph, is not taken for all.
    """
    width, height = (int(np.quantile([getattr(file, edge) for file in files], USUAL)) for edge in ("width", "height"))
    memory = {"batch_size": len(files), "width_hint": width, "height_hint": height}
    options = " ".join(f"nvjpeg_hw_decoder:preallocate_{name}={value}" for name, value in memory.items())
    kinds = codec.BackendKind
    place, allowed = codec.NVIMGCODEC_DEVICE_CPU_ONLY, [kinds.CPU_ONLY]
    if device.type == "cuda":
        # the engine, and for progressive files and GPUs without an engine the other half of nvJPEG
        place, allowed = device.index or 0, [kinds.HW_GPU_ONLY, kinds.HYBRID_CPU_GPU]
    backends = [codec.Backend(kind) for kind in allowed]
    return codec.Decoder(device_id=place, max_num_cpu_threads=1, backends=backends, options=options)


class NvImageCodec:
    """nvImageCodec's decoder, and its images by their number in a batch.

    Raises ImportError where the package is missing, RuntimeError where it does not find nvJPEG's library.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.codec = device, import_module("nvidia.nvimgcodec")
        self.as_it_lies = self.codec.DecodeParams(
            apply_exif_orientation=False, sample_format=self.codec.SampleFormat.P_RGB
        )
        self.images: list[Any] = []
        self.decoder: Any = None
        if not _decodes(device):
            raise RuntimeError("nvImageCodec does not find nvJPEG")

    def __call__(self, contents: list[torch.Tensor]) -> list[torch.Tensor]:
        files = [self.codec.CodeStream(content.numpy()) for content in contents]
        self.decoder = self.decoder or _new_decoder(self.codec, self.device, files)
        on_gpu = self.device.type == "cuda"
        stream = torch.cuda.current_stream(self.device).cuda_stream if on_gpu else 0
        reused = {"images": self.images} if len(self.images) == len(files) else {}
        self.images = []  # an image that fails is none to write into
        found = self.decoder.decode(files, params=self.as_it_lies, cuda_stream=stream, **reused)
        if any(image is None for image in found):
            raise RuntimeError("nvImageCodec gives no image")
        self.images = found
        return [torch.as_tensor(image if on_gpu else np.asarray(image), device=self.device) for image in found]
