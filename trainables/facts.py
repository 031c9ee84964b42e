"""What a name of the registry stands for: an import string and everything the project has to know about it.

One record per name, without torch, so that planning and `--help` may read them.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["images", "text"]


@dataclass(frozen=True)
class Facts:
    """An entry of the registry. `target`: import string of what it loads."""

    target: str

    @property
    def targets(self) -> tuple[str, ...]:
        """All import strings of this entry."""
        return (self.target,)


@dataclass(frozen=True)
class ModelFacts(Facts):
    reads: Kind = "images"
    smallest_image: int = 0
    """edge in pixels of the smallest image it takes"""
    residual: bool = False
    """made of residual blocks, whose last batch normalisation may start at zero"""
    imagenet_stem: bool = False
    """starts with a 7x7 convolution of stride 2 and 3x3 max pooling of stride 2"""
    carries_state: bool = False
    """keeps a state from step to step, which replicas made anew at every step would lose"""
    fits_cpu: bool = True
    """small enough to train on a CPU rank"""


@dataclass(frozen=True)
class DatasetFacts:
    """`images` and `text`: import strings of what loads it for models of each kind; "" if it has nothing for them."""

    images: str = ""
    text: str = ""
    needs_data_dir: bool = False
    """its files have to be given by the user"""
    image_folder: bool = False
    """made of image files, which may be converted into another storage format"""
    in_memory: bool = False
    """one array of uint8 images: may lie on the device as a whole, and be cropped there"""
    on_device: bool = False
    """one batch that stays on the device; nothing is loaded"""
    random: bool = False
    """its samples are random, so there is nothing to learn"""
    image_size: int | None = None
    """edge in pixels of its images unless `image_size` is given: their own, or ImageNet's usual; None: the trial's default"""
    training_images: int | None = None
    """number of images to train on; None if it depends on the files"""
    found_by: tuple[str, ...] = ()
    """entries of a folder that holds it"""
    file_patterns: tuple[str, ...] = ()
    """files of a folder that holds it and nothing else that is known"""
    layout: str = ""
    """where an image folder has its files"""
    missing: str = ""
    """import string of a function (folder, split) that returns which file is missing, or None"""

    @property
    def targets(self) -> tuple[str, ...]:
        """All import strings of this entry."""
        return tuple(filter(None, (self.images, self.text)))


@dataclass(frozen=True)
class StrategyFacts(Facts):
    ddp_wrapped: bool = False
    """DistributedDataParallel reduces the gradients"""
    options: tuple[str, ...] = ()
    """fields of a trial that mean something under this strategy and not under every other"""
    full_weights: bool = True
    """every rank holds all weights and optimizer state, so rank 0 can validate and save them"""
    capturable: bool = True
    """its step can be captured in a CUDA graph"""
    one_rank: bool = False
    one_process: bool = False
    """one process drives all GPUs of a node"""
    sent_as: str = ""
    """torch type in which gradients are sent; "": their own"""


@dataclass(frozen=True)
class DecoderFacts(Facts):
    on_device: bool = False
    """needs encoded bytes on the host and leaves pixels on the rank's device"""
    ahead: bool = False
    """decodes the next batches in a thread and a stream beside the step"""


@dataclass(frozen=True)
class StorageFacts(Facts):
    holds_pixels: bool = False
    """images are stored decoded"""


@dataclass(frozen=True)
class PrecisionFacts(Facts):
    needs_gpu: bool = False
    two_weight_types: bool = False
    """keeps weights of two types"""


@dataclass(frozen=True)
class OptimizerFacts(Facts):
    momentum: bool = False
    """has a momentum that can follow the learning rate"""
    needs_momentum: bool = False
