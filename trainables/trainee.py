"""A model in training by epochs on one rank: an epoch, its validation, and what is kept of it."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainables.checkpoint import Progress, pack, rank_state, restore, unpack
from trainables.epochs import Taken, seed_of, steps_per_epoch
from trainables.execution import capture
from trainables.flops import step_flops
from trainables.noise_scale import NoiseScale
from trainables.optimizers import correct_momentum, set_learning_rate, zero_momentum
from trainables.parallel import Strategy, broadcast_from_first
from trainables.precision import INITIAL_LOSS_SCALE, Precision
from trainables.process import set_seeds
from trainables.rehearsal import taken_back
from trainables.rows import read_numbers
from trainables.schedule import learning_rate
from trainables.step import updater_for
from trainables.timing import Begin, Row, Step, Stepped, no_mark
from trainables.train_step import Counts, train_step
from trainables.trial import Trial
from trainables.validation import Judged, judge
from trainables.workload import Workload


@dataclass
class Trainee:
    """A model in training on this rank, and how far it is."""

    trial: Trial
    rank: int
    device: torch.device
    group: dist.ProcessGroup | None
    control: dist.ProcessGroup | None
    precision: Precision
    strategy: Strategy
    workload: Workload
    progress: Progress = field(default_factory=Progress)
    replay: Step | None = None
    """a whole step of these parts, once it is compiled or captured"""
    flops: float | None = None
    sample: Taken | None = None
    """the first step's batches, kept where the noise scale is watched, to time steps with"""

    def __post_init__(self) -> None:
        self.length = len(self.workload.dataset)  # type: ignore[arg-type]
        self.rates = learning_rate(self.trial, steps_per_epoch(self.trial, self.length))
        self.build(self.trial.noise_scale)

    def build(self, watches_noise: bool) -> None:
        """The model under its strategy, what updates it, and the step."""
        trial, workload = self.trial, self.workload
        self.model: nn.Module = self.strategy.wrapped(workload.model, trial, self.group, bare=watches_noise)
        self.noise = NoiseScale(trial, self.model, self.group) if watches_noise else None
        if self.noise:
            self.noise.attach(self.model)
        self.updater = updater_for(workload, self.model, self.precision, self.strategy, self.group)
        zero_momentum(self.updater.own)
        self.counts = Counts(self.device)
        self.step = train_step(
            trial,
            workload,
            self.model,
            self.precision,
            self.strategy,
            self.updater,
            self.counts,
            self.noise,
            self.group,
        )

    def leave_out_noise(self) -> None:
        """Lets go of the noise scale, and of the model's wrapper that has its hook; `build` is to follow."""
        self.replay = self.noise = None
        self.model = self.workload.model
        del self.step, self.updater

    # ------------------------------------------------------------------------------------------------ an epoch

    def epoch(self, epochs: Iterator[Iterator[Taken]]) -> Row:
        """Trains the next epoch and validates. Gives its row, the same on all ranks."""
        progress = self.progress
        set_seeds(seed_of(self.trial, "epoch", progress.epoch, self.rank))
        self.barrier()
        began_s = time.perf_counter()
        steps = next(epochs)
        first = next(steps)
        began_s += self.prepared(first)
        given: list[Stepped] = []
        sizes: list[int] = []
        for taken in chain([first], steps):
            self.set_rate(len(progress.steps) + len(given))
            given.append(self.advance(taken))
            sizes.append(taken.samples)
        losses, scales = read_numbers([each.loss for each in given]), self.scales(given)  # waits for the device
        mine = {"losses": losses, "right": self.counts.read(), "train_s": time.perf_counter() - began_s}
        row = self.trained(sizes, self.gathered(mine), scales) | self.validated()
        progress.epoch += 1
        return {"epoch": progress.epoch} | row

    def advance(self, taken: Taken) -> Stepped:
        """One optimizer step. A short batch is neither compiled for nor captured: it comes once an epoch."""
        if taken.whole and self.replay is not None:
            return self.replay(taken.parts, no_mark)
        if taken.whole or not self.trial.compiled:
            return self.step(taken, no_mark)
        with torch.compiler.set_stance("force_eager"):
            return self.step(taken, no_mark)

    def set_rate(self, step: int) -> None:
        """The learning rate of a step, counted from 0."""
        rate = self.rates(step)
        if step > 0 and not self.trial.momentum_correction:
            correct_momentum(self.updater.optimizer, self.rates(step - 1), rate)
        set_learning_rate(self.updater.optimizer, rate)

    def prepared(self, first: Taken) -> float:
        """What must be there before the first step of all: compiled code, a captured graph. Gives the seconds it took."""
        trial = self.trial
        if self.noise and self.sample is None:
            self.sample = first
        if self.device.type == "cuda" and self.flops is None:
            inputs, _ = self.workload.select(first.parts[0])
            flops = step_flops(self.workload.blueprint, inputs, trial.model, trial.image_size)
            self.flops = None if flops is None else flops * trial.accumulation_steps
        if self.replay is not None or trial.workload or not (trial.compiled or trial.captured):
            return 0.0
        began_s = time.perf_counter()
        self.set_rate(len(self.progress.steps))

        def step(parts: Any, begin: Begin) -> Stepped:
            return self.step(replace(first, parts=parts), begin)

        with taken_back(self.workload.model, self.updater, self.noise):
            for _ in range(trial.settling_steps):
                step(first.parts, no_mark)
            self.replay = capture(step, first.parts, self.device, False, trial.non_blocking) if trial.captured else step
            self.replay(first.parts, no_mark)
        self.counts.read()
        set_seeds(seed_of(trial, "epoch", self.progress.epoch, self.rank))
        self.barrier()
        return time.perf_counter() - began_s

    def scales(self, given: list[Stepped]) -> list[float]:
        """The loss scale after each step; empty without a scaler."""
        return read_numbers([each.loss_scale for each in given if each.loss_scale is not None])

    def trained(self, sizes: list[int], everyone: list[dict[str, Any]], scales: list[float]) -> Row:
        """The epoch's columns about training; its steps are added to the progress."""
        progress = self.progress
        sums = [sum(losses) for losses in zip(*(each["losses"] for each in everyone), strict=True)]
        before = [progress.loss_scale or INITIAL_LOSS_SCALE, *scales[:-1]] if scales else []
        skipped = [after < first for first, after in zip(before, scales, strict=True)] or [False] * len(sums)
        for size, loss in zip(sizes, sums, strict=True):
            rate = self.rates(len(progress.steps))
            progress.steps.append((progress.epoch + 1, size, loss / size, rate))
        progress.loss_scale = scales[-1] if scales else None
        progress.samples += sum(sizes)
        progress.train_s += max(each["train_s"] for each in everyone)
        top1, top5 = (_sum([each["right"][place] for each in everyone]) for place in range(2))
        trace, norm2 = self.noise.read() if self.noise else (None, None)
        return {
            "step": len(progress.steps),
            "samples": progress.samples,
            "train_s": progress.train_s,
            "train_loss": _finite(sum(sums) / sum(sizes)),
            "train_top1": _share(top1, sum(sizes)),
            "train_top5": _share(top5, sum(sizes)),
            "learning_rate": progress.steps[-1][3],
            "noise_trace": trace,
            "noise_norm2": norm2,
            "non_finite_steps": sum(
                left_out or not math.isfinite(loss) for left_out, loss in zip(skipped, sums, strict=True)
            ),
        }

    def validated(self) -> Row:
        """The epoch's columns about validation: None for each where the workload holds nothing out."""
        held = self.workload.validation
        names = ("validation_s", "validation_loss", "validation_top1", "validation_top5")
        if held is None:
            return dict.fromkeys(names)
        began_s = time.perf_counter()
        if self.trial.processes > 1:  # running statistics are each rank's own; rank 0's are the model's
            broadcast_from_first(list(self.workload.model.buffers()), self.group)
        everyone: list[Judged] = self.gathered(
            judge(self.trial, self.workload, held, self.precision, self.device, self.rank)
        )
        samples = sum(each.samples for each in everyone)
        if samples != len(held.dataset):  # type: ignore[arg-type]
            raise RuntimeError(f"validation took {samples} samples of {len(held.dataset)}")  # type: ignore[arg-type]
        some = [each for each in everyone if each.samples]
        found = (
            time.perf_counter() - began_s,
            _finite(sum(each.loss for each in some) / samples),
            _share(_sum([each.top1 for each in some]), samples),
            _share(_sum([each.top5 for each in some]), samples),
        )
        return dict(zip(names, found, strict=True))

    def finished(self) -> bool:
        """Whether all epochs are trained, or the last one reached the target."""
        trial, rows = self.trial, self.progress.rows
        accuracy = rows[-1]["validation_top1"] if rows else None
        reached = trial.target_accuracy is not None and accuracy is not None and accuracy >= trial.target_accuracy
        return reached or self.progress.epoch >= trial.epochs

    # ------------------------------------------------------------------------------------- between epochs

    def resume(self, content: bytes) -> None:
        """Goes on from a checkpoint."""
        found = unpack(self.trial, content)
        restore(found, self.workload.model, self.updater, self.rank)
        if self.noise:
            self.noise.load_state_dict(found["noise"])
        self.progress = found["progress"]

    def packed(self) -> bytes:
        """A checkpoint, on rank 0; all ranks call it."""
        state = rank_state(self.updater)
        states = self.gathered(state) if self.trial.parallel == "zero1" else [state]
        noise = self.noise.state_dict() if self.noise else None
        return pack(self.trial, self.progress, self.workload.model, states, noise) if self.rank == 0 else b""

    def step_rows(self) -> list[Row]:
        """A row for each optimizer step so far."""
        return [
            {
                "window": "train",
                "rank": 0,
                "step": number,
                "epoch": int(epoch),
                "samples": int(samples),
                "loss": _finite(loss),
                "learning_rate": rate,
            }
            for number, (epoch, samples, loss, rate) in enumerate(self.progress.steps)
        ]

    # ---------------------------------------------------------------------------------------------- ranks

    def barrier(self) -> None:
        if self.trial.processes > 1:
            dist.barrier(self.control)

    def gathered(self, value: Any) -> list[Any]:
        """The ranks' values, on every rank, in the order of ranks."""
        if self.trial.processes == 1:
            return [value]
        values: list[Any] = [None] * self.trial.processes
        dist.all_gather_object(values, value, group=self.control)
        return values

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.trial.processes == 1:
            return value
        values = [value]
        ranks: Any = self.control or dist.group.WORLD
        dist.broadcast_object_list(values, src=dist.get_global_rank(ranks, 0), group=self.control)
        return values[0]


def _sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _share(count: float | None, samples: int) -> float | None:
    return None if count is None else count / samples


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
