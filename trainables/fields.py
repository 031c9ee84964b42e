"""The fields of a trial: each with its default, its limits, its kind, and how reports compare its values."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from trainables.registry import AHEAD_BATCHES, DECODERS, NAMES, PARALLEL, TEXT_MODELS

FieldKind = Literal[
    "loading", "storage", "execution", "communication", "layout", "batch", "machine", "workload", "recipe", "training",
    "timing", "run",
]  # fmt: skip
"""What a field decides: how batches reach the device, how samples are stored and read, how a step runs, what ranks
exchange, how many ranks there are, how large a batch is, on which machine (or which edition of files) a trial runs, what is
computed, what is learned, how a training by epochs goes, how a step is timed, and which run of a configuration it is.
Reports compare fields in this order."""


@dataclass(frozen=True)
class FieldFacts:
    """What is declared of a field beside its type, default and limits.

    order: values from the reference on, against which reports compare others; () for the smallest first. table: whether
    reports compare its values in a table of their own, in that of all settings, or nowhere. needs_epochs: it means
    something only in a training by epochs. image_folders_only: it means something only for image folders.
    """

    kind: FieldKind
    order: tuple[Any, ...] = ()
    table: Literal["own", "settings", ""] = ""
    needs_epochs: bool = False
    image_folders_only: bool = False


def field(
    default: Any,
    kind: FieldKind,
    description: str,
    *,
    order: tuple[Any, ...] = (),
    table: Literal["own", "settings", ""] = "",
    needs_epochs: bool = False,
    image_folders_only: bool = False,
    **limits: Any,
) -> Any:
    """Declare a field of a trial; see `FieldFacts`. limits: of its value, as pydantic's `Field` takes them."""
    facts = FieldFacts(kind, order, table, needs_epochs, image_folders_only)
    return Field(default, description=description, json_schema_extra={"facts": facts}, **limits)  # type: ignore[dict-item]


