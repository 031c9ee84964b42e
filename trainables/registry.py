"""Names that a trial may use, with their properties.

To add a model, data set, precision, parallel strategy or decoder, write its module and add one line here. The targets
are import strings, so that planning and `--help` do not import torch.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, get_args

from trainables.facts import (
    DatasetFacts,
    DecoderFacts,
    Facts,
    Kind,
    ModelFacts,
    OptimizerFacts,
    PrecisionFacts,
    StorageFacts,
    StrategyFacts,
)

GPT2_VOCABULARY = 50_304
"""50,257 token ids, padded to a multiple of 128, for which matrix products are faster"""

LLAMA_VOCABULARY = 128_256
SAMPLE_VOCABULARY = 8192
"""token ids of the bundled sample; the vocabulary of models for tests"""

MODELS: Mapping[str, ModelFacts] = {
    "mlp": ModelFacts("trainables.models.mlp:mlp", million_weights=9.63, image_gflop=0.0385),
    "resnet18": ModelFacts(
        "trainables.models.resnet:resnet18", residual=True, imagenet_stem=True, million_weights=11.2, image_gflop=10.6
    ),
    "resnet18_small": ModelFacts(
        "trainables.models.resnet:resnet18_small", residual=True, million_weights=11.2, image_gflop=163
    ),
    "resnet20": ModelFacts("trainables.models.resnet:resnet20", residual=True, million_weights=0.272, image_gflop=12.0),
    "resnet50": ModelFacts(
        "trainables.models.resnet:resnet50", residual=True, imagenet_stem=True, million_weights=23.5, image_gflop=24.3
    ),
    "resnet50_small": ModelFacts(
        "trainables.models.resnet:resnet50_small", residual=True, million_weights=23.5, image_gflop=381
    ),
    "inception_v3": ModelFacts(
        "trainables.models.inception:inception_v3", smallest_image=75, million_weights=21.8, image_gflop=17.0
    ),
    "inception_v4": ModelFacts(
        "trainables.models.inception:inception_v4", smallest_image=75, million_weights=41.2, image_gflop=36.7,
        package="timm",
    ),
    "vgg19": ModelFacts("trainables.models.vgg:vgg19", smallest_image=32, million_weights=140, image_gflop=118),
    "vgg19_bn": ModelFacts("trainables.models.vgg:vgg19_bn", smallest_image=32, million_weights=140, image_gflop=118),
    "mlstm64": ModelFacts("trainables.models.mlstm:mlstm64", "text", carries_state=True, million_weights=0.0742),
    "mlstm1024": ModelFacts("trainables.models.mlstm:mlstm1024", "text", carries_state=True, million_weights=5.85),
    "mlstm2048": ModelFacts("trainables.models.mlstm:mlstm2048", "text", carries_state=True, million_weights=22.2),
    "mlstm4096": ModelFacts(
        "trainables.models.mlstm:mlstm4096", "text", carries_state=True, fits_cpu=False, million_weights=86.3
    ),
    "mlstm8192": ModelFacts(
        "trainables.models.mlstm:mlstm8192", "text", carries_state=True, fits_cpu=False, million_weights=340
    ),
    "transformer": ModelFacts("trainables.models.transformer:transformer", "text", million_weights=25.5),
    "transformer_tiny": ModelFacts("trainables.models.transformer:transformer_tiny", "text", million_weights=0.0454),
    "gpt2": ModelFacts(
        "trainables.models.gpt2:gpt2", "tokens", vocabulary=GPT2_VOCABULARY, sequence_length=1024, fits_cpu=False,
        million_weights=124,
    ),
    "gpt2_medium": ModelFacts(
        "trainables.models.gpt2:gpt2_medium", "tokens", vocabulary=GPT2_VOCABULARY, sequence_length=1024,
        fits_cpu=False, million_weights=355,
    ),
    "gpt2_tiny": ModelFacts(
        "trainables.models.gpt2:gpt2_tiny", "tokens", vocabulary=SAMPLE_VOCABULARY, million_weights=0.290
    ),
    "llama_1b": ModelFacts(
        "trainables.models.llama:llama_1b", "tokens", vocabulary=LLAMA_VOCABULARY, sequence_length=1024,
        fits_cpu=False, million_weights=1236,
    ),
    "llama_8b": ModelFacts(
        "trainables.models.llama:llama_8b", "tokens", vocabulary=LLAMA_VOCABULARY, sequence_length=1024,
        fits_cpu=False, million_weights=8030,
    ),
    "llama_tiny": ModelFacts(
        "trainables.models.llama:llama_tiny", "tokens", vocabulary=SAMPLE_VOCABULARY, million_weights=0.281
    ),
}  # fmt: skip

DATASETS: Mapping[str, DatasetFacts] = {
    "text_sample": DatasetFacts(text="trainables.data.text:sample"),
    "amazon_reviews": DatasetFacts(
        text="trainables.data.amazon_reviews:amazon_reviews", needs_data_dir=True,
        file_patterns=("*.json", "*.jsonl", "*.json.gz", "*.jsonl.gz"), missing="trainables.data.files:missing_reviews",
    ),
    "token_sample": DatasetFacts(tokens="trainables.data.tokens:sample"),
    "token_files": DatasetFacts(
        tokens="trainables.data.tokens:files", needs_data_dir=True, file_patterns=("*train*.bin",),
        missing="trainables.data.files:missing_tokens",
    ),
    "fashion_mnist_sample": DatasetFacts(
        "trainables.data.fashion_mnist:sample", in_memory=True, training_images=10_000
    ),
    "fashion_mnist": DatasetFacts(
        "trainables.data.fashion_mnist:full", needs_data_dir=True, in_memory=True, training_images=60_000,
        found_by=("FashionMNIST", "train-images-idx3-ubyte", "train-images-idx3-ubyte.gz"),
        missing="trainables.data.files:missing_fashion_mnist",
    ),
    "cifar10": DatasetFacts(
        "trainables.data.cifar10:cifar10", needs_data_dir=True, in_memory=True, image_size=32, training_images=50_000,
        found_by=("cifar-10-batches-py",), missing="trainables.data.files:missing_cifar10",
    ),
    "image_folder": DatasetFacts(
        "trainables.data.images.folder:source", needs_data_dir=True, image_folder=True, image_size=224,
        layout="DIR/train/CLASS/*.JPEG and DIR/val/CLASS/*.JPEG, or DIR/CLASS/*.JPEG",
    ),
    "tiny_imagenet": DatasetFacts(
        "trainables.data.images.folder:source", needs_data_dir=True, image_folder=True, image_size=64,
        layout="DIR/wnids.txt, DIR/train/CLASS/images/*.JPEG and DIR/val/val_annotations.txt with DIR/val/images",
    ),
    "image_folder_sample": DatasetFacts(
        "trainables.data.images.sample:source", image_folder=True, training_images=10_000
    ),
    "synthetic": DatasetFacts(
        "trainables.data.synthetic:resident", "trainables.data.synthetic:resident_text",
        "trainables.data.tokens:resident", on_device=True, random=True,
    ),
    "synthetic_loader": DatasetFacts("trainables.data.synthetic:from_loaders", random=True),
}  # fmt: skip

PRECISIONS: Mapping[str, PrecisionFacts] = {
    "fp32": PrecisionFacts("trainables.step.precision:fp32"),
    "tf32": PrecisionFacts("trainables.step.precision:tf32", needs_gpu=True),
    "bf16": PrecisionFacts("trainables.step.precision:bf16"),
    "fp16": PrecisionFacts("trainables.step.precision:fp16"),
    "fp16_master": PrecisionFacts("trainables.step.precision:fp16_master", two_weight_types=True),
    "bf16_master": PrecisionFacts("trainables.step.precision:bf16_master", two_weight_types=True),
    "fp16_pure": PrecisionFacts("trainables.step.precision:fp16_pure"),
    "fp8": PrecisionFacts("trainables.step.precision:fp8", needs_gpu=True, package="torchao"),
}

_BUCKETS = ("broadcast_buffers", "bucket_mb")
_DDP = (
    *_BUCKETS, "first_bucket_mb", "gradient_as_bucket_view", "static_graph", "find_unused_parameters", "split_graph",
)  # fmt: skip

PARALLEL: Mapping[str, StrategyFacts] = {
    "none": StrategyFacts("trainables.step.parallel:none", one_rank=True),
    "dp": StrategyFacts("trainables.step.parallel:dp", one_process=True, full_weights=False, capturable=False),
    "ddp": StrategyFacts("trainables.step.parallel:ddp", True, _DDP),
    "ddp_fp16": StrategyFacts("trainables.step.parallel:ddp_fp16", True, _DDP, sent_as="float16"),
    "ddp_bf16": StrategyFacts("trainables.step.parallel:ddp_bf16", True, _DDP, sent_as="bfloat16"),
    "ddp_delayed": StrategyFacts("trainables.step.parallel:ddp_delayed", options=_BUCKETS),
    "horovod": StrategyFacts(
        "trainables.step.horovod:horovod", options=("bucket_mb",), capturable=False, package="horovod"
    ),
    "zero1": StrategyFacts("trainables.step.parallel:zero1", True, _DDP, traced=True, capturable=False),
    "fsdp2": StrategyFacts(
        "trainables.step.parallel:fsdp2", sharded=True, traced=True, full_weights=False, capturable=False
    ),
    "hsdp": StrategyFacts(
        "trainables.step.parallel:hsdp", sharded=True, traced=True, options=("shard_ranks",), full_weights=False,
        capturable=False,
    ),
}  # fmt: skip

EXECUTIONS = ("eager", "compile", "compile_blocks", "graph", "compile_graph")
"""op by op; compiled by torch.compile; each block of a language model compiled, with the code of the first one; the
complete step replayed as a CUDA graph; compiled and replayed"""

OPTIMIZERS: Mapping[str, OptimizerFacts] = {
    "sgd": OptimizerFacts("trainables.models.optimizers:sgd", momentum=True),
    "nesterov": OptimizerFacts("trainables.models.optimizers:nesterov", momentum=True, needs_momentum=True),
    "lars": OptimizerFacts("trainables.models.optimizers:lars", momentum=True),
    "lamb": OptimizerFacts("trainables.models.optimizers:lamb"),
    "adamw": OptimizerFacts("trainables.models.optimizers:adamw"),
}

STORAGES: Mapping[str, StorageFacts] = {
    "jpeg": StorageFacts("trainables.data.images.jpeg_files:storage"),
    "lmdb": StorageFacts("trainables.data.images.lmdb_file:storage"),
    "arrow_jpeg": StorageFacts("trainables.data.images.arrow_files:storage"),
    "arrow_raw": StorageFacts("trainables.data.images.arrow_files:storage", holds_pixels=True),
}

DECODERS: Mapping[str, DecoderFacts] = {
    "pil": DecoderFacts("trainables.data.images.decode:pil"),
    "torchvision": DecoderFacts("trainables.data.images.decode:torchvision"),
    "nvjpeg": DecoderFacts("trainables.data.images.decode:nvjpeg", on_device=True),
    "nvjpeg_ahead": DecoderFacts("trainables.data.images.decode:nvjpeg", on_device=True, ahead=True),
}

AHEAD_BATCHES = 3
"""batches prepared in advance by `decode` "nvjpeg_ahead" and by `copy_ahead`. With two, ResNet-50's step on an H200
sometimes waited for a late batch."""

MEMORY_FORMATS = ("contiguous", "channels_last")

SAMPLE_DATASETS: Mapping[Kind, str] = {
    "images": "fashion_mnist_sample", "text": "text_sample", "tokens": "token_sample"
}  # fmt: skip
"""the bundled data set of each kind"""

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
"""allowed names, by field"""


def names_with(registry: Mapping[str, Any], fact: str, value: Any = True) -> tuple[str, ...]:
    """Return the names of a registry whose property `fact` has this value."""
    return tuple(name for name, facts in registry.items() if getattr(facts, fact) == value)


def kind_of_model(name: str) -> Kind:
    """Return what a model reads; images if there is no such model."""
    return MODELS[name].reads if name in MODELS else "images"


def kind_of_dataset(name: str) -> Kind:
    """Return what a data set contains; the first of `Kind` if it has several."""
    facts = DATASETS[name]
    return next(kind for kind in get_args(Kind) if getattr(facts, kind))


def datasets_of(kind: Kind) -> tuple[str, ...]:
    """Return the data sets for models of this kind."""
    return tuple(name for name, facts in DATASETS.items() if getattr(facts, kind))


IMAGE_MODELS = {name: MODELS[name] for name in names_with(MODELS, "reads", "images")}
TEXT_MODELS = {name: MODELS[name] for name in names_with(MODELS, "reads", "text")}
TOKEN_MODELS = {name: MODELS[name] for name in names_with(MODELS, "reads", "tokens")}
SEQUENCE_MODELS = TEXT_MODELS | TOKEN_MODELS
"""models whose samples have a `sequence_length`, in bytes or tokens"""


def modules(*registries: Mapping[str, Facts | DatasetFacts]) -> list[str]:
    """Return the modules that these registries load from, without duplicates."""
    targets = {target for registry in registries for facts in registry.values() for target in facts.targets}
    return sorted({target.partition(":")[0] for target in targets})


def load(target: str | Facts) -> Any:
    """Import the object named by an import string `package.module:name`, or by an entry of the registry.

    Raises ImportError or AttributeError if the target does not exist.
    """
    module, _, name = (target if isinstance(target, str) else target.target).partition(":")
    return getattr(import_module(module), name)
