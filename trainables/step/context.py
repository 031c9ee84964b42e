"""A rank's part in a trial: the set-up from the caller, the context shared by all parts, and the output."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist

from trainables.build import build_workload
from trainables.models.blocks import compile_blocks
from trainables.registry import PARALLEL, PRECISIONS, SEQUENCE_MODELS, load
from trainables.step.cuda_graph import capture, stream_for
from trainables.step.flops import causal_attention_flops, counted_flops, recomputed_flops, step_flops
from trainables.step.parallel import Strategy
from trainables.step.precision import Precision, cast_model
from trainables.step.process import settings_for
from trainables.step.recorded_trial import RecordedTrial
from trainables.step.timing import Row, Step
from trainables.trial import Trial
from trainables.workload import Workload, WorkloadError

CHECKPOINT_EVERY_S = 30.0
"""minimum interval between checkpoints: writing a large model takes seconds"""


ReadEnergy = Callable[[list[torch.device]], Any]


class Checkpoints(Protocol):
    """Storage for the checkpoint of an unfinished trial. Only rank 0 uses it."""

    def load(self) -> bytes | None:
        """Return the last saved checkpoint. None if there is none."""

    def save(self, content: bytes) -> None:
        """Replace the last checkpoint."""


@dataclass(frozen=True)
class RankSetup:
    """A rank's position in the trial, and the caller's callbacks. Every rank of the trial has one.

    group: process group that averages gradients, NCCL or gloo (None: the default group). control: a gloo group of the
    same ranks for barriers (None: `group`). source: text of a user's workload file, for hosts without the file.
    """

    rank: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    source: str | None = None
    observe: Callable[[], Any] = lambda: None
    """called before the first step, and right after the device finished the phases window or the last epoch"""
    read_energy: ReadEnergy = lambda devices: None
    """called with this rank's GPUs right before and right after the plain window, while they are idle"""
    on_epoch: Callable[[Row], None] | None = None
    """called on rank 0 with each new row of `epochs`"""
    checkpoints: Checkpoints | None = None
    checkpoint_every_s: float = CHECKPOINT_EVERY_S


@dataclass(frozen=True)
class RankOutput:
    """What a rank returns for a trial, after timed windows or after training.

    tables: rows by table ("steps", "buckets", "sweep", "epochs"), as in the Parquet files. span: start and end in unix
    seconds. trace: gzipped Chrome trace JSON, if the rank recorded one. evidence:
    - `before`, `after`: results of `observe`.
    - `peak_memory_by_device_bytes`: per GPU of this rank, its own first. None on CPUs.
    - `step_flops`: operations of a complete step, see `trainables.step.flops`. Counted on CUDA only.
    - `causal_attention_flops`: the part of `step_flops` of which half is masked. None if unknown.
    - `recomputed_flops`: what activation checkpointing computes again, not in `step_flops`. None if nothing or unknown.
    - `dataset_samples`: samples of all ranks per epoch. None for endless data.
    - `tokens_per_sample`: tokens per sample. None unless the workload states them.
    - `unread_fields`: fields that a user's workload ignores, see `RecordedTrial`. None for models of the registry.
    - `matmul_flops_per_s` (timed windows on CUDA only): see `trainables.measure.matmul_limit`.
    - `plain_window` (timed windows only): results of `read_energy` before and after the plain window.
    """

    tables: dict[str, list[Row]]
    evidence: dict[str, Any]
    span: tuple[float, float]
    trace: bytes | None = None


