"""A trial: one point of a study's grid, as a frozen value with an identity of its own."""

import difflib
import hashlib
import json
import re
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from trainables.registry import (
    AHEAD_BATCHES,
    AHEAD_DECODERS,
    DDP_WRAPPED,
    IMAGE_DATASETS,
    IMAGE_FOLDERS,
    IMAGENET_STEMS,
    NAMES,
    ON_DEVICE_DECODERS,
    RESIDENT_DATASETS,
    SMALLEST_IMAGES,
    STRATEGY_OPTIONS,
    TEXT_DATASETS,
    TEXT_MODELS,
)
from trainables.training_rules import check_training

IMAGE_FOLDER_FIELDS = ("storage", "storage_place", "page_cache", "decode", "augment")
"""fields that say something of image folders only; other data sets have their defaults, and `augment` "device" too"""


class Trial(BaseModel):
    """What to measure, in full: nothing about a measurement is decided elsewhere.

    A rank is one process; with `device="cuda"` it holds one GPU, with `device="cpu"` it stands for one.
    Unknown names and impossible values raise pydantic's ValidationError; `explain` turns that into one line each.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field("resnet18", description="network to train")
    dataset: str = Field("fashion_mnist_sample", description="where samples come from")
    data_dir: str = Field("", description="folder of the data set's files; empty: what the project ships")
    workload: str = Field("", description="FILE.py:NAME of a user's own workload, in place of model and dataset")
    workload_digest: str = Field("", description="hash of that file, so that an edited one is another trial")
    image_size: int = Field(28, ge=8, le=4096, description="image edge in pixels")
    sequence_length: int = Field(128, ge=2, le=65_536, description="bytes of one sample of text")
    storage: str = Field("jpeg", description="format in which an image folder is kept")
    storage_place: Literal["disk", "shared_memory"] = Field(
        "disk", description="an image folder is read where it lies, or from a copy in shared memory (tmpfs)"
    )
    page_cache: Literal["as_is", "cold", "warm"] = Field(
        "as_is", description="state of the host's page cache for an image folder's files when the trial begins"
    )
    order: Literal["shuffled", "in_order"] = Field("shuffled", description="order of samples in an epoch")
    set_epoch: bool = Field(True, description="another shuffle every epoch; without it each epoch repeats the first")
    decode: str = Field("pil", description="what decodes JPEG images")
    augment: Literal["none", "cpu", "device"] = Field(
        "none",
        description="where images are cropped at random and flipped: nowhere, by loaders, or on the rank's device",
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="what a rank computes on")
    world_size: int = Field(1, ge=1, description="ranks, one GPU each")
    nodes: int = Field(1, ge=1, description="hosts, with world_size / nodes ranks on each")
    cpus_per_rank: int = Field(1, ge=1, description="CPU cores of one rank: its threads and its loaders' share")
    pin_cores: bool = Field(
        False,
        description="CPU ranks: each computes on cores of its own, `cpus_per_rank` of them; loaders are left free",
    )
    batch_per_gpu: int = Field(32, ge=1, description="samples a rank and step")
    loader_workers: int = Field(0, ge=0, le=256, description="loader processes a rank; 0 loads in the rank itself")
    prefetch_batches: int = Field(2, ge=1, le=64, description="batches that each loader process keeps ready")
    pin_memory: bool = Field(True, description="copy batches to page-locked memory (CUDA)")
    non_blocking: bool = Field(True, description="do not wait for the copy to the device (CUDA)")
    copy_ahead: bool = Field(
        False, description="copy batches to the device before they are asked for, in a stream beside the step (CUDA)"
    )
    precision: str = Field("fp32", description="number format of the step")
    parallel: str = Field("ddp", description="how ranks share the work")
    sync_batch_norm: bool = Field(False, description="batch normalisation over all ranks' samples")
    broadcast_buffers: bool = Field(True, description="DDP: rank 0's buffers go to all ranks before each forward pass")
    bucket_mb: float = Field(25.0, gt=0, le=10_000, description="DDP: MiB of gradients that are reduced together")
    gradient_as_bucket_view: bool = Field(
        True, description="DDP: gradients become views of its buckets, so that none is copied back from one"
    )
    static_graph: bool = Field(
        False, description="DDP: each step uses the same weights, so that it need not look for unused ones"
    )
    accumulation_steps: int = Field(1, ge=1, le=4096, description="batches whose gradients make one optimizer step")
    execution: str = Field("eager", description="how the step's operations are issued")
    memory_format: str = Field("contiguous", description="layout of image tensors")
    rewritten_stem: bool = Field(
        False,
        description="ResNet's first convolution and pooling in forms that GPUs may run faster; the step is compiled",
    )
    optimizer: str = Field("sgd", description="what turns gradients into updates")
    learning_rate: float = Field(
        0.01, gt=0, allow_inf_nan=False, description="learning rate for a global batch of `reference_batch`"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of SGD and LARS; 0: none")
    weight_decay: float = Field(5e-4, ge=0, allow_inf_nan=False, description="weight decay")
    epochs: int = Field(
        0, ge=0, le=100_000, description="epochs to train, with validation after each; 0: timed windows instead"
    )
    target_accuracy: float | None = Field(
        None, gt=0, le=1, description="share of validation samples that are right at which training ends early"
    )
    reference_batch: int = Field(128, ge=1, description="global batch for which `learning_rate` is meant")
    lr_rule: Literal["none", "linear", "sqrt"] = Field(
        "none", description="how the learning rate grows with global batch / reference batch"
    )
    warmup: Literal["none", "constant", "gradual"] = Field(
        "none",
        description="the first `warmup_epochs` use the unscaled learning rate, or rise from it to the scaled one, step by step",
    )
    warmup_epochs: float = Field(5.0, ge=0, allow_inf_nan=False, description="length of the learning rate's warm-up")
    decay: Literal["constant", "step", "cosine"] = Field(
        "constant", description="course of the learning rate after its warm-up"
    )
    decay_norm_and_bias: bool = Field(True, description="weight decay on batch normalisation and biases too")
    zero_gamma: bool = Field(False, description="the last batch normalisation of each residual block begins at zero")
    momentum_correction: bool = Field(True, description="momentum follows a change of the learning rate")
    loss_mean: Literal["global", "rank"] = Field(
        "global", description="a sample weighs 1 / global batch, or as much as its rank's share of samples makes it"
    )
    shared_shuffle: bool = Field(True, description="ranks divide one shuffle of the data set, or each draws its own")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of a target that is spread over all classes")
    resident_data: bool = Field(
        False, description="the data set lies on the device, where batches are gathered and augmented without loaders"
    )
    noise_scale: bool = Field(False, description="estimate the gradient noise scale while training")
    deterministic: bool = Field(False, description="deterministic algorithms only; slower")
    warmup_steps: int = Field(
        3,
        ge=2,
        description="steps before any timing, at least two: DDP rebuilds its buckets after the first; see settling_steps",
    )
    steps: int = Field(
        20, ge=1, description="steps of a timed window; the plain one may need more where loader processes feed it"
    )
    median_width: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="timed windows end before `steps` once the 95 % interval of the mean step time is narrower than this "
        "share of it, such as 0.01; none: never",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="seed of weights, shuffle and augmentation")
    interconnect: Literal["auto", "no_p2p", "socket"] = Field(
        "auto", description="what NCCL may use: auto, or a slow interconnect emulated by forbidding peer-to-peer copies"
    )
    account_steps: int = Field(
        10,
        ge=0,
        le=10_000,
        description="steps of each window of the communication account; 0: neither it nor a ceiling",
    )
    sweep_bytes: int = Field(2**30, ge=4, le=2**34, description="largest message of the all-reduce sweep")
    profile_ranks: str = Field("", description="ranks that keep a profiler trace: 0+3, or all; empty: none")
    repeat: int = Field(0, ge=0, description="which repetition this is")

    @field_validator(*NAMES)
    @classmethod
    def _known_name(cls, value: str, info: Any) -> str:
        names = list(NAMES[info.field_name])
        if value not in names:
            near = difflib.get_close_matches(value, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"is not known; allowed: {', '.join(names)}{hint}")
        return value

    @field_validator("workload")
    @classmethod
    def _file_and_name(cls, value: str) -> str:
        file_name, _, name = value.rpartition(":")
        if value and not (file_name.endswith(".py") and name.isidentifier()):
            raise ValueError("is not FILE.py:NAME")
        return value

    @field_validator("profile_ranks")
    @classmethod
    def _ranks(cls, value: str) -> str:
        if value not in ("", "all") and not re.fullmatch(r"[0-9]{1,6}(\+[0-9]{1,6})*", value):
            raise ValueError("names no ranks; allowed: all, or numbers joined by +, such as 0+3")
        return value

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.world_size % self.nodes:
            raise ValueError(
                f"world_size {self.world_size} does not divide over nodes {self.nodes}: each node gets equally many ranks"
            )
        if self.parallel == "none" and self.world_size > 1:
            raise ValueError(f"parallel 'none' trains on one rank; world_size is {self.world_size}: use parallel 'ddp'")
        if self.parallel == "dp" and self.nodes > 1:
            raise ValueError(f"parallel 'dp' is one process on one node; nodes is {self.nodes}: use parallel 'ddp'")
        if self.parallel == "dp" and self.execution != "eager":
            raise ValueError(
                f"parallel 'dp' runs replicas in threads, op by op; execution is {self.execution!r}: use 'eager'"
            )
        if self.execution in ("graph", "compile_graph"):
            if self.parallel in ("zero1", "fsdp2"):
                raise ValueError(
                    f"execution {self.execution!r} captures one fixed step; parallel {self.parallel!r} is none: "
                    "use parallel 'none', 'ddp', 'ddp_fp16', 'ddp_bf16' or 'ddp_delayed'"
                )
            if self.accumulation_steps > 1 and not self.epochs:
                raise ValueError(
                    f"execution {self.execution!r} captures one batch; accumulation_steps is {self.accumulation_steps}: use 1"
                )
        if self.optimizer == "nesterov" and self.momentum == 0:
            raise ValueError(
                "momentum 0.0 leaves optimizer 'nesterov' nothing to look ahead by; allowed: above 0, or optimizer 'sgd'"
            )
        for field, strategies in STRATEGY_OPTIONS.items():
            if getattr(self, field) != type(self).model_fields[field].default and self.parallel not in strategies:
                raise ValueError(
                    f"{field} is an option of DDP; parallel is {self.parallel!r}: use one of {', '.join(strategies)}"
                )
        if self.sync_batch_norm and self.parallel in ("none", "dp"):
            raise ValueError(f"sync_batch_norm joins ranks; parallel {self.parallel!r} has one: use parallel 'ddp'")
        is_text = self.model in TEXT_MODELS
        if not self.workload and self.dataset not in (TEXT_DATASETS if is_text else IMAGE_DATASETS):
            reads, holds = ("text", "images") if is_text else ("images", "text")
            raise ValueError(
                f"model {self.model!r} reads {reads}, dataset {self.dataset!r} holds {holds}; allowed: datasets "
                f"{', '.join(TEXT_DATASETS if is_text else IMAGE_DATASETS)}; or a model of {holds}, such as "
                f"{'resnet18' if is_text else 'mlstm1024'}"
            )
        smallest = 0 if self.workload else SMALLEST_IMAGES.get(self.model, 0)
        if self.image_size < smallest:
            raise ValueError(
                f"image_size {self.image_size} is too small for model {self.model!r}; allowed: {smallest} or more"
            )
        if self.rewritten_stem and (self.workload or self.model not in IMAGENET_STEMS or self.image_size % 2):
            raise ValueError(
                f"rewritten_stem is for models {' and '.join(IMAGENET_STEMS)} on images of an even edge; "
                f"this is model {self.model!r} at {self.image_size} pixels: leave it out"
            )
        if self.rewritten_stem and not self.compiled:
            raise ValueError(
                f"rewritten_stem is slower where no compiler fuses its parts; execution is {self.execution!r}: use "
                "execution 'compile' or 'compile_graph'"
            )
        if self.dataset == "synthetic" and not self.workload and self.loader_workers:
            raise ValueError(
                f"loader_workers {self.loader_workers} has nothing to load: dataset 'synthetic' is resident on the device; allowed: 0"
            )
        if not self.workload and (is_text or self.dataset == "synthetic"):
            for field in ("order", "set_epoch"):
                if getattr(self, field) != type(self).model_fields[field].default:
                    what = "one batch for ever" if self.dataset == "synthetic" else "text, which is read as it goes on"
                    raise ValueError(
                        f"{field} is about samples in epochs; dataset {self.dataset!r} is {what}: leave {field} out"
                    )
        if self.order == "in_order" and not self.set_epoch:
            raise ValueError(
                "set_epoch false repeats the first shuffle; order 'in_order' has none: leave set_epoch out"
            )
        self._possible_storage()
        check_training(self)
        return self

    def _possible_storage(self) -> None:
        """Raises ValueError where fields of image folders do not go together."""
        if not self.workload and self.dataset not in IMAGE_FOLDERS:
            for field in IMAGE_FOLDER_FIELDS:
                value, default = getattr(self, field), Trial.model_fields[field].default
                cropped = field == "augment" and self.dataset in RESIDENT_DATASETS
                allowed = [default, "device"] if cropped else [default]
                if value not in allowed:
                    raise ValueError(
                        f"{field} {value!r} is for image folders ({', '.join(IMAGE_FOLDERS)}); "
                        f"dataset {self.dataset!r} has {' and '.join(map(repr, allowed))} only"
                    )
        if self.storage_place == "shared_memory" and self.page_cache != "as_is":
            raise ValueError(
                f"page_cache {self.page_cache!r} has no meaning with storage_place 'shared_memory', which is memory itself; allowed: as_is"
            )
        if self.storage == "arrow_raw" and self.decode != "pil":
            raise ValueError(
                f"decode {self.decode!r} has nothing to decode: storage 'arrow_raw' holds pixels that `convert` decoded with pil; allowed: pil"
            )
        if self.decode in ON_DEVICE_DECODERS and (self.parallel == "dp" or self.captured):
            raise ValueError(
                f"decode {self.decode!r} begins with bytes of unlike lengths on the host, which neither parallel 'dp' can divide "
                "nor a CUDA graph can hold; use decode 'pil' or 'torchvision'"
            )
        if self.decode in ON_DEVICE_DECODERS and self.augment == "cpu":
            raise ValueError(
                f"augment 'cpu' needs pixels in the loader, and decode {self.decode!r} makes them on the device; use augment 'device'"
            )

    @property
    def global_batch(self) -> int:
        """Samples that all ranks together take in one optimizer step."""
        return self.world_size * self.batch_per_gpu * self.accumulation_steps

    @property
    def compiled(self) -> bool:
        """Whether torch.compile makes the model's kernels."""
        return self.execution in ("compile", "compile_graph")

    @property
    def captured(self) -> bool:
        """Whether the step is replayed as a CUDA graph."""
        return self.execution in ("graph", "compile_graph")

    @property
    def processes(self) -> int:
        """Ranks that take part: DataParallel drives all its GPUs from one."""
        return 1 if self.parallel == "dp" else self.world_size

    @property
    def batch_per_process(self) -> int:
        """Samples that a taking-part rank loads at a time."""
        return self.batch_per_gpu * (self.world_size // self.processes)

    @property
    def samples_per_step(self) -> int:
        """Samples behind one optimizer step of a taking-part rank."""
        return self.batch_per_process * self.accumulation_steps

    @property
    def window_steps(self) -> int:
        """The most steps of the plain window; those after it, which meet loaders in their stride, have `steps`.

        A loader's queues hold `loader_workers * prefetch_batches` batches, and what is made ready ahead has its own; a window
        ten times as long keeps what was ready before it began below a tenth of what it takes. It ends after `steps`, or
        twice, four times ... as many, where these are seen to make as much as it takes (`run`).
        """
        return max(self.steps, self.least_window_steps)

    @property
    def least_window_steps(self) -> int:
        """Steps before which a plain window that ends by `median_width` must not end; see `window_steps`."""
        ahead = AHEAD_BATCHES if self.decode in AHEAD_DECODERS or self.copy_ahead else 0
        return 10 * (self.loader_workers * self.prefetch_batches + ahead)

    @property
    def settling_steps(self) -> int:
        """Steps that a new wrapper makes before it is timed: `warmup_steps`, and under DDP on CUDA at least 11.

        There DDP's logger waits for the device in each of its first ten steps and once more after the last
        (`should_collect_runtime_stats` of torch's reducer), which empties the launch queue: a step of ResNet-50 at batch
        256 takes 59 ms and then 55 (benchmarks/results/account).
        """
        waits = self.device == "cuda" and self.parallel in DDP_WRAPPED
        return max(self.warmup_steps, 11) if waits else self.warmup_steps

    def profiles(self, rank: int) -> bool:
        """Whether this rank of the trial keeps a profiler trace."""
        return self.profile_ranks == "all" or rank in map(int, filter(None, self.profile_ranks.split("+")))

    @property
    def trial_id(self) -> str:
        """A readable slug and eight hex digits of a hash over every field. For people and folders: nothing parses it."""
        digest = hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()[:8]
        what = self.workload.rpartition(":")[2] if self.workload else self.model
        return (
            f"{what}-{self.parallel}-{self.precision}-n{self.nodes}x{self.world_size // self.nodes}"
            f"-b{self.batch_per_gpu}-w{self.loader_workers}-r{self.repeat}-{digest}"
        )

    def but(self, **changes: Any) -> "Trial":
        """This trial with other values in some fields, validated again."""
        return Trial.model_validate(self.model_dump() | changes)


def explain(error: ValidationError) -> list[str]:
    """One line for each thing wrong with a trial: the field, the value, and what is allowed."""
    lines = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            near = difflib.get_close_matches(field, Trial.model_fields, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; fields: {', '.join(Trial.model_fields)}"
            lines.append(f"{field!r} is not a field of a trial{hint}")
        elif problem["type"] == "value_error":
            message = str(problem["ctx"]["error"])
            lines.append(f"{field} {problem['input']!r} {message}" if field else message)
        else:
            what = problem["msg"][0].lower() + problem["msg"][1:]
            lines.append(f"{field} {problem['input']!r}: {what}")
    return lines
