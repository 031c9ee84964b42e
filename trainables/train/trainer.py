"""Train a model by epochs on one rank: steps, validation, rows of results, and checkpoints."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from trainables.clock import perf_counter
from trainables.data.sampler import seed_of
from trainables.models.optimizers import correct_momentum, set_learning_rate, zero_momentum
from trainables.step.context import RankContext
from trainables.step.noise_scale import NoiseScale
from trainables.step.parallel import broadcast_from_rank0
from trainables.step.precision import INITIAL_LOSS_SCALE, Updater
from trainables.step.process import set_seeds
from trainables.step.step import CorrectSamples, Counters, StepBatch, forward_pass, training_step, updater_for
from trainables.step.timing import Row, StartPart, Step, StepOutput, no_mark, read_numbers
from trainables.train.checkpoint import Progress, pack, rank_state, restore, unpack
from trainables.train.epochs import epoch_steps
from trainables.train.schedule import learning_rate
from trainables.train.validation import EvaluationSums, evaluate


class Trainer:
    """A model in training on this rank, and its progress."""

    def __init__(self, context: RankContext):
        trial, workload = context.trial, context.workload
        self.context, self.trial, self.workload = context, trial, workload
        self.rates = learning_rate(trial, epoch_steps(context))
        self.model: nn.Module = context.strategy.wrap_model(
            workload.model, trial, context.group, compression=not trial.noise_scale
        )
        self.noise = NoiseScale(trial, self.model, context.group) if trial.noise_scale else None
        if self.noise:
            self.noise.attach(self.model)
        self.updater = updater_for(context, self.model)
        zero_momentum(self.updater.local_optimizer)
        self.correct = CorrectSamples(context.device)
        self.step = training_step(context, self.model, self.updater, Counters(self.correct, self.noise))
        self.progress = Progress()
        self.replay: Step | None = None
        """a complete step, after it is compiled or captured"""
        self.flops: float | None = None
        self.example: Any = None
        """batch of a backward pass, whose operations are counted after the training"""

    # ------------------------------------------------------------------------------------------------ an epoch

    def train_epoch(self, epochs: Iterator[Iterator[StepBatch]]) -> Row:
        """Train the next epoch and validate. Returns the epoch's row, which is the same on all ranks."""
        progress = self.progress
        set_seeds(seed_of(self.trial, "epoch", progress.epoch, self.context.rank))
        self.context.barrier()
        start_s = perf_counter()
        steps = next(epochs)
        first = next(steps)
        start_s += self.prepare(first)
        outputs: list[StepOutput] = []
        samples: list[int] = []
        rates: list[float] = []
        for batch in chain([first], steps):
            rates.append(self.set_rate(len(progress.steps) + len(outputs)))
            outputs.append(self.advance(batch))
            samples.append(batch.samples)
        losses = read_numbers([output.loss for output in outputs])  # waits for the device
        scales = read_numbers([output.loss_scale for output in outputs if output.loss_scale is not None])
        rank_sums = {"losses": losses, "correct": self.correct.read(), "train_s": perf_counter() - start_s}
        row = self.training_columns(samples, rates, self.context.gather(rank_sums), scales) | self.validate()
        progress.epoch += 1
        return {"epoch": progress.epoch} | row

    def advance(self, batch: StepBatch) -> StepOutput:
        """Take an optimizer step. A short batch, which occurs once per epoch, is neither compiled nor captured."""
        if batch.complete and self.replay is not None:
            return self.replay(batch.parts, no_mark)
        if batch.complete or not self.trial.compiled:
            return self.step(batch, no_mark)
        with torch.compiler.set_stance("force_eager"):
            return self.step(batch, no_mark)

    def set_rate(self, step: int) -> float:
        """Set and return the learning rate of a step, counted from 0. A user's scheduler has set it already."""
        if self.updater.scheduler is not None:
            return float(self.updater.optimizer.param_groups[0]["lr"])
        rate = self.rates(step)
        if step > 0 and not self.trial.momentum_correction:
            correct_momentum(self.updater.optimizer, self.rates(step - 1), rate)
        set_learning_rate(self.updater.optimizer, rate)
        return rate

    def count_flops(self) -> None:
        """Count the operations of a step, if the blueprint did not. Changes the model: call it after the training."""
        if self.flops is None and self.example is not None:
            forward = forward_pass(self.context, self.model)
            self.flops = self.context.step_flops(self.example, lambda part: forward(part, no_mark).loss)

    def prepare(self, first: StepBatch) -> float:
        """Compile or capture the step before the first one. Returns the seconds it took; 0 if nothing is to be done."""
        trial = self.trial
        if self.flops is None:
            self.flops, self.example = self.context.blueprint_flops(first.parts[0]), first.parts[0]
        if self.replay is not None or trial.workload or not (trial.compiled or trial.captured):
            return 0.0
        start_s = perf_counter()
        self.set_rate(len(self.progress.steps))

        def step(parts: Any, start_part: StartPart) -> StepOutput:
            return self.step(replace(first, parts=parts), start_part)

        with rollback(self.workload.model, self.updater, self.noise):
            for _ in range(trial.settling_steps):
                step(first.parts, no_mark)
            self.replay = self.context.capture(step, first.parts) if trial.captured else step
            self.replay(first.parts, no_mark)
        self.correct.read()
        set_seeds(seed_of(trial, "epoch", self.progress.epoch, self.context.rank))
        self.context.barrier()
        return perf_counter() - start_s

    def training_columns(
        self, samples: list[int], rates: list[float], ranks: list[dict[str, Any]], scales: list[float]
    ) -> Row:
        """Return the epoch's training columns, and add its steps to the progress.

        samples: of all ranks, per step. rates: learning rate per step. ranks: losses, correct samples and time per
        rank. scales: the loss scale after each step; empty without a scaler.
        """
        progress = self.progress
        sums = [sum(losses) for losses in zip(*(rank["losses"] for rank in ranks), strict=True)]
        scales_before = [progress.loss_scale or INITIAL_LOSS_SCALE, *scales[:-1]] if scales else []
        skipped = [after < before for before, after in zip(scales_before, scales, strict=True)] or [False] * len(sums)
        for size, loss, rate in zip(samples, sums, rates, strict=True):
            progress.steps.append((progress.epoch + 1, size, loss / size, rate))
        progress.loss_scale = scales[-1] if scales else None
        progress.samples += sum(samples)
        progress.train_s += max(rank["train_s"] for rank in ranks)
        top1, top5 = (_sum([rank["correct"][index] for rank in ranks]) for index in range(2))
        trace, norm2 = self.noise.read() if self.noise else (None, None)
        return {
            "step": len(progress.steps),
            "samples": progress.samples,
            "train_s": progress.train_s,
            "train_loss": _finite(sum(sums) / sum(samples)),
            "train_top1": _share(top1, sum(samples)),
            "train_top5": _share(top5, sum(samples)),
            "learning_rate": progress.steps[-1][3],
            "noise_trace": trace,
            "noise_norm2": norm2,
            "non_finite_steps": sum(skip or not math.isfinite(loss) for skip, loss in zip(skipped, sums, strict=True)),
        }

    def validate(self) -> Row:
        """Evaluate the held-out samples. Returns the epoch's validation columns; None if there are no such samples."""
        held_out = self.workload.validation
        if held_out is None:
            return dict.fromkeys(("validation_s", "validation_loss", "validation_top1", "validation_top5"))
        start_s = perf_counter()
        if self.trial.processes > 1:  # running statistics differ between ranks; use rank 0's
            broadcast_from_rank0(list(self.workload.model.buffers()), self.context.group)
        ranks: list[EvaluationSums] = self.context.gather(
            evaluate(
                self.trial, self.workload, held_out, self.context.precision, self.context.device, self.context.rank
            )
        )
        samples = sum(sums.samples for sums in ranks)
        expected = len(held_out.dataset)  # type: ignore[arg-type]
        if samples != expected:
            raise RuntimeError(f"validation evaluated {samples} samples, but the data set has {expected}")
        ranks = [sums for sums in ranks if sums.samples]
        return {
            "validation_s": perf_counter() - start_s,
            "validation_loss": _finite(sum(sums.loss for sums in ranks) / samples),
            "validation_top1": _share(_sum([sums.top1 for sums in ranks]), samples),
            "validation_top5": _share(_sum([sums.top5 for sums in ranks]), samples),
        }

    def finished(self) -> bool:
        """Return True if all epochs are trained, or the last one reached the target accuracy."""
        trial, rows = self.trial, self.progress.rows
        accuracy = rows[-1]["validation_top1"] if rows else None
        reached = trial.target_accuracy is not None and accuracy is not None and accuracy >= trial.target_accuracy
        return reached or self.progress.epoch >= trial.epochs

    # ------------------------------------------------------------------------------------- between epochs

    def resume(self, content: bytes) -> None:
        """Continue from a checkpoint."""
        state = unpack(self.trial, content)
        restore(state, self.workload.model, self.updater, self.context.rank)
        if self.noise:
            self.noise.load_state_dict(state["noise"])
        self.progress = state["progress"]

    def checkpoint(self) -> bytes:
        """Return a checkpoint on rank 0, and b"" on other ranks. Collective."""
        state = rank_state(self.updater)
        states = self.context.gather(state) if self.trial.parallel == "zero1" else [state]
        noise = self.noise.state_dict() if self.noise else None
        return pack(self.trial, self.progress, self.workload.model, states, noise) if self.context.rank == 0 else b""

    def step_rows(self) -> list[Row]:
        """Return a row per optimizer step so far."""
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
def rollback(model: nn.Module, updater: Updater, noise: NoiseScale | None) -> Iterator[None]:
    """Undo all training inside the context: weights, buffers, optimizer state and noise scale, in the same memory.

    A buffer that the optimizer created inside becomes zero, the initial value for all optimizers of the registry.
    """
    model_state = {name: value.clone() for name, value in model.state_dict().items()}
    masters = [master.detach().clone() for master in updater.masters]
    states = {id(value): (value, value.clone()) for value in _state_tensors(updater.local_optimizer)}
    scaler_state = updater.scaler.state_dict() if updater.scaler else None
    noise_state = {name: value.clone() for name, value in noise.state_dict().items()} if noise else None
    yield
    model.load_state_dict(model_state)
    with torch.no_grad():
        for master, saved in zip(updater.masters, masters, strict=True):
            master.copy_(saved)
        for value in _state_tensors(updater.local_optimizer):
            if id(value) in states:
                value.copy_(states[id(value)][1])
            else:
                value.zero_()
    if updater.scaler and scaler_state is not None:
        updater.scaler.load_state_dict(scaler_state)
    if noise and noise_state is not None:
        noise.load_state_dict(noise_state)


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


def _sum(values: list[float | None]) -> float | None:
    """Return the sum, or None if any value is None."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _share(count: float | None, samples: int) -> float | None:
    return None if count is None else count / samples


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
