"""Does GPT-2 learn equally on one and two GPUs, and with bf16 weights as with fp32 weights under autocast?

    python -m benchmarks.truth.losses --seconds 260
    python -m benchmarks.truth.losses --cases 1:bf16,1:bf16_master --steps 100
    python -m benchmarks.truth.losses --device cpu --small           # a small form, on two CPU ranks

A case is gpus:precision[+lever+lever]. Every case trains the product's own step (its wrapper, compiler, optimizer and
master weights) on the bundled text with AdamW. A seed chooses the initial weights and the order of the sequences, both
equal in all cases. (`bf16_master` itself rounds the weights to bf16. Its default cases also have the fused loss, as in
the fastest step.) The product's loader would give one rank and two the same global batches, but in one order for all
seeds. So the batches come from here: a seed shuffles the sequences of the text anew for each pass, a step takes the
next `--batch` of them, and each rank takes an equal part.

The loss of a step is what the step returns: of its own batch before the update, in nats per token, as the mean over the
ranks. The final loss is the mean of the last 10 steps. Cases are compared seed by seed, so that what is common to a
seed cancels. Intervals are Student's, over the seeds. The text is short, so this is about the start of a training.

Goal: the interval of each difference of final losses lies within 1 % of the loss. The interval, because a mean near
zero may be luck. A fixed share, because the spread of a few seeds is itself too uncertain for a limit. It is shown for
comparison: a difference below it is smaller than what the choice of a seed changes.
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from analysis.statistics import mean_interval
from benchmarks.harness.common import failure_line, figure, write_summary
from benchmarks.harness.levers import TOKEN_LEVERS, changes_of, levered
from benchmarks.harness.ranks import Clock, Place, launch
from study.capacity import count_gpus
from trainables.data.text import TextDataset
from trainables.step.context import RankContext, RankSetup, rank_context
from trainables.step.parallel import broadcast_from_rank0
from trainables.step.process import drop_buckets, release_memory
from trainables.step.step import training_step
from trainables.step.timing import no_mark, read_numbers
from trainables.trial import Trial

FULL = {
    "cases": "1:bf16,2:bf16,1:bf16_master+fused_loss,2:bf16_master+fused_loss",
    "steps": 150,
    "seeds": 3,
    "batch": 32,
    "execution": "compile",
}
SMALL = {
    "cases": "1:fp32,2:fp32,1:bf16_master+fused_loss,2:bf16_master+fused_loss",
    "steps": 20,
    "seeds": 2,
    "batch": 8,
    "execution": "eager",
}
"""defaults of the options in full, and with --small"""

AVERAGED_STEPS = 10
"""steps of a smoothed loss, and of the final loss"""

ROW_STEPS = 5
"""steps per row of the summary"""

GOAL_SHARE = 0.01
"""of the reference's final loss"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if count_gpus() else "cpu", choices=["cuda", "cpu"])
    levers = ", ".join(sorted(TOKEN_LEVERS))
    parser.add_argument("--cases", help=f"gpus:precision[+lever+lever],... with these levers: {levers}")
    parser.add_argument("--steps", type=int, help=f"steps per case and seed, at least {AVERAGED_STEPS}")
    parser.add_argument("--seeds", type=int, help="number of seeds")
    parser.add_argument("--batch", type=int, help="sequences per step, over all GPUs")
    parser.add_argument("--execution", choices=["eager", "compile", "compile_blocks"])  # a graph keeps its optimizer
    parser.add_argument("--seconds", type=float, default=540, help="time limit for all cases")
    parser.add_argument("--small", action="store_true", help="a tiny model and few steps, on CPUs in seconds")
    parser.add_argument("--name", default="losses", help="folder under benchmarks/results")
    options = vars(parser.parse_args())
    options |= {name: value for name, value in (SMALL if options["small"] else FULL).items() if options[name] is None}
    if options["steps"] < AVERAGED_STEPS or options["seeds"] < 1:
        parser.error(f"--steps must be at least {AVERAGED_STEPS}, and --seeds at least 1")
    try:
        sizes = {trial_of(case, options).world_size for case in options["cases"].split(",")}
    except (ValueError, ZeroDivisionError) as error:
        parser.error(f"--cases {options['cases']}: {error}")
    if uneven := [size for size in sizes if options["batch"] % size]:
        parser.error(f"--batch {options['batch']} cannot be divided equally among {uneven[0]} GPUs")
    if options["device"] == "cuda" and max(sizes) > count_gpus():
        parser.error(f"--cases need {max(sizes)} GPUs; there are {count_gpus()}")
    launch(measure, options["device"], sorted(sizes), options)


