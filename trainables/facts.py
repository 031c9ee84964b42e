"""Records of the registry: for each name an import string and the properties that the project needs to know.

Nothing here imports torch, so that planning and `--help` stay fast.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["images", "text", "tokens"]
"""what a model reads: images, the bytes of a text, or token ids"""


@dataclass(frozen=True)
class Facts:
    """An entry of the registry. `target` is the import string of the object that it loads.

    Entries with a field `package` need this optional package.
    """

    target: str

    @property
    def targets(self) -> tuple[str, ...]:
        """Import strings of this entry."""
        return (self.target,)


@dataclass(frozen=True)
class ModelFacts(Facts):
    reads: Kind = "images"
    smallest_image: int = 0
    """edge of the smallest accepted image, in pixels"""
    residual: bool = False
    """consists of residual blocks, whose last batch normalisation may start at zero"""
    imagenet_stem: bool = False
    """starts with a 7x7 convolution of stride 2 and 3x3 max pooling of stride 2"""
    vocabulary: int = 0
    """number of token ids that a model of tokens accepts"""
    sequence_length: int | None = None
    """default length of a sample. None: the trial's default"""
    carries_state: bool = False
    """carries state from step to step"""
    fits_cpu: bool = True
    """small enough to train on a CPU rank"""
    million_weights: float = 0.0
    """weights in millions, with 3 channels, 10 classes and images of 224 pixels; 0: unknown"""
    image_gflop: float = 0.0
    """1e9 operations of a forward and a backward pass over an image of 224 pixels, by `trainables.step.flops`"""
    package: str = ""


@dataclass(frozen=True)
class DatasetFacts:
    """`images`, `text` and `tokens`: import strings of the loaders for models of each kind; "" if not supported."""

    images: str = ""
    text: str = ""
    tokens: str = ""
    needs_data_dir: bool = False
    """the user must supply the files"""
    image_folder: bool = False
    """consists of image files, which can be converted to another storage format"""
    in_memory: bool = False
    """a single array of uint8 images, which can reside on the device and be cropped there"""
    on_device: bool = False
    """a single batch that stays on the device; nothing is loaded"""
    random: bool = False
    """random samples: there is nothing to learn"""
    image_size: int | None = None
    """default image edge in pixels: the images' own, or 224 as usual for ImageNet. None: the trial's default"""
    training_images: int | None = None
    """number of training images; None if it depends on the files"""
    found_by: tuple[str, ...] = ()
    """names of files or subfolders that identify a folder with this data set"""
    file_patterns: tuple[str, ...] = ()
    """patterns of files that identify the folder if no `found_by` entry of any data set does"""
    layout: str = ""
    """expected layout of an image folder"""
    missing: str = ""
    """import string of a function (folder, split) that returns the missing file, or None"""

    @property
    def targets(self) -> tuple[str, ...]:
        """Import strings of this entry."""
        return tuple(filter(None, (self.images, self.text, self.tokens)))


@dataclass(frozen=True)
class StrategyFacts(Facts):
    ddp_wrapped: bool = False
    """DistributedDataParallel averages the gradients"""
    options: tuple[str, ...] = ()
    """trial fields that have an effect under this strategy, but not under all strategies"""
    full_weights: bool = True
    """every rank holds all weights and optimizer state, so rank 0 can validate and save them"""
    capturable: bool = True
    """the step can be captured in a CUDA graph"""
    one_rank: bool = False
    one_process: bool = False
    """one process drives all GPUs of a node"""
    sent_as: str = ""
    """torch dtype of the gradients on the wire; "": unchanged"""
    sharded: bool = False
    """each rank holds a part of the weights (torch's fully_shard)"""
    traced: bool = False
    """it communicates not only in DDP's buckets, so that a profiler trace gives its communication breakdown"""
    package: str = ""


@dataclass(frozen=True)
class DecoderFacts(Facts):
    on_device: bool = False
    """takes encoded bytes on the host and writes pixels to the rank's device"""
    ahead: bool = False
    """decodes the next batches concurrently with the step, in a thread and a stream of its own"""


@dataclass(frozen=True)
class StorageFacts(Facts):
    holds_pixels: bool = False
    """images are stored decoded"""


@dataclass(frozen=True)
class PrecisionFacts(Facts):
    needs_gpu: bool = False
    two_weight_types: bool = False
    """keeps weights of two dtypes"""
    package: str = ""


@dataclass(frozen=True)
class OptimizerFacts(Facts):
    momentum: bool = False
    """has a momentum that can be corrected when the learning rate changes"""
    needs_momentum: bool = False