@dataclass
class RankContext:
    """State shared by all parts of a trial on this rank."""

    trial: Trial
    rank: int
    device: torch.device
    group: dist.ProcessGroup | None
    control: dist.ProcessGroup | None
    precision: Precision
    strategy: Strategy
    workload: Workload
    recorded_trial: RecordedTrial | None = None
    """the trial as functions of a user's workload get it; None for models of the registry"""

    @property
    def devices(self) -> list[torch.device]:
        """This rank's GPUs, its own first. On CPUs, its device."""
        if self.device.type == "cpu":
            return [self.device]
        count = self.trial.world_size // self.trial.processes
        return [torch.device("cuda", self.device.index + number) for number in range(count)]

    @property
    def distributed(self) -> bool:
        """True if ranks average gradients."""
        return self.trial.parallel not in ("none", "dp")

    @property
    def copies(self) -> bool:
        """True if each batch is copied from the host to the device."""
        return self.device.type == "cuda" and not self.workload.resident

    @cached_property
    def custom_loader(self) -> Iterable[Any]:
        """This rank's batches from the loader of a user's workload."""
        assert self.workload.loader is not None
        return self.workload.loader(self.trial, self.rank, self.trial.processes)

    def barrier(self) -> None:
        if self.trial.processes > 1:
            dist.barrier(self.control)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank. Collective."""
        if self.trial.processes == 1:
            return [value]
        values: list[Any] = [None] * self.trial.processes
        dist.all_gather_object(values, value, group=self.control)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank. Collective."""
        if self.trial.processes == 1:
            return value
        values = [value]
        ranks: Any = self.control or dist.group.WORLD
        dist.broadcast_object_list(values, src=dist.get_global_rank(ranks, 0), group=self.control)
        return values[0]

    def capture(
        self, step: Step, example: Any, context: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> Step:
        """Capture the step as a CUDA graph, see `trainables.step.cuda_graph.capture`."""
        return capture(step, example, self.device, self.workload.resident, self.trial.non_blocking, context)

    def blueprint_flops(self, part: Any) -> float | None:
        """Return the operations of one step of this rank, without executing it. `part`: batch of one backward pass.

        None without a blueprint or a single input tensor, and on CPUs.
        """
        workload, trial = self.workload, self.trial
        of_user_step = bool(trial.workload) and workload.step is not None
        if self.device.type != "cuda" or workload.blueprint is None or of_user_step:
            return None
        inputs, _ = workload.select(part)
        if not isinstance(inputs, torch.Tensor):
            return None
        replicas = len(self.devices)
        of_replica = inputs[: len(inputs) // replicas]  # a model with a state has that many rows
        of_each = step_flops(workload.blueprint, of_replica, trial.model, trial.image_size)
        return trial.accumulation_steps * replicas * of_each

    def step_flops(self, part: Any, loss: Callable[[Any], torch.Tensor]) -> float | None:
        """Return the operations of one step of this rank: from the blueprint, or else from an extra step of the model.

        `part`: batch of one backward pass. `loss` computes its loss. The extra step changes buffers and random state,
        so call this after all windows, on all ranks. None on CPUs, with DataParallel, and if the count fails.
        """
        flops = self.blueprint_flops(part)
        if flops is not None or self.device.type != "cuda" or self.trial.parallel == "dp":
            return flops
        gc.collect()  # wrappers of earlier windows would count this backward pass as theirs
        try:
            flops = counted_flops(lambda: loss(part))
        except Exception:  # whatever it is, the measured windows are kept
            return None
        finally:
            self.workload.model.zero_grad(set_to_none=True)
        return None if flops is None else flops * self.trial.accumulation_steps

    def parts_of_flops(self) -> dict[str, float | None]:
        """Return `causal_attention_flops` and `recomputed_flops` of a step of this rank, see `RankOutput`.

        None if unknown, and on CPUs.
        """
        trial, blueprint = self.trial, self.workload.blueprint
        if self.device.type != "cuda" or blueprint is None or trial.workload or trial.model not in SEQUENCE_MODELS:
            return {"causal_attention_flops": None, "recomputed_flops": None}
        tokens = torch.empty(trial.batch_per_gpu, trial.sequence_length, dtype=torch.int32, device="meta")
        parts, kind = trial.accumulation_steps * len(self.devices), trial.activation_checkpointing
        repeated = 0.0 if kind == "none" else recomputed_flops(blueprint, tokens, selective=kind == "selective")
        return {
            "causal_attention_flops": parts * causal_attention_flops(blueprint, tokens) or None,
            "recomputed_flops": parts * repeated or None,
        }

    def dataset_samples(self) -> int | None:
        """Return the samples of all ranks per epoch. None for endless data."""
        samples = self.workload.samples
        if samples is not None and not self.trial.workload and self.trial.model in SEQUENCE_MODELS:
            samples //= self.trial.sequence_length  # the length of a text data set is in bytes or tokens
        return samples

    def evidence(self, observations: list[Any], peaks: list[int] | None, flops: float | None) -> dict[str, Any]:
        """Return the evidence common to timed windows and training, see `RankOutput`."""
        before, after = observations
        return {
            "before": before,
            "after": after,
            "threads": torch.get_num_threads(),  # a user's workload may have changed them
            "peak_memory_by_device_bytes": peaks,
            "step_flops": flops,
            **self.parts_of_flops(),
            "dataset_samples": self.dataset_samples(),
            "tokens_per_sample": self.workload.tokens_per_sample,
            "unread_fields": self.recorded_trial.unread_fields() if self.recorded_trial else None,
        }


def build_context(trial: Trial, setup: RankSetup) -> RankContext:
    """Build the trial's workload on the rank's device. Call within `settings_for`."""
    precision: Precision = load(PRECISIONS[trial.precision])
    recorded_trial = RecordedTrial.of(trial) if trial.workload else None
    workload = build_workload(recorded_trial or trial, setup.device, setup.source)
    return RankContext(
        trial,
        setup.rank,
        setup.device,
        setup.group,
        setup.control or setup.group,
        precision,
        load(PARALLEL[trial.parallel]),
        on_device(workload, trial, precision, setup.device),
        recorded_trial,
    )


@contextmanager
def rank_context(trial: Trial, setup: RankSetup) -> Iterator[RankContext]:
    """Set up the process for the trial and build its workload; restore the process afterwards.

    The context refers to the model and the data. Delete it before other ranks or trials need the memory. DDP's error
    about unused parameters is raised as a WorkloadError that names the field to set.
    """
    precision: Precision = load(PRECISIONS[trial.precision])
    strategy: Strategy = load(PARALLEL[trial.parallel])
    session = strategy.session(trial, setup.control or setup.group)
    with settings_for(trial, precision), stream_for(trial, setup.device), session:
        try:
            # a local variable would keep the memory alive until the process is restored
            yield build_context(trial, setup)
        except RuntimeError as error:
            if "Expected to have finished reduction in the prior iteration" not in str(error):
                raise
            raise WorkloadError(
                "some parameters of the model get no gradient in a step, but DDP waits for every parameter; "
                "set find_unused_parameters=true (DDP then searches for them), or freeze these parameters"
            ) from error


def on_device(workload: Workload, trial: Trial, precision: Precision, device: torch.device) -> Workload:
    """Move the workload's model to the device, in training mode, with the trial's memory format and weight dtype."""
    layout = torch.channels_last if trial.memory_format == "channels_last" else torch.contiguous_format
    model = cast_model(workload.model.to(device), precision)
    if any(parameter.dim() == 4 for parameter in model.parameters()):
        model = model.to(memory_format=layout)
    if trial.execution == "compile_blocks":
        compile_blocks(model)
    elif trial.compiled:
        model.compile()  # before DDP wraps it, so that the compiler splits its graph at DDP's bucket boundaries
    return replace(workload, model=model.train())