@dataclass
class Outcome:
    """What was measured of a case. curves: the loss of each step in nats, by seed. reason: why seeds are missing.

    first_s: seconds until the first seed was done, with compilation. seed_s: seconds of the last seed after its first
    step.
    """

    curves: dict[int, list[float]] = field(default_factory=dict)
    reason: str = ""
    first_s: float = 0.0
    seed_s: float = 0.0

    def finals(self) -> dict[int, float]:
        """Return the final loss in nats, by seed."""
        return {seed: statistics.fmean(curve[-AVERAGED_STEPS:]) for seed, curve in self.curves.items()}


def measure(place: Place, options: dict[str, Any]) -> None:
    """Train all cases, in order. Rank 0 writes after each. Ranks that a case does not use wait."""
    clock = Clock(place, options["seconds"])
    outcomes: dict[str, Outcome] = {}
    for case in options["cases"].split(","):
        trial, outcome = trial_of(case, options), Outcome()
        fits = clock.fits(max((done.first_s for done in outcomes.values()), default=0.0))
        outcomes[case] = outcome
        if not fits:
            outcome.reason = "not run: out of time"
        elif place.rank < trial.world_size:
            try:  # one case that fails must not cost the others
                train_case(case, trial, place, options, clock, outcome)
            except Exception as error:  # noqa: BLE001
                outcome.reason = failure_line(error)
            release_memory()
        if place.rank == 0:
            write(options["name"], outcomes)


def levers_of(case: str) -> str:
    """Return the levers of a case, joined by +."""
    return case.partition(":")[2].partition("+")[2]


def trial_of(case: str, options: dict[str, Any]) -> Trial:
    """Return the trial of a case. Raises ValueError."""
    size, _, mode = case.partition(":")
    small, processes = options["small"], int(size)
    base = Trial(
        model="gpt2_tiny" if small else "gpt2",
        dataset="token_sample",
        device=options["device"],
        world_size=processes,
        parallel="none" if processes == 1 else "ddp",
        batch_per_gpu=options["batch"] // processes,
        sequence_length=64 if small else 1024,
        precision=mode.partition("+")[0],
        execution=options["execution"],
        optimizer="adamw",
        learning_rate=3e-4,
        communication_steps=0,
    )
    return base.but(**changes_of(levers_of(case)))


def train_case(case: str, trial: Trial, place: Place, options: dict[str, Any], clock: Clock, outcome: Outcome) -> None:
    """Train all seeds of a case, with one model that is compiled once. Collective over its ranks."""
    started_s = time.monotonic()
    group, control = place.groups[trial.world_size]
    setup = RankSetup(place.rank, place.device, group, control)
    with levered(levers_of(case)), rank_context(trial, setup) as context:
        model = context.strategy.wrap_model(context.workload.model, trial, group)
        for seed in range(options["seeds"]):
            if not clock.fits(outcome.seed_s, trial.world_size):
                outcome.reason = f"seeds from {seed} on not run: out of time"
                break
            initialise(context, model, seed)
            batches = batches_of(context, seed, options["steps"])
            outcome.curves[seed], outcome.seed_s = train_seed(context, model, batches)
            outcome.first_s = outcome.first_s or time.monotonic() - started_s
        del context, model
        if trial.world_size > 1:
            drop_buckets(group, place.device)


@torch.no_grad()
def initialise(context: RankContext, model: torch.nn.Module, seed: int) -> None:
    """Overwrite the weights with the initial ones of this seed. Collective over the trial's ranks."""
    assert context.workload.blueprint is not None
    torch.manual_seed(seed)
    with context.device:
        initial = context.workload.blueprint()
    weights: list[torch.Tensor] = list(model.parameters())
    for weight, value in zip(weights, initial.parameters(), strict=True):
        weight.copy_(value)
    if context.distributed:  # DDP does so only when it wraps the model
        broadcast_from_rank0(weights, context.group)


def batches_of(context: RankContext, seed: int, steps: int) -> Iterator[Any]:
    """Yield this rank's part of each global batch, on the host."""
    trial, dataset = context.trial, context.workload.dataset
    assert isinstance(dataset, TextDataset)
    sequences = (len(dataset) - 1) // trial.sequence_length  # the last token is only a target
    generator = torch.Generator().manual_seed(seed)
    passes = math.ceil(steps * trial.global_batch / sequences)
    order = torch.cat([torch.randperm(sequences, generator=generator) for _ in range(passes)])
    for batch in order.split(trial.global_batch)[:steps]:
        part = batch.chunk(trial.world_size)[context.rank]
        yield dataset.__getitems__((part * trial.sequence_length).tolist())


