"""Alternate (ABBA) two steps that stay ready in the same processes: the product's and a bare loop's.

The product's step consists of its own parts and is timed by its own plain window, without Ray or the study.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import bare_gpt2, bare_loop
from benchmarks.harness.bare_loop import timed_s
from benchmarks.harness.common import abba_ratio, ratio_interval
from benchmarks.harness.ranks import Clock, Place
from trainables.data.loader import endless_batches
from trainables.measure.trial_windows import CAPTURED_WARMUP
from trainables.measure.windows import plain_window
from trainables.registry import MODELS, PRECISIONS, load
from trainables.step.context import RankSetup, build_context
from trainables.step.cuda_graph import stream_for
from trainables.step.process import drop_buckets, settings_for
from trainables.step.step import training_step
from trainables.step.timing import Step, clock_for, no_mark, without_garbage_collection
from trainables.trial import Trial

Timed = Callable[[int], float]
"""Function of the number of steps that returns wall seconds of this rank."""

BLOCK_S = 0.8
"""Approximate seconds of one block of a side."""

LEAST_STEPS = 5

GRADIENT_TOLERANCE = 1.5
"""Largest allowed distance from the eager fp32 gradient, relative to the distance of the eager gradient."""


@dataclass
class Ours:
    """The product's step after warm-up, with everything it needs. timed: times it on this rank.

    initial: copies of its weights and buffers from before the first step, in order.
    """

    trial: Trial
    step: Step
    batches: Any
    model: torch.nn.Module
    timed: Timed
    initial: list[torch.Tensor]


def ours(trial: Trial, place: Place, meeting: int | None = None, *, alone: bool = False) -> Ours:
    """Return the product's step of this trial, as its plain window runs it. Call it within the trial's settings.

    meeting: number of ranks that start together, if it differs from the trial's. alone: the trial has one rank, without
    groups.
    """
    group = None if alone else place.groups[trial.processes][0]
    control = None if alone else place.groups[meeting or trial.processes][1]
    clock = clock_for(place.device)
    context = build_context(trial, RankSetup(place.rank, place.device, group))
    batches = endless_batches(trial, context.workload, place.rank)
    model = context.strategy.wrap_model(context.workload.model, trial, group)
    initial = [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
    step = training_step(context, model)
    for _ in range(trial.settling_steps):
        step(next(batches), no_mark)
    if trial.captured:
        step = context.capture(step, next(batches))
        for _ in range(CAPTURED_WARMUP):
            step(next(batches), no_mark)

    def meet() -> None:
        if not alone:
            dist.barrier(control)

    def timed(steps: int) -> float:
        return plain_window(step, batches, steps, clock, meet)[0]

    return Ours(trial, step, batches, model, timed, initial)


def bare(trial: Trial, place: Place) -> Timed:
    """Return the bare loop's step for the trial. Call it within the trial's settings."""
    group, control = place.groups[trial.processes]
    job = {
        "model": trial.model,
        "batch": trial.batch_per_gpu,
        "precision": trial.precision,
        "image_size": trial.image_size,
        "sequence_length": trial.sequence_length,
        "execution": trial.execution,
        "ddp": ddp_options(trial),
    }
    of_tokens = MODELS[trial.model].reads == "tokens"
    step = (bare_gpt2 if of_tokens else bare_loop).training(job, place.device, group)
    for _ in repeat(None, trial.settling_steps):
        step()
    return lambda steps: timed_s(step, steps, place.device, control)


def ddp_options(trial: Trial) -> dict[str, Any] | None:
    """Return the DDP options of the bare loop for this trial. None if the trial runs without DDP."""
    if trial.parallel == "none":
        return None
    views, static = trial.gradient_as_bucket_view, trial.static_graph
    return {"bucket_cap_mb": trial.bucket_mb, "gradient_as_bucket_view": views, "static_graph": static}


@dataclass
class BlockRates:
    """Samples/s over all ranks of each block of two sides, by side, in running order. See `abba`."""

    rates: dict[str, list[float]] = field(default_factory=dict)
    steps: int = 0

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"side": side, "block": number, "steps": self.steps, "samples_per_s": rate}
            for side, rates in self.rates.items()
            for number, rate in enumerate(rates)
        ]

    def rate(self, side: str) -> tuple[float, tuple[float, float]]:
        """Return the samples/s of a side, and the interval over its blocks."""
        return ratio_interval([math.log(rate) for rate in self.rates[side]])

    def ratio(self) -> tuple[float, tuple[float, float]]:
        """Return the ratio first / second side, and its interval over the quadruples. Needs two of them."""
        first, second = self.rates.values()
        return abba_ratio(first, second)


@dataclass(frozen=True)
class Side:
    """One side of `abba`. timed: times it on this rank; None if it only waits. samples: per step, over all ranks."""

    timed: Timed | None
    samples: int


def abba(sides: dict[str, Side], place: Place, size: int, quadruples: int, clock: Clock) -> BlockRates:
    """Alternate the sides (ABBA) `quadruples` times, or until time runs out. Collective over the first `size` ranks."""
    control = place.groups[size][1]

    def slowest_s(side: Side, steps: int) -> float:
        held = torch.tensor([side.timed(steps) if side.timed else 0.0], dtype=torch.float64)
        dist.all_reduce(held, op=dist.ReduceOp.MAX, group=control)
        return held.item()

    blocks = BlockRates({name: [] for name in sides})
    with without_garbage_collection():
        probed_s = max(slowest_s(side, LEAST_STEPS) for side in sides.values()) / LEAST_STEPS
        blocks.steps = max(LEAST_STEPS, math.ceil(BLOCK_S / probed_s))
        for done in range(quadruples):
            if done >= 2 and not clock.fits(4 * BLOCK_S, size):
                break
            for name in (*sides, *reversed(sides)):
                blocks.rates[name].append(blocks.steps * sides[name].samples / slowest_s(sides[name], blocks.steps))
    return blocks


def gradient(trial: Trial, place: Place) -> torch.Tensor:
    """Return the gradient of one product step from the trial's initial weights, in fp32, all weights flattened.

    It is the change that plain SGD with learning rate 1 makes. This also works with CUDA graphs, which keep none.
    """
    trial = trial.but(learning_rate=1.0, momentum=0.0, weight_decay=0.0)
    with settings_for(trial, load(PRECISIONS[trial.precision])), stream_for(trial, place.device):
        torch.manual_seed(trial.seed + place.rank)  # different images per rank; weights come from rank 0
        side = ours(trial, place)
        held = [*side.model.parameters(), *side.model.buffers()]
        with torch.no_grad():
            for tensor, initial in zip(held, side.initial, strict=True):
                tensor.copy_(initial)
        side.step(next(side.batches), no_mark)
        with torch.no_grad():
            changes = [initial - weight for weight, initial in zip(held, side.initial, strict=True)]
        count = len(list(side.model.parameters()))
        found = torch.cat([change.float().flatten() for change in changes[:count]]).cpu()
        del side, held, changes
        drop_buckets(place.groups[trial.processes][0], place.device)
    return found


def distance(trial: Trial, place: Place, reference: torch.Tensor) -> float:
    """Return the distance of the trial's gradient from a reference, relative to the norm of the reference."""
    return float((gradient(trial, place) - reference).norm() / reference.norm())
