"""Names that a trial may use, mapped to what they load.

The values are import strings, so that planning and `--help` need not import torch. To add a model, a data set,
a precision or a parallel strategy: one function somewhere and one line here.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

TEXT_MODELS: Mapping[str, str] = {
    "mlstm64": "trainables.models.mlstm:mlstm64",
    "mlstm1024": "trainables.models.mlstm:mlstm1024",
    "mlstm2048": "trainables.models.mlstm:mlstm2048",
    "mlstm4096": "trainables.models.mlstm:mlstm4096",
    "mlstm8192": "trainables.models.mlstm:mlstm8192",
    "transformer": "trainables.models.transformer:transformer",
    "transformer_tiny": "trainables.models.transformer:transformer_tiny",
}

IMAGE_MODELS: Mapping[str, str] = {
    "mlp": "trainables.models.mlp:mlp",
    "resnet18": "trainables.models.resnet:resnet18",
    "resnet18_small": "trainables.models.resnet:resnet18_small",
    "resnet50": "trainables.models.resnet:resnet50",
    "resnet50_small": "trainables.models.resnet:resnet50_small",
    "inception_v3": "trainables.models.inception:inception_v3",
    "vgg19": "trainables.models.vgg:vgg19",
    "vgg19_bn": "trainables.models.vgg:vgg19_bn",
}

MODELS: Mapping[str, str] = {**IMAGE_MODELS, **TEXT_MODELS}

RESIDUAL_MODELS = ("resnet18", "resnet18_small", "resnet50", "resnet50_small")
"""models of residual blocks, whose last batch normalisation may begin at zero"""

IMAGENET_STEMS = ("resnet18", "resnet50")
"""models that begin with a 7x7 convolution of stride 2 and 3x3 max pooling of stride 2"""

SMALLEST_IMAGES: Mapping[str, int] = {"vgg19": 32, "vgg19_bn": 32, "inception_v3": 75}
"""edge in pixels of the smallest image that a model takes, where that is more than a trial may ask for"""

TEXT_DATASETS: Mapping[str, str] = {
    "text_sample": "trainables.data.text_sample:sample",
    "amazon_reviews": "trainables.data.amazon_reviews:amazon_reviews",
    "synthetic": "trainables.data.synthetic:resident_text",
}

IMAGE_DATASETS: Mapping[str, str] = {
    "fashion_mnist_sample": "trainables.data.fashion_mnist:sample",
    "fashion_mnist": "trainables.data.fashion_mnist:full",
    "cifar10": "trainables.data.cifar10:cifar10",
    "image_folder": "trainables.data.image_folder:source",
    "tiny_imagenet": "trainables.data.image_folder:source",
    "image_folder_sample": "trainables.data.image_folder_sample:source",
    "synthetic": "trainables.data.synthetic:resident",
    "synthetic_loader": "trainables.data.synthetic:loaded",
}

DATASETS: Mapping[str, str] = {**TEXT_DATASETS, **IMAGE_DATASETS}
"""names of both kinds; what loads one that is of both kinds depends on the model"""

IMAGE_FOLDERS = ("image_folder", "tiny_imagenet", "image_folder_sample")
"""data sets of image files, which may be converted into another storage format"""

RESIDENT_DATASETS = ("fashion_mnist_sample", "fashion_mnist", "cifar10")
"""data sets that are one array of uint8 images in memory: they may lie on the device as a whole, and be cropped there"""

READ_FROM_DATA_DIR = ("fashion_mnist", "cifar10", "amazon_reviews", "image_folder", "tiny_imagenet")
"""data sets whose files a user has to name"""

PRECISIONS: Mapping[str, str] = {
    "fp32": "trainables.precision:fp32",
    "tf32": "trainables.precision:tf32",
    "bf16": "trainables.precision:bf16",
    "fp16": "trainables.precision:fp16",
    "fp16_master": "trainables.precision:fp16_master",
    "fp16_pure": "trainables.precision:fp16_pure",
}

PARALLEL: Mapping[str, str] = {
    "none": "trainables.parallel:none",
    "dp": "trainables.parallel:dp",
    "ddp": "trainables.parallel:ddp",
    "ddp_fp16": "trainables.parallel:ddp_fp16",
    "ddp_bf16": "trainables.parallel:ddp_bf16",
    "ddp_delayed": "trainables.parallel:ddp_delayed",
    "zero1": "trainables.parallel:zero1",
    "fsdp2": "trainables.parallel:fsdp2",
    "horovod": "",  # named so that a study may ask for it; see `requirements`
}

DDP_WRAPPED = ("ddp", "ddp_fp16", "ddp_bf16", "zero1")
"""strategies whose gradients DistributedDataParallel reduces"""

STRATEGY_OPTIONS = {"gradient_as_bucket_view": DDP_WRAPPED, "static_graph": DDP_WRAPPED} | dict.fromkeys(
    ("broadcast_buffers", "bucket_mb"), (*DDP_WRAPPED, "ddp_delayed")
)
"""fields that mean something under these strategies only"""

EXECUTIONS = ("eager", "compile", "graph", "compile_graph")
"""op by op; compiled by torch.compile; the whole step replayed as a CUDA graph; both"""

OPTIMIZERS: Mapping[str, str] = {
    "sgd": "trainables.optimizers:sgd",
    "nesterov": "trainables.optimizers:nesterov",
    "lars": "trainables.optimizers:lars",
    "lamb": "trainables.optimizers:lamb",
    "adamw": "trainables.optimizers:adamw",
}

STORAGES: Mapping[str, str] = {
    "jpeg": "trainables.data.jpeg_files:storage",
    "lmdb": "trainables.data.lmdb_file:storage",
    "arrow_jpeg": "trainables.data.arrow_files:storage",
    "arrow_raw": "trainables.data.arrow_files:storage",
}

DECODERS: Mapping[str, str] = {
    "pil": "trainables.data.decode:pil",
    "torchvision": "trainables.data.decode:torchvision",
    "nvjpeg": "trainables.data.decode:nvjpeg",
    "nvjpeg_ahead": "trainables.data.decode:nvjpeg",
}

ON_DEVICE_DECODERS = ("nvjpeg", "nvjpeg_ahead")
"""they need encoded bytes on the host and leave pixels on the rank's device"""

AHEAD_DECODERS = ("nvjpeg_ahead",)
"""they do it for batches to come, in a thread and a stream beside the step"""

AHEAD_BATCHES = 3
"""batches that are made so before they are asked for: with two, a late one made ResNet-50's step on an H200 wait now and then"""

MEMORY_FORMATS = ("contiguous", "channels_last")

NAMES: dict[str, Iterable[str]] = {
    "model": MODELS,
    "dataset": DATASETS,
    "precision": PRECISIONS,
    "parallel": PARALLEL,
    "execution": EXECUTIONS,
    "optimizer": OPTIMIZERS,
    "storage": STORAGES,
    "decode": DECODERS,
    "memory_format": MEMORY_FORMATS,
}
"""what fields that name something may be"""


def modules(*registries: Mapping[str, str]) -> list[str]:
    """The modules that these registries load from, each once."""
    return sorted({target.partition(":")[0] for registry in registries for target in registry.values() if target})


def load(import_string: str) -> Any:
    """The object that `package.module:name` names.

    Raises ImportError or AttributeError where the registry itself is wrong.
    """
    module, _, name = import_string.partition(":")
    return getattr(import_module(module), name)
