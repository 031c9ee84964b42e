"""Do two gloo ranks reach the limit of two cores? Compare with two independent one-rank runs at once.

    python -m benchmarks.speed.cpu_ranks --seconds 240
    python -m benchmarks.speed.cpu_ranks --small

Both sides stay ready in the same two processes and alternate (ABBA): one step under DDP, and one without, on both ranks
at once. First the host schedules the ranks freely, then each is pinned to its own core (`pin_cores`). Goal: pinned, a
ratio of at least 0.95. The result is meaningless if other programs use the machine; its load before and after is stored
with the samples.
"""

import os
from typing import Any

from benchmarks.harness.common import figure, write_summary
from benchmarks.harness.ranks import Clock, Place, launch, options_of
from benchmarks.harness.sides import BlockRates, Side, abba, ours
from trainables.registry import PRECISIONS, load
from trainables.step.process import settings_for
from trainables.trial import Trial

GOAL = 0.95
RANKS = 2


def main() -> None:
    parser = options_of(
        __doc__, name="cpu-ranks", small="a small MLP, in seconds; judged against nothing", seconds=300, image_size=64
    )
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch", type=int, default=32, help="per rank")
    options = parser.parse_args()
    if options.small:
        options.model, options.image_size, options.quadruples = "mlp", 32, 2
    if len(os.sched_getaffinity(0)) < RANKS:
        raise SystemExit(f"this needs {RANKS} cores; this process may use {len(os.sched_getaffinity(0))}")
    launch(measure, "cpu", [1, RANKS], vars(options))


def measure(place: Place, options: dict[str, Any]) -> None:
    """Measure both cases on both ranks. Rank 0 writes after each."""
    clock = Clock(place, options["seconds"])
    measured: dict[str, BlockRates] = {}
    load_before = os.getloadavg()[0]
    for name, pin_cores in (("free", False), ("pinned", True)):
        trial = Trial(
            model=options["model"],
            dataset="synthetic",
            image_size=options["image_size"],
            world_size=RANKS,
            batch_per_gpu=options["batch"],
            pin_cores=pin_cores,
        )
        alone = trial.but(world_size=1, parallel="none")
        with settings_for(trial, load(PRECISIONS[trial.precision])):
            together = ours(trial, place).timed
            independent = ours(alone, place, meeting=RANKS).timed
            samples = trial.global_batch
            sides = {"ranks": Side(together, samples), "independent": Side(independent, samples)}
            measured[name] = abba(sides, place, RANKS, options["quadruples"], clock)
        if place.rank == 0:
            write(options, measured, [load_before, os.getloadavg()[0]])


def write(options: dict[str, Any], measured: dict[str, BlockRates], loads: list[float]) -> None:
    """Write everything so far."""
    what = f"{options['model']} batch {options['batch']} at {options['image_size']} px"
    figures = []
    for name, blocks in measured.items():
        ratio, interval = blocks.ratio()
        judged = name == "pinned" and not options["small"]
        goal, holds = (f">= {GOAL}", ratio >= GOAL) if judged else ("none", None)
        title = f"{RANKS} gloo ranks, {name} / {RANKS} independent ones, {what}"
        figures.append(figure(title, ratio, interval, "ratio of images/s", goal, holds))
        rate, interval = blocks.rate("ranks")
        figures.append(figure(f"{RANKS} gloo ranks, {name}, {what}", rate, interval, "images/s", "none", None))
    samples = [{"case": name, **row} for name, blocks in measured.items() for row in blocks.rows()]
    samples.append({"load_average_1min": loads, "cores": len(os.sched_getaffinity(0))})
    write_summary(options["name"], figures, samples)


if __name__ == "__main__":
    main()
