"""How much does the gradient noise scale slow down a training step? Steps with and without it alternate (ABBA).

    python -m benchmarks.cost.noise_scale_cost --ranks 1,2,4
    python -m benchmarks.cost.noise_scale_cost --device cpu --small

Both trainings stay ready in the same processes. One rank computes the noise scale from two accumulated batches, several
ranks from their local gradients under DDP. Goal: a step takes at most 1.02 times as long. See
`trainables.step.noise_scale`.
"""

import os
import time
from typing import Any

import torch

from benchmarks.harness.common import figure, write_summary
from benchmarks.harness.ranks import Clock, Place, launch, options_of, sizes_that_fit
from benchmarks.harness.sides import BlockRates, Side, Timed, abba
from trainables.registry import PRECISIONS, load
from trainables.step.context import RankSetup, build_context
from trainables.step.process import drop_buckets, settings_for
from trainables.step.timing import clock_for
from trainables.train.epochs import epochs_of
from trainables.train.trainer import Trainer
from trainables.trial import Trial

GOAL = 1.02


def main() -> None:
    parser = options_of(
        __doc__, name="noise-scale-cost", small="a small MLP, in seconds; judged against nothing", seconds=300
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--model", default="resnet18_small")
    parser.add_argument("--batch", type=int, default=128, help="per rank and step")
    options = parser.parse_args()
    if options.small:
        options.model, options.quadruples = "mlp", 2
    available = torch.cuda.device_count() if options.device == "cuda" else len(os.sched_getaffinity(0))
    launch(measure, options.device, sizes_that_fit(options.ranks, available), vars(options))


def measure(place: Place, options: dict[str, Any]) -> None:
    """Measure each number of ranks; rank 0 writes after each."""
    clock = Clock(place, options["seconds"])
    measured: dict[int, BlockRates] = {}
    for size in sorted(place.groups):
        if place.rank < size:
            measured[size] = blocks(trial_of(size, options), place, options["quadruples"], clock)
            if place.rank == 0:
                write(options, measured)


def trial_of(size: int, options: dict[str, Any]) -> Trial:
    """Return a training with the noise scale on `size` ranks."""
    parts = 2 if size == 1 else 1
    return Trial(
        model=options["model"],
        device=options["device"],
        epochs=1,
        resident_data=True,
        world_size=size,
        parallel="none" if size == 1 else "ddp",
        batch_per_gpu=options["batch"] // parts,
        accumulation_steps=parts,
        noise_scale=True,
    )


def blocks(trial: Trial, place: Place, quadruples: int, clock: Clock) -> BlockRates:
    """Run steps without and with the noise scale in turn; the trial's ranks call it together."""
    with settings_for(trial, load(PRECISIONS[trial.precision])):
        without, watched = (steps_of(trial.but(noise_scale=value), place) for value in (False, True))
        sides = {"without": Side(without, trial.global_batch), "with": Side(watched, trial.global_batch)}
        measured = abba(sides, place, trial.world_size, quadruples, clock)
        del without, watched, sides
        if trial.parallel == "ddp":
            drop_buckets(place.groups[trial.world_size][0], place.device)
    return measured


def steps_of(trial: Trial, place: Place) -> Timed:
    """Return what times steps of a training on its first batch."""
    group, control = place.groups[trial.world_size]
    context = build_context(trial, RankSetup(place.rank, place.device, group, control))
    trainer, clock = Trainer(context), clock_for(place.device)
    batch = next(next(epochs_of(context)))
    trainer.prepare(batch)

    def timed(steps: int) -> float:
        clock.synchronize()
        context.barrier()
        started_s = time.perf_counter()
        for _ in range(steps):
            trainer.advance(batch)
        clock.synchronize()
        return time.perf_counter() - started_s

    return timed


def write(options: dict[str, Any], measured: dict[int, BlockRates]) -> None:
    """Write everything so far."""
    figures = []
    for size, blocks in measured.items():
        ratio, interval = blocks.ratio()
        goal, holds = ("none", None) if options["small"] else (f"<= {GOAL}", ratio <= GOAL)
        title = f"step with / without the noise scale, {options['model']} batch {options['batch']}, {size} ranks"
        figures.append(figure(title, ratio, interval, "ratio of step times", goal, holds))
    samples = [{"ranks": size, **row} for size, found in measured.items() for row in found.rows()]
    write_summary(options["name"], figures, samples)


if __name__ == "__main__":
    main()