def train_seed(context: RankContext, model: torch.nn.Module, batches: Iterator[Any]) -> tuple[list[float], float]:
    """Train the model on all batches. Return the loss of each step, and the seconds without the first step.

    Collective over the trial's ranks.
    """
    step = training_step(context, model)  # with a new optimizer, whose master weights are copies of the current weights
    losses = [step(next(batches), no_mark).loss]
    losses[0].item()  # wait for the first step, which compiles
    started_s = time.monotonic()
    losses += [step(batch, no_mark).loss for batch in batches]
    sums = torch.tensor(read_numbers(losses), dtype=torch.float64)
    dist.all_reduce(sums, group=context.control)
    return (sums / context.trial.world_size).tolist(), time.monotonic() - started_s


def figures_of(outcomes: dict[str, Outcome]) -> list[dict[str, Any]]:
    """Return the final losses, their spread among seeds in the first case, and the comparisons of cases."""
    figures = [
        figure(f"final loss, {case}, seed {seed}", loss, None, "nats", "none", None)
        for case, outcome in outcomes.items()
        for seed, loss in outcome.finals().items()
    ]
    first, outcome = next(iter(outcomes.items()))
    if len(outcome.curves) > 1:
        spread = float(np.std(list(outcome.finals().values()), ddof=1))
        figures.append(figure(f"spread among seeds, {first}", spread, None, "nats", "none", None))
    for reference, other in itertools.combinations(outcomes, 2):
        if any(mine == theirs for mine, theirs in zip(reference.split(":"), other.split(":"), strict=True)):
            figures += comparison(f"{other} - {reference}", outcomes[other], outcomes[reference])
    return figures


def comparison(name: str, outcome: Outcome, reference: Outcome) -> list[dict[str, Any]]:
    """Return the figures of two cases that differ in the number of GPUs or in the mode. Empty without common seeds."""
    seeds = sorted(outcome.curves.keys() & reference.curves.keys())
    if not seeds:
        return []
    mine, theirs = outcome.finals(), reference.finals()
    differences = [mine[seed] - theirs[seed] for seed in seeds]
    limit = GOAL_SHARE * statistics.fmean(theirs[seed] for seed in seeds)
    interval = mean_interval(pd.Series(differences)) if len(seeds) > 1 else None
    holds = None if interval is None else -limit <= interval[0] and interval[1] <= limit
    goal = f"interval in [-{limit:.3g}, {limit:.3g}], {100 * GOAL_SHARE:g} % of the loss"
    pairs = [(np.array(outcome.curves[seed]), np.array(reference.curves[seed])) for seed in seeds]
    smooth = np.full(AVERAGED_STEPS, 1 / AVERAGED_STEPS)
    largest = max(float(np.abs(np.convolve(a - b, smooth, "valid")).max()) for a, b in pairs)
    first = max(float(abs(a[0] - b[0])) for a, b in pairs)
    return [
        figure(f"final loss, {name}", statistics.fmean(differences), interval, "nats", goal, holds),
        figure(f"largest distance of smoothed losses, {name}", largest, None, "nats", "none", None),
        figure(f"largest distance of first losses, {name}", first, None, "nats", "none", None),
    ]


def rows_of(case: str, outcome: Outcome) -> list[dict[str, Any]]:
    """Return the rows of a case for the summary: the first loss, then the mean of every `ROW_STEPS` losses."""
    rows: list[dict[str, Any]] = []
    for seed, curve in outcome.curves.items():
        means = [(1, curve[0])]
        for start in range(0, len(curve), ROW_STEPS):
            part = curve[start : start + ROW_STEPS]
            means.append((start + len(part), statistics.fmean(part)))
        rows += [{"case": case, "seed": seed, "step": step, "loss": round(loss, 5)} for step, loss in means]
    if outcome.reason:
        rows.append({"case": case, "reason": outcome.reason})
    return rows


def write(name: str, outcomes: dict[str, Outcome]) -> None:
    """Write everything so far."""
    for case, outcome in outcomes.items():
        if outcome.reason:
            print(f"{case}: {outcome.reason}", flush=True)
    samples = [row for case, outcome in outcomes.items() for row in rows_of(case, outcome)]
    write_summary(name, figures_of(outcomes), samples)


if __name__ == "__main__":
    main()
