"""A model in training by epochs on one rank: an epoch, its validation, and what is kept of it."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from trainables.data.sampler import seed_of, steps_per_epoch
from trainables.optimizers import correct_momentum, set_learning_rate, zero_momentum
from trainables.step.context import RankContext
from trainables.step.noise_scale import NoiseScale
from trainables.step.parallel import broadcast_from_first
from trainables.step.precision import INITIAL_LOSS_SCALE, Updater
from trainables.step.process import set_seeds
from trainables.step.step import CorrectSamples, Counters, StepBatch, training_step, updater_for
from trainables.step.timing import Begin, Row, Step, StepOutput, no_mark, read_numbers
from trainables.train.checkpoint import Progress, pack, rank_state, restore, unpack
from trainables.train.schedule import learning_rate
from trainables.train.validation import EvaluationSums, judge


class Trainee:
    """A model in training on this rank, and how far it is."""

    def __init__(self, context: RankContext):
        trial, workload = context.trial, context.workload
        self.context, self.trial, self.workload = context, trial, workload
        self.rates = learning_rate(trial, steps_per_epoch(trial, len(workload.dataset)))  # type: ignore[arg-type]
        self.model: nn.Module = context.strategy.wrapped(workload.model, trial, context.group, bare=trial.noise_scale)
        self.noise = NoiseScale(trial, self.model, context.group) if trial.noise_scale else None
        if self.noise:
            self.noise.attach(self.model)
        self.updater = updater_for(context, self.model)
        zero_momentum(self.updater.own)
        self.correct = CorrectSamples(context.device)
        self.step = training_step(context, self.model, self.updater, Counters(self.correct, self.noise))
        self.progress = Progress()
        self.replay: Step | None = None
        """a whole step of these parts, once it is compiled or captured"""
        self.flops: float | None = None

    # ------------------------------------------------------------------------------------------------ an epoch

    def epoch(self, epochs: Iterator[Iterator[StepBatch]]) -> Row:
        """Trains the next epoch and validates. Gives its row, the same on all ranks."""
        progress = self.progress
        set_seeds(seed_of(self.trial, "epoch", progress.epoch, self.context.rank))
        self.context.barrier()
        began_s = time.perf_counter()
        steps = next(epochs)
        first = next(steps)
        began_s += self.prepared(first)
        given: list[StepOutput] = []
        sizes: list[int] = []
        for taken in chain([first], steps):
            self.set_rate(len(progress.steps) + len(given))
            given.append(self.advance(taken))
            sizes.append(taken.samples)
        losses, scales = read_numbers([each.loss for each in given]), self.scales(given)  # waits for the device
        mine = {"losses": losses, "right": self.correct.read(), "train_s": time.perf_counter() - began_s}
        row = self.trained(sizes, self.context.gathered(mine), scales) | self.validated()
        progress.epoch += 1
        return {"epoch": progress.epoch} | row

    def advance(self, taken: StepBatch) -> StepOutput:
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

    def prepared(self, first: StepBatch) -> float:
        """What must be there before the first step of all: compiled code, a captured graph. Gives the seconds it took."""
        trial = self.trial
        if self.flops is None and self.context.device.type == "cuda":
            self.flops = self.context.step_flops(self.workload.select(first.parts[0])[0])
        if self.replay is not None or trial.workload or not (trial.compiled or trial.captured):
            return 0.0
        began_s = time.perf_counter()
        self.set_rate(len(self.progress.steps))

        def step(parts: Any, begin: Begin) -> StepOutput:
            return self.step(replace(first, parts=parts), begin)

        with taken_back(self.workload.model, self.updater, self.noise):
            for _ in range(trial.settling_steps):
                step(first.parts, no_mark)
            self.replay = self.context.capture(step, first.parts) if trial.captured else step
            self.replay(first.parts, no_mark)
        self.correct.read()
        set_seeds(seed_of(trial, "epoch", self.progress.epoch, self.context.rank))
        self.context.barrier()
        return time.perf_counter() - began_s

    def scales(self, given: list[StepOutput]) -> list[float]:
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
            broadcast_from_first(list(self.workload.model.buffers()), self.context.group)
        everyone: list[EvaluationSums] = self.context.gathered(
            judge(self.trial, self.workload, held, self.context.precision, self.context.device, self.context.rank)
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
        restore(found, self.workload.model, self.updater, self.context.rank)
        if self.noise:
            self.noise.load_state_dict(found["noise"])
        self.progress = found["progress"]

    def packed(self) -> bytes:
        """A checkpoint, on rank 0; all ranks call it."""
        state = rank_state(self.updater)
        states = self.context.gathered(state) if self.trial.parallel == "zero1" else [state]
        noise = self.noise.state_dict() if self.noise else None
        return pack(self.trial, self.progress, self.workload.model, states, noise) if self.context.rank == 0 else b""

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


@contextmanager
def taken_back(model: nn.Module, updater: Updater, noise: NoiseScale | None) -> Iterator[None]:
    """Whatever is trained inside: weights, buffers, the optimizer's state and the noise scale are put back afterwards,
    into the same memory.

    A buffer that the optimizer made on the way becomes zero, where all optimizers of the registry begin.
    """
    before = {name: value.clone() for name, value in model.state_dict().items()}
    masters = [master.detach().clone() for master in updater.masters]
    states = {id(value): (value, value.clone()) for value in _states(updater.own)}
    scaler = updater.scaler.state_dict() if updater.scaler else None
    remembered = {name: value.clone() for name, value in noise.state_dict().items()} if noise else None
    yield
    model.load_state_dict(before)
    with torch.no_grad():
        for master, kept in zip(updater.masters, masters, strict=True):
            master.copy_(kept)
        for value in _states(updater.own):
            if id(value) in states:
                value.copy_(states[id(value)][1])
            else:
                value.zero_()
    if updater.scaler and scaler is not None:
        updater.scaler.load_state_dict(scaler)
    if noise and remembered is not None:
        noise.load_state_dict(remembered)


def _states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


def _sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _share(count: float | None, samples: int) -> float | None:
    return None if count is None else count / samples


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
