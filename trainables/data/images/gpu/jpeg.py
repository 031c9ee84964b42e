"""Decode JPEG files on a rank's device: one function for three libraries that use nvJPEG.

The first one that is installed and works is used:
1. nvImageCodec, which reuses its decoder and output images from batch to batch;
2. TorchCodec;
3. torchvision, whose decoders have moved to TorchCodec.

On the CPU, all three decode with libjpeg-turbo, so tests cover the device path without a GPU.
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
"""files uint8 [bytes] on the host -> images uint8 [3, h, w] on the device"""

PREALLOCATED_QUANTILE = 0.95
"""quantile of the widths, and of the heights, in the first batch for which a decoder allocates memory in advance"""

_THREAD_DECODERS = threading.local()


def decode_jpegs(contents: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Decode JPEG files (uint8 [bytes], on the host) to uint8 [3, h, w] on the device.

    The next call may overwrite the images. Raises RuntimeError, which does not say which image cannot be decoded.
    """
    if device.type == "cuda":
        # The GPU's JPEG engine does not wait for the stream passed to it, and may overwrite memory that kernels of this
        # stream still read, so the host must wait (https://github.com/meta-pytorch/torchcodec/pull/1634; for
        # torchvision https://github.com/pytorch/vision/issues/9606).
        torch.cuda.current_stream(device).synchronize()
    return thread_decoder(device)(contents)


def thread_decoder(device: torch.device) -> Decoder:
    """Return this thread's decoder for a device. Threads must not share the images that nvImageCodec reuses."""
    decoders = vars(_THREAD_DECODERS)
    if str(device) not in decoders:
        decoders[str(device)] = new_decoder(device)
    return decoders[str(device)]


def forget_decoders() -> None:
    """Free this thread's decoders and their images. Those of other threads are freed when the threads end."""
    vars(_THREAD_DECODERS).clear()


def new_decoder(device: torch.device) -> Decoder:
    """Return the decoder of the first library that loads. torchvision is always installed."""
    with suppress(ImportError, OSError, RuntimeError):
        return NvImageCodec(device)
    with suppress(ImportError, OSError, RuntimeError):  # a build for another version of torch does not load
        return torch_decoder("torchcodec.decoders", device)
    return torch_decoder("torchvision.io", device)


def torch_decoder(module: str, device: torch.device) -> Decoder:
    """Return the decoder of TorchCodec or torchvision. TorchCodec kept the signature of torchvision's."""
    decode_jpeg = import_module(module).decode_jpeg

    def decode(contents: list[torch.Tensor]) -> list[torch.Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return decode_jpeg(contents, mode="RGB", device=device)

    return decode


@cache
def _nvimagecodec_works(device: torch.device) -> bool:
    """Return True if nvImageCodec decodes JPEG files on this device.

    The check uses a separate decoder: one whose first batch is a single image never uses the GPU's JPEG engine again
    (nvImageCodec 0.9 on an H200: 1,000 instead of 15,000 images/s).
    """
    smallest = BytesIO()
    Image.new("RGB", (16, 16)).save(smallest, "JPEG")
    codec = import_module("nvidia.nvimgcodec")
    files = [codec.CodeStream(np.frombuffer(smallest.getvalue(), dtype=np.uint8))]
    return _nvimagecodec_decoder(codec, device, files).decode(files)[0] is not None


def _nvimagecodec_decoder(codec: Any, device: torch.device, files: Sequence[Any]) -> Any:
    """Return an nvImageCodec decoder with memory allocated for batches like `files`.

    Otherwise the engine's memory grows with each batch that needs more, and the device stalls meanwhile: ResNet-50 at
    batch 256 reached 0.957 instead of 0.972 of synthetic data's throughput (H200, `storage-nvimagecodec` and
    `storage-ahead` under benchmarks/results). Exceptionally large files still make it grow, because the largest may be
    40 times a usual photograph, too much to allocate for every image.
    """
    width, height = (
        int(np.quantile([getattr(file, edge) for file in files], PREALLOCATED_QUANTILE)) for edge in ("width", "height")
    )
    memory = {"batch_size": len(files), "width_hint": width, "height_hint": height}
    options = " ".join(f"nvjpeg_hw_decoder:preallocate_{name}={value}" for name, value in memory.items())
    kinds = codec.BackendKind
    device_id, allowed = codec.NVIMGCODEC_DEVICE_CPU_ONLY, [kinds.CPU_ONLY]
    if device.type == "cuda":
        # The hybrid backend decodes progressive files, and all files on GPUs without a JPEG engine.
        device_id, allowed = device.index or 0, [kinds.HW_GPU_ONLY, kinds.HYBRID_CPU_GPU]
    backends = [codec.Backend(kind) for kind in allowed]
    return codec.Decoder(device_id=device_id, max_num_cpu_threads=1, backends=backends, options=options)


class NvImageCodec:
    """nvImageCodec's decoder with its reusable output images, one per position in a batch.

    Raises ImportError if the package is missing, RuntimeError if it does not find nvJPEG's library.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.codec = device, import_module("nvidia.nvimgcodec")
        self.params = self.codec.DecodeParams(apply_exif_orientation=False, sample_format=self.codec.SampleFormat.P_RGB)
        self.images: list[Any] = []
        self.decoder: Any = None
        if not _nvimagecodec_works(device):
            raise RuntimeError("nvImageCodec cannot find nvJPEG")

    def __call__(self, contents: list[torch.Tensor]) -> list[torch.Tensor]:
        files = [self.codec.CodeStream(content.numpy()) for content in contents]
        self.decoder = self.decoder or _nvimagecodec_decoder(self.codec, self.device, files)
        on_gpu = self.device.type == "cuda"
        stream = torch.cuda.current_stream(self.device).cuda_stream if on_gpu else 0
        reused = {"images": self.images} if len(self.images) == len(files) else {}
        self.images = []  # a failed batch leaves no images to reuse
        images = self.decoder.decode(files, params=self.params, cuda_stream=stream, **reused)
        if any(image is None for image in images):
            raise RuntimeError("nvImageCodec returned no image")
        self.images = images
        return [torch.as_tensor(image if on_gpu else np.asarray(image), device=self.device) for image in images]