class TrialFields(BaseModel):
    """The fields of a trial, each valid by itself; whether they go together is what `Trial` checks.

    A rank is one process; with `device="cuda"` it holds one GPU, with `device="cpu"` it stands for one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = field("resnet18", "workload", "network to train")
    dataset: str = field("fashion_mnist_sample", "workload", "where samples come from")
    data_dir: str = field("", "machine", "folder of the data set's files; empty: what the project ships")
    workload: str = field("", "workload", "FILE.py:NAME of a user's own workload, in place of model and dataset")
    workload_digest: str = field("", "machine", "hash of that file, so that an edited one is another trial")
    image_size: int = field(28, "workload", "image edge in pixels", ge=8, le=4096, table="settings")
    sequence_length: int = field(128, "workload", "bytes of one sample of text", ge=2, le=65_536, table="settings")
    storage: str = field(
        "jpeg", "storage", "format in which an image folder is kept", table="own", image_folders_only=True
    )
    storage_place: Literal["disk", "shared_memory"] = field(
        "disk",
        "storage",
        "an image folder is read where it lies, or from a copy in shared memory (tmpfs)",
        table="settings",
        image_folders_only=True,
    )
    page_cache: Literal["as_is", "cold", "warm"] = field(
        "as_is",
        "storage",
        "state of the host's page cache for an image folder's files when the trial begins",
        table="settings",
        image_folders_only=True,
    )
    order: Literal["shuffled", "in_order"] = field(
        "shuffled", "storage", "order of samples in an epoch", table="settings"
    )
    set_epoch: bool = field(True, "storage", "another shuffle every epoch; without it each epoch repeats the first")
    decode: str = field("pil", "storage", "what decodes JPEG images", table="settings", image_folders_only=True)
    augment: Literal["none", "cpu", "device"] = field(
        "none",
        "storage",
        "where images are cropped at random and flipped: nowhere, by loaders, or on the rank's device",
        table="settings",
        image_folders_only=True,
    )
    device: Literal["cpu", "cuda"] = field("cpu", "execution", "what a rank computes on")
    world_size: int = field(1, "layout", "ranks, one GPU each", ge=1)
    nodes: int = field(1, "layout", "hosts, with world_size / nodes ranks on each", ge=1)
    cpus_per_rank: int = field(
        1, "machine", "CPU cores of one rank: its threads and its loaders' share", ge=1, table="settings"
    )
    pin_cores: bool = field(
        False,
        "execution",
        "CPU ranks: each computes on cores of its own, `cpus_per_rank` of them; loaders are left free",
        table="settings",
    )
    batch_per_gpu: int = field(32, "batch", "samples a rank and step", ge=1)
    loader_workers: int = field(
        0, "loading", "loader processes a rank; 0 loads in the rank itself", ge=0, le=256, table="settings"
    )
    prefetch_batches: int = field(
        2, "loading", "batches that each loader process keeps ready", ge=1, le=64, table="settings"
    )
    pin_memory: bool = field(
        True, "loading", "copy batches to page-locked memory (CUDA)", table="settings", order=(False, True)
    )
    non_blocking: bool = field(
        True, "loading", "do not wait for the copy to the device (CUDA)", table="settings", order=(False, True)
    )
    copy_ahead: bool = field(
        False,
        "loading",
        "copy batches to the device before they are asked for, in a stream beside the step (CUDA)",
        table="settings",
    )
    precision: str = field("fp32", "execution", "number format of the step", table="own")
    parallel: str = field("ddp", "execution", "how ranks share the work", table="own")
    sync_batch_norm: bool = field(
        False, "communication", "batch normalisation over all ranks' samples", table="settings"
    )
    broadcast_buffers: bool = field(
        True, "communication", "DDP: rank 0's buffers go to all ranks before each forward pass", table="settings"
    )
    bucket_mb: float = field(
        25.0,
        "communication",
        "DDP: MiB of gradients that are reduced together",
        gt=0,
        le=10_000,
        order=(25.0,),
        table="settings",
    )
    gradient_as_bucket_view: bool = field(
        True,
        "communication",
        "DDP: gradients become views of its buckets, so that none is copied back from one",
        table="settings",
    )
    static_graph: bool = field(
        False,
        "communication",
        "DDP: each step uses the same weights, so that it need not look for unused ones",
        table="settings",
    )
    accumulation_steps: int = field(
        1, "batch", "batches whose gradients make one optimizer step", ge=1, le=4096, order=(1,), table="settings"
    )
    execution: str = field("eager", "execution", "how the step's operations are issued", table="own")
    memory_format: str = field("contiguous", "execution", "layout of image tensors", table="settings")
    rewritten_stem: bool = field(
        False,
        "execution",
        "ResNet's first convolution and pooling in forms that GPUs may run faster; the step is compiled",
    )
    optimizer: str = field("sgd", "recipe", "what turns gradients into updates")
    learning_rate: float = field(
        0.01, "recipe", "learning rate for a global batch of `reference_batch`", gt=0, allow_inf_nan=False
    )
    momentum: float = field(0.9, "recipe", "momentum of SGD and LARS; 0: none", ge=0, lt=1)
    weight_decay: float = field(5e-4, "recipe", "weight decay", ge=0, allow_inf_nan=False)
    epochs: int = field(
        0, "training", "epochs to train, with validation after each; 0: timed windows instead", ge=0, le=100_000
    )
    target_accuracy: float | None = field(
        None,
        "training",
        "share of validation samples that are right at which training ends early",
        gt=0,
        le=1,
        needs_epochs=True,
    )
    reference_batch: int = field(128, "recipe", "global batch for which `learning_rate` is meant", ge=1)
    lr_rule: Literal["none", "linear", "sqrt"] = field(
        "none", "recipe", "how the learning rate grows with global batch / reference batch", needs_epochs=True
    )
    warmup: Literal["none", "constant", "gradual"] = field(
        "none",
        "recipe",
        "the first `warmup_epochs` use the unscaled learning rate, or rise from it to the scaled one, step by step",
        needs_epochs=True,
    )
    warmup_epochs: float = field(5.0, "recipe", "length of the learning rate's warm-up", ge=0, allow_inf_nan=False)
    decay: Literal["constant", "step", "cosine"] = field(
        "constant", "recipe", "course of the learning rate after its warm-up", needs_epochs=True
    )
    decay_norm_and_bias: bool = field(True, "recipe", "weight decay on batch normalisation and biases too")
    zero_gamma: bool = field(False, "recipe", "the last batch normalisation of each residual block begins at zero")
    momentum_correction: bool = field(
        True, "recipe", "momentum follows a change of the learning rate", needs_epochs=True
    )
    loss_mean: Literal["global", "rank"] = field(
        "global",
        "recipe",
        "a sample weighs 1 / global batch, or as much as its rank's share of samples makes it",
        needs_epochs=True,
    )
    shared_shuffle: bool = field(
        True, "recipe", "ranks divide one shuffle of the data set, or each draws its own", needs_epochs=True
    )
    label_smoothing: float = field(0.0, "recipe", "share of a target that is spread over all classes", ge=0, lt=1)
    resident_data: bool = field(
        False,
        "training",
        "the data set lies on the device, where batches are gathered and augmented without loaders",
        needs_epochs=True,
    )
    noise_scale: bool = field(False, "training", "estimate the gradient noise scale while training", needs_epochs=True)
    deterministic: bool = field(False, "execution", "deterministic algorithms only; slower")
    warmup_steps: int = field(
        3,
        "timing",
        "steps before any timing, at least two: DDP rebuilds its buckets after the first; see settling_steps",
        ge=2,
    )
    steps: int = field(
        20, "timing", "steps of a timed window; the plain one may need more where loader processes feed it", ge=1
    )
    median_width: float | None = field(
        None,
        "timing",
        "timed windows end before `steps` once the 95 % interval of the mean step time is narrower than this share of it, such as 0.01; none: never",
        gt=0,
        lt=1,
    )
    seed: int = field(0, "run", "seed of weights, shuffle and augmentation", ge=0, lt=2**31)
    interconnect: Literal["auto", "no_p2p", "socket"] = field(
        "auto",
        "communication",
        "what NCCL may use: auto, or a slow interconnect emulated by forbidding peer-to-peer copies",
        table="own",
    )
    account_steps: int = field(
        10, "timing", "steps of each window of the communication account; 0: neither it nor a ceiling", ge=0, le=10_000
    )
    sweep_bytes: int = field(2**30, "timing", "largest message of the all-reduce sweep", ge=4, le=2**34)
    profile_ranks: str = field("", "timing", "ranks that keep a profiler trace: 0+3, or all; empty: none")
    repeat: int = field(0, "run", "which repetition this is", ge=0)

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
        return 1 if PARALLEL[self.parallel].one_process else self.world_size

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
        ahead = AHEAD_BATCHES if DECODERS[self.decode].ahead or self.copy_ahead else 0
        return 10 * (self.loader_workers * self.prefetch_batches + ahead)

    @property
    def settling_steps(self) -> int:
        """Steps that a new wrapper makes before it is timed: `warmup_steps`, and under DDP on CUDA at least 11.

        There DDP's logger waits for the device in each of its first ten steps and once more after the last
        (`should_collect_runtime_stats` of torch's reducer), which empties the launch queue: a step of ResNet-50 at batch
        256 takes 59 ms and then 55 (benchmarks/results/account).
        """
        waits = self.device == "cuda" and PARALLEL[self.parallel].ddp_wrapped
        return max(self.warmup_steps, 11) if waits else self.warmup_steps

    def profiles(self, rank: int) -> bool:
        """Whether this rank of the trial keeps a profiler trace."""
        return self.profile_ranks == "all" or rank in map(int, filter(None, self.profile_ranks.split("+")))


def _declared() -> Mapping[str, FieldFacts]:
    """What is declared of each field, by name."""
    return {name: info.json_schema_extra["facts"] for name, info in TrialFields.model_fields.items()}  # type: ignore[index, misc]


FIELD_FACTS = _declared()


def fields_of_kind(*kinds: FieldKind) -> tuple[str, ...]:
    """Names of the fields of these kinds, as declared."""
    return tuple(name for name, facts in FIELD_FACTS.items() if facts.kind in kinds)


def reference_order(name: str) -> list[Any]:
    """A field's values from the reference on: its default, then others as declared. Empty for numbers without an order."""
    info = TrialFields.model_fields[name]
    if order := FIELD_FACTS[name].order:
        return list(order)
    values: list[Any] = (
        list(NAMES[name]) if name in NAMES else [value for value in get_args(info.annotation) if isinstance(value, str)]
    )
    if info.annotation is bool:
        values = [True, False]
    return [info.default, *(value for value in values if value != info.default)] if values else []


def only_with(name: str) -> dict[str, list[Any]]:
    """Fields, each with the values with which the field `name` means something; empty if it does with any."""
    if name == "sequence_length":
        return {"model": list(TEXT_MODELS)}
    strategies = [strategy for strategy, facts in PARALLEL.items() if name in facts.options]
    return {"parallel": strategies} if strategies else {}


def explain(error: ValidationError) -> list[str]:
    """One line for each thing wrong with a trial: the field, the value, and what is allowed."""
    lines = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            near = difflib.get_close_matches(field, TrialFields.model_fields, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; fields: {', '.join(TrialFields.model_fields)}"
            lines.append(f"{field!r} is not a field of a trial{hint}")
        elif problem["type"] == "value_error":
            message = str(problem["ctx"]["error"])
            lines.append(f"{field} {problem['input']!r} {message}" if field else message)
        else:
            what = problem["msg"][0].lower() + problem["msg"][1:]
            lines.append(f"{field} {problem['input']!r}: {what}")
    return lines
