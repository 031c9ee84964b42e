"""The fields of a trial: defaults, limits, kinds, and how reports compare their values."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError, field_validator

from trainables.field_facts import DataFields, FieldFacts, FieldKind, field
from trainables.messages import near
from trainables.registry import AHEAD_BATCHES, DECODERS, NAMES, PARALLEL, SEQUENCE_MODELS


class TrialFields(DataFields):
    """The fields of a trial, validated one by one. `Trial` also checks their combination.

    A rank is one process. With `device="cuda"` it drives one GPU; with `device="cpu"` it takes the place of one.
    """

    model: str = field("resnet18", "workload", "network to train", label="{value}")
    dataset: str = field("fashion_mnist_sample", "workload", "data set to train on", label="{value}")
    data_dir: str = field("", "machine", "folder with the data set's files; empty: files shipped with the project")
    workload: str = field(
        "", "workload", "FILE.py:NAME of a user's own workload, replaces model and dataset", label="{file}"
    )
    workload_digest: str = field("", "machine", "hash of the workload file, so that an edited file is another trial")
    image_size: int = field(28, "workload", "image edge in pixels", ge=8, le=4096, table="settings")
    sequence_length: int = field(128, "workload", "bytes or tokens per text sample", ge=2, le=65_536, table="settings")
    device: Literal["cpu", "cuda"] = field(
        "cpu", "execution", "device type of the ranks", any_door=True, label="{value}"
    )
    world_size: int = field(
        1,
        "layout",
        "number of ranks, one GPU per rank",
        ge=1,
        any_door=True,
        label="{value} {rank}(s)",
        header="{rank}s",
    )
    nodes: int = field(
        1, "layout", "number of hosts, world_size / nodes ranks per host", ge=1, any_door=True, label="{value} node(s)"
    )
    cpus_per_rank: int = field(
        1,
        "machine",
        "CPU cores that Ray reserves per rank, and threads of the rank; its loaders may use more",
        ge=1,
        table="settings",
        any_door=True,
        label="{value} CPU core(s) per rank",
    )
    pin_cores: bool = field(
        False,
        "execution",
        "CPU ranks: pin each rank to `cpus_per_rank` cores of its own; loaders are not pinned",
        table="settings",
    )
    batch_per_gpu: int = field(
        32, "batch", "samples per rank and step", ge=1, label="batch {value:,} per {rank}", header="batch per {rank}"
    )
    precision: str = field("fp32", "execution", "number format of the step", table="own", label="{value}")
    parallel: str = field(
        "ddp", "execution", "parallel strategy: how ranks share the work", table="own", label="{value}"
    )
    shard_ranks: int | None = field(
        None,
        "communication",
        "HSDP: consecutive ranks that share one copy of the weights; none: those of a node, or half of a single node's",
        ge=1,
        table="settings",
    )
    sync_batch_norm: bool = field(
        False, "communication", "compute batch normalisation over the samples of all ranks", table="settings"
    )
    broadcast_buffers: bool = field(
        True, "communication", "DDP: broadcast rank 0's buffers before each forward pass", table="settings"
    )
    bucket_mb: float = field(
        25.0,
        "communication",
        "DDP: bucket size, MiB of gradients that are reduced together",
        gt=0,
        le=10_000,
        order=(25.0,),
        table="settings",
    )
    first_bucket_mb: float | None = field(
        None,
        "communication",
        "DDP: size of the bucket of the gradients that are ready first, MiB; none: `bucket_mb`",
        gt=0,
        le=10_000,
        table="settings",
    )
    gradient_as_bucket_view: bool = field(
        True, "communication", "DDP: gradients are views of the buckets: no copies", table="settings"
    )
    static_graph: bool = field(
        False,
        "communication",
        "DDP: assume that every step uses the same parameters, so that DDP need not search for unused ones",
        table="settings",
    )
    find_unused_parameters: bool = field(
        False, "communication", "DDP: search every step for parameters without a gradient; slower", table="settings"
    )
    accumulation_steps: int = field(
        1, "batch", "batches accumulated per optimizer step", ge=1, le=4096, order=(1,), table="settings"
    )
    execution: str = field("eager", "execution", "how the step's operations are launched", table="own")
    memory_format: str = field("contiguous", "execution", "layout of image tensors", table="settings", label="{value}")
    rewritten_stem: bool = field(
        False,
        "execution",
        "replace ResNet's first convolution and pooling by forms that can be faster on GPUs; requires compilation",
    )
    fused_loss: bool = field(
        False,
        "execution",
        "language models: compute output layer and loss together, some tokens at a time, without storing logits",
        table="settings",
    )
    attention: Literal["auto", "cudnn", "flash", "efficient", "math"] = field(
        "auto", "execution", "kernels of attention; auto: torch chooses", table="settings"
    )
    split_graph: bool = field(
        True, "execution", "DDP: compile a graph per bucket, sent during the backward pass, or one", table="settings"
    )
    activation_checkpointing: Literal["none", "selective", "full"] = field(
        "none",
        "execution",
        "language models: activations of a block that the backward pass computes again instead of storing them: none, "
        "all but matrix products and attention (selective), or all (full)",
        table="settings",
    )
    optimizer: str = field("sgd", "recipe", "optimizer")
    learning_rate: float = field(
        0.01, "recipe", "learning rate for a global batch of `reference_batch`", gt=0, allow_inf_nan=False
    )
    momentum: float = field(0.9, "recipe", "momentum of SGD and LARS; 0: no momentum", ge=0, lt=1)
    weight_decay: float = field(5e-4, "recipe", "weight decay", ge=0, allow_inf_nan=False)
    epochs: int = field(
        0, "training", "epochs to train, with validation after each; 0: measure timed windows", ge=0, le=100_000
    )
    target_accuracy: float | None = field(
        None,
        "training",
        "top-1 validation accuracy (0 to 1) at which training stops early; none: never",
        gt=0,
        le=1,
        needs_epochs=True,
    )
    reference_batch: int = field(128, "recipe", "global batch size to which `learning_rate` applies", ge=1)
    lr_rule: Literal["none", "linear", "sqrt"] = field(
        "none", "recipe", "scaling of the learning rate with global batch / `reference_batch`", needs_epochs=True
    )
    warmup: Literal["none", "constant", "gradual"] = field(
        "none",
        "recipe",
        "learning rate during `warmup_epochs`: scaled, unscaled (constant), or rising step by step from unscaled to "
        "scaled (gradual)",
        needs_epochs=True,
    )
    warmup_epochs: float = field(
        5.0, "recipe", "length of the learning rate warm-up in epochs", ge=0, allow_inf_nan=False
    )
    decay: Literal["constant", "step", "cosine"] = field(
        "constant", "recipe", "learning rate schedule after the warm-up", needs_epochs=True
    )
    decay_norm_and_bias: bool = field(True, "recipe", "apply weight decay to batch normalisation and biases too")
    zero_gamma: bool = field(False, "recipe", "start the last batch normalisation of each residual block at zero")
    momentum_correction: bool = field(
        True, "recipe", "correct the momentum when the learning rate changes", needs_epochs=True
    )
    loss_mean: Literal["global", "rank"] = field(
        "global", "recipe", "average the loss over the global batch, or over each rank's own samples", needs_epochs=True
    )
    shared_shuffle: bool = field(
        True, "recipe", "ranks share one shuffle of the data set; if false, each shuffles by itself", needs_epochs=True
    )
    label_smoothing: float = field(0.0, "recipe", "share of the target spread over all classes", ge=0, lt=1)
    resident_data: bool = field(
        False,
        "training",
        "keep the data set on the device and gather and augment batches there, without loaders",
        needs_epochs=True,
    )
    noise_scale: bool = field(False, "training", "estimate the gradient noise scale during training", needs_epochs=True)
    deterministic: bool = field(False, "execution", "use deterministic algorithms only; slower")
    warmup_steps: int = field(
        3,
        "timing",
        "untimed steps before the first window, at least 2, because DDP rebuilds its buckets after the first step; "
        "DDP on CUDA takes at least 11",
        ge=2,
        any_door=True,
    )
    steps: int = field(
        20,
        "timing",
        "steps per timed window; the plain window may take more if loader processes feed it",
        ge=1,
        any_door=True,
    )
    window_limit_s: float | None = field(
        None,
        "timing",
        "run fewer than `steps` steps per window, but at least 5, if more would take longer than this; none: never",
        gt=0,
        allow_inf_nan=False,
    )
    median_width: float | None = field(
        None,
        "timing",
        "end timed windows early, once the relative width of the 95 % interval of the mean step time is below this "
        "value, e.g. 0.01; none: never",
        gt=0,
        lt=1,
    )
    seed: int = field(0, "run", "random seed of weights, shuffle and augmentation", ge=0, lt=2**31)
    interconnect: Literal["auto", "no_p2p", "socket"] = field(
        "auto",
        "communication",
        "transports that NCCL may use: all (auto), or an emulated slower interconnect, without peer-to-peer copies "
        "(no_p2p) or through sockets (socket)",
        table="own",
        any_door=True,
    )
    communication_steps: int = field(
        10,
        "timing",
        "steps per window of the communication breakdown; 0: no breakdown, no sweep",
        ge=0,
        le=10_000,
        any_door=True,
    )
    sweep_bytes: int = field(
        2**30, "timing", "largest message of the all-reduce sweep in bytes", ge=4, le=2**34, any_door=True
    )
    profile_ranks: str = field(
        "", "timing", "ranks that record a profiler trace, e.g. 0+3, or all; empty: none", any_door=True
    )
    repeat: int = field(0, "run", "number of the repetition, from 0", ge=0, any_door=True)

    @field_validator(*NAMES)
    @classmethod
    def _known_name(cls, value: str, info: Any) -> str:
        names = list(NAMES[info.field_name])
        if value not in names:
            raise ValueError(f"is not known; allowed: {', '.join(names)}{near(value, names)}")
        return value

    @field_validator("workload", "train_function")
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
        """Samples of all ranks per optimizer step."""
        return self.world_size * self.batch_per_gpu * self.accumulation_steps

    @property
    def compiled(self) -> bool:
        """True if the model, or each of its blocks, is compiled with torch.compile."""
        return self.execution in ("compile", "compile_blocks", "compile_graph")

    @property
    def captured(self) -> bool:
        """True if the step is replayed as a CUDA graph."""
        return self.execution in ("graph", "compile_graph")

    @property
    def code_name(self) -> str:
        """Short name of what is trained: the model, or the user's script, function or workload."""
        if self.script:
            return Path(self.script).name
        own = self.train_function or self.workload
        return own.rpartition(":")[2] if own else self.model

    @property
    def processes(self) -> int:
        """Number of processes. DataParallel drives all GPUs from one, all other strategies use one per rank."""
        return 1 if PARALLEL[self.parallel].one_process else self.world_size

    @property
    def shard_group_ranks(self) -> int:
        """Ranks that share one copy of the weights under HSDP. The groups of ranks hold equal copies."""
        of_node = self.world_size // self.nodes
        halves = self.nodes == 1 and of_node % 2 == 0
        return self.shard_ranks or (of_node // 2 if halves else of_node)

    @property
    def batch_per_process(self) -> int:
        """Samples per loaded batch of a process."""
        return self.batch_per_gpu * (self.world_size // self.processes)

    @property
    def samples_per_step(self) -> int:
        """Samples of a process per optimizer step."""
        return self.batch_per_process * self.accumulation_steps

    @property
    def window_steps(self) -> int:
        """Maximum number of steps of the plain window.

        The loaders' queues hold `loader_workers * prefetch_batches` batches, and batches decoded or copied ahead have a
        queue of their own. A window ten times as long takes less than a tenth of its batches from full queues. It ends
        earlier, after `steps` or twice, four times ... as many, if the loaders are seen to keep up
        (`trainables.measure.stopping.loaders_kept_up`).
        """
        return max(self.steps, self.min_window_steps)

    @property
    def min_window_steps(self) -> int:
        """Minimum number of steps of a plain window that ends by `median_width`, see `window_steps`."""
        ahead = AHEAD_BATCHES if DECODERS[self.decode].ahead or self.copy_ahead else 0
        return 10 * (self.loader_workers * self.prefetch_batches + ahead)

    @property
    def settling_steps(self) -> int:
        """Untimed steps after a model is wrapped: `warmup_steps`, and at least 11 under DDP on CUDA.

        DDP's logger waits for the device in each of its first ten steps and once more after them
        (`should_collect_runtime_stats` in torch's reducer), which drains the launch queue. ResNet-50 at batch 256 takes
        59 ms per step during that time and 55 ms afterwards (benchmarks/results/communication).
        """
        waits = self.device == "cuda" and PARALLEL[self.parallel].ddp_wrapped
        return max(self.warmup_steps, 11) if waits else self.warmup_steps

    def profiles(self, rank: int) -> bool:
        """True if this rank records a profiler trace."""
        return self.profile_ranks == "all" or rank in map(int, filter(None, self.profile_ranks.split("+")))


def _field_facts() -> Mapping[str, FieldFacts]:
    return {name: info.json_schema_extra["facts"] for name, info in TrialFields.model_fields.items()}  # type: ignore[index, misc]


FIELD_FACTS = _field_facts()
"""by field name"""


def fields_of_kind(*kinds: FieldKind) -> tuple[str, ...]:
    """Return the names of the fields of these kinds, in the order of their declaration."""
    return tuple(name for name, facts in FIELD_FACTS.items() if facts.kind in kinds)


def reference_order(name: str) -> list[Any]:
    """Return a field's values, the reference (its default) first. Empty for numbers without a declared order."""
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
    """Return the values of other fields for which the field `name` has an effect, by field. Empty if it always has."""
    if name == "sequence_length":
        return {"model": list(SEQUENCE_MODELS)}
    strategies = [strategy for strategy, facts in PARALLEL.items() if name in facts.options]
    return {"parallel": strategies} if strategies else {}


def explain(error: ValidationError) -> list[str]:
    """Return one line per invalid field or combination: the field, its value, and what is allowed."""
    lines = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            hint = near(field, TrialFields.model_fields) or f"; fields: {', '.join(TrialFields.model_fields)}"
            lines.append(f"{field!r} is not a field of a trial{hint}")
        elif problem["type"] == "value_error":
            message = str(problem["ctx"]["error"])
            lines.append(f"{field} {problem['input']!r} {message}" if field else message)
        else:
            what = problem["msg"][0].lower() + problem["msg"][1:]
            lines.append(f"{field} {problem['input']!r}: {what}")
    return lines
