"""How fast does GPT-2 124M train on one GPU and with DDP on several? Against a bare loop of the same mode and batch.

    python -m benchmarks.speed.gpt2 --gpus 1 --profile 1:compile:64 --seconds 240
    python -m benchmarks.speed.gpt2 --gpus 2 --seconds 240
    python -m benchmarks.speed.gpt2 --cases 1:compile_graph:32:fused_loss --sides ours,without --name gpt2-levers
    python -m benchmarks.speed.gpt2 --device cpu --small                     # a small form, on two CPU ranks

1,024 tokens per sequence, bf16, AdamW, resident random tokens. All sides stay ready in the same processes and
alternate: ours, the bare loop, and on several GPUs our step without DDP. It runs on the first of them only ("one"), for
the weak efficiency, and on all of them at once ("each", as fast as the slowest): what GPUs that differ cost
without communication.

A case is gpus:mode:sequences or gpus:mode:sequences:lever+lever, with the sequences per GPU. A lever changes our trial,
or an option of the compiler, which then applies to all sides but "without": our step without the levers, as a CUDA
graph. (The compiler would give two steps of one model the same kernels, but a graph keeps those it was captured with.)
Utilisation divides the operations that `trainables.step.flops` counts (Chowdhery et al.
2022, appendix B; causal attention counts in full) by the data sheet's peak.

`--profile` also stores the time of each kernel and its least time, see `benchmarks.speed.roofline`. Goals: 560,000
tokens/s on one H100 at 64 sequences; at least 0.995 of the bare loop in every mode; weak efficiency on two GPUs of
0.985 at 64 and 0.92 at 8 sequences per GPU.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from analysis.measure.hardware import PEAKS
from benchmarks.harness.common import abba_ratio, failure_line, figure, write_summary
from benchmarks.harness.levers import TOKEN_LEVERS, changes_of, levered
from benchmarks.harness.ranks import Clock, Place, launch, options_of
from benchmarks.harness.sides import BlockRates, Ours, Side, abba, bare, ours
from benchmarks.speed.roofline import LANGUAGE_MODEL, profiled, roofline, write_kernels
from study.capacity import count_gpus
from trainables.registry import MODELS, PRECISIONS, load
from trainables.step.cuda_graph import stream_for
from trainables.step.flops import step_flops
from trainables.step.process import drop_buckets, kernels_for, release_memory, settings_for
from trainables.trial import Trial

GOAL_TOKENS_PER_S = 560_000
GOAL_DEVICE = "NVIDIA H100 80GB HBM3"
GOAL_BATCH = 64
GOAL_RATIO = 0.995
GOAL_EFFICIENCY = {64: 0.985, 8: 0.92}
"""weak efficiency on two GPUs, by sequences per GPU"""

CASES = {
    1: "1:compile:64,1:compile:8,1:compile_graph:8,1:eager:8,1:eager:32,1:eager:64,1:compile:32,1:graph:8",
    2: "2:compile:8,2:compile:64,2:compile_graph:8,2:eager:8,2:eager:64,2:compile:32",
}
"""by the largest number of GPUs, the most important first"""


def main() -> None:
    parser = options_of(
        __doc__, name="gpt2-speed", small="a tiny model in fp32, eager, on CPUs in seconds", seconds=540, quadruples=4
    )
    parser.add_argument("--device", default="cuda" if count_gpus() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--gpus", type=int, default=1, choices=sorted(CASES), help="default cases for so many GPUs")
    parser.add_argument(
        "--cases", help="gpus:mode:sequences[:lever+lever],...; levers: " + ", ".join(sorted(TOKEN_LEVERS))
    )
    parser.add_argument("--sides", default="ours,bare,one,each", help="a comma list of these and without")
    parser.add_argument("--profile", default="", help="cases of these whose kernels are listed, a comma list")
    options = parser.parse_args()
    options.cases = options.cases or CASES[options.gpus]
    if options.small:
        options.cases, options.quadruples = "1:eager:2,2:eager:2:fused_loss+ddp_bf16", 2
    sizes = {int(case.split(":")[0]) for case in options.cases.split(",")}
    if options.device == "cuda" and max(sizes) > count_gpus():
        parser.error(f"--cases need {max(sizes)} GPUs; there are {count_gpus()}")
    launch(measure, options.device, sorted(sizes), vars(options))


@dataclass
class Outcome:
    """What was measured of a case. reason: why a part is missing. table: the roofline, if it was asked for."""

    trial: Trial
    blocks: BlockRates | None = None
    reason: str = ""
    table: dict[str, Any] | None = None
    peak_bytes: int | None = None
    seconds: float = 0.0


def measure(place: Place, options: dict[str, Any]) -> None:
    """Measure all cases, in order. Rank 0 writes after each. Ranks that a case does not use wait."""
    clock = Clock(place, options["seconds"])
    outcomes: dict[str, Outcome] = {}
    for case in options["cases"].split(","):
        trial = trial_of(case, options)
        alike = [done.seconds for done in outcomes.values() if done.trial.execution == trial.execution]
        if not clock.fits(max(alike, default=0.0)):
            outcomes[case] = Outcome(trial, reason="not run: out of time")
        elif place.rank < trial.world_size:
            begin_s = time.monotonic()
            outcomes[case] = measured(case, trial, place, options, clock)
            release_memory()
            outcomes[case].seconds = time.monotonic() - begin_s
        if place.rank == 0:
            write(options, outcomes)


def trial_of(case: str, options: dict[str, Any]) -> Trial:
    """Return the trial of a case."""
    size, mode, batch, levers = (*case.split(":"), "")[:4]
    small = options["small"]
    base = Trial(
        model="gpt2_tiny" if small else "gpt2",
        dataset="synthetic",
        device=options["device"],
        world_size=int(size),
        parallel="none" if size == "1" else "ddp",
        batch_per_gpu=int(batch),
        sequence_length=64 if small else 1024,
        precision="fp32" if small else "bf16",
        execution=mode,
        optimizer="adamw",
        learning_rate=3e-4,
        warmup_steps=5,
        communication_steps=0,
    )
    return base.but(**changes_of(levers))


def measured(case: str, trial: Trial, place: Place, options: dict[str, Any], clock: Clock) -> Outcome:
    """Alternate the sides of a case, and list the kernels of ours if that was asked for. Collective over its ranks."""
    outcome = Outcome(trial)
    levers = (*case.split(":"), "")[3]
    names = options["sides"].split(",")
    plain = trial_of(":".join(case.split(":")[:3]), options)
    with settings_for(plain, load(PRECISIONS[plain.precision])), stream_for(trial, place.device):
        sides: dict[str, Side] = {}
        mine: list[Ours] = []
        with noted(outcome):
            if "without" in names and levers and trial.captured:
                sides["without"] = Side(ours(plain, place).timed, plain.global_batch)
                torch.compiler.reset()  # a graph needs no compiler any more; `ours` must not find the kernels of this
            with kernels_for(trial), levered(levers):
                sides = built(trial, place, names, mine) | sides
        if not any(reasons := gathered(place, trial, outcome.reason)):
            with noted(outcome):
                outcome.blocks = abba(sides, place, trial.world_size, options["quadruples"], clock)
            if place.device.type == "cuda":
                outcome.peak_bytes = torch.cuda.max_memory_allocated()
            if case in options["profile"].split(","):
                with noted(outcome):
                    outcome.table = roofline(profiled(mine[0]), place.device, trial, LANGUAGE_MODEL)
        outcome.reason = outcome.reason or next(filter(None, reasons), "")
        del sides, mine
        if trial.world_size > 1:
            drop_buckets(place.groups[trial.world_size][0], place.device)
    return outcome


def built(trial: Trial, place: Place, names: list[str], mine: list[Ours]) -> dict[str, Side]:
    """Return the sides of a case, warmed up. Appends ours to `mine`."""
    mine.append(ours(trial, place))
    sides = {"ours": Side(mine[0].timed, trial.global_batch)}
    if "bare" in names:
        sides["bare"] = Side(bare(trial, place), trial.global_batch)
    if {"one", "each"} & {*names} and trial.world_size > 1:
        defaults = {name: Trial.model_fields[name].default for name in ("bucket_mb", "gradient_as_bucket_view")}
        one = trial.but(world_size=1, parallel="none", static_graph=False, split_graph=True, **defaults)
        timed = ours(one, place, alone=True).timed
        alone = {
            "one": Side(timed if place.rank == 0 else None, one.global_batch),
            "each": Side(timed, trial.global_batch),
        }
        sides |= {name: side for name, side in alone.items() if name in names}
    return sides


@contextlib.contextmanager
def noted(outcome: Outcome) -> Iterator[None]:
    """Note an exception as the reason of the outcome: one case that fails must not cost the others."""
    try:
        yield
    except torch.OutOfMemoryError:
        outcome.reason = "does not fit in memory"
    except Exception as error:  # noqa: BLE001
        outcome.reason = failure_line(error)


def gathered(place: Place, trial: Trial, reason: str) -> list[str]:
    """Return the reasons of all ranks of a case. Collective over them."""
    held: list[Any] = [None] * trial.world_size
    torch.distributed.all_gather_object(held, reason, group=place.groups[trial.world_size][1])
    return held


def flops_per_token(trial: Trial) -> float:
    """Return the operations per token of a forward and a backward pass."""
    facts = MODELS[trial.model]
    blueprint = partial(load(facts), facts.vocabulary, trial)
    tokens = torch.empty(1, trial.sequence_length, dtype=torch.int32, device="meta")
    return step_flops(blueprint, tokens, trial.model, trial.image_size) / trial.sequence_length


def figures_of(case: str, outcome: Outcome) -> list[dict[str, Any]]:
    """Return the figures of a case: tokens/s of all GPUs, utilisation, ours / bare, weak efficiency."""
    trial, blocks = outcome.trial, outcome.blocks
    if blocks is None or len(blocks.rates["ours"]) < 2:
        return []
    tokens, count = trial.sequence_length, trial.world_size
    on_gpu = trial.device == "cuda"
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    peak = PEAKS[device].flops_per_s("bf16") if device in PEAKS else None
    figures = []
    for side in blocks.rates:
        rate, (low, high) = (blocks.rate(side)[0], blocks.rate(side)[1])
        judged = (side, count, trial.batch_per_gpu, device) == ("ours", 1, GOAL_BATCH, GOAL_DEVICE)
        goal = f">= {GOAL_TOKENS_PER_S} in the best case" if judged else "none"
        holds = rate * tokens >= GOAL_TOKENS_PER_S if judged else None
        name = f"{side}, {case}"
        figures.append(figure(name, rate * tokens, (low * tokens, high * tokens), "tokens/s", goal, holds))
        if peak:
            share = rate * tokens * flops_per_token(trial) / peak / (count if side != "one" else 1)
            figures.append(figure(f"utilisation, {name}", share, None, "of the peak", "none", None))
    if "bare" in blocks.rates:
        ratio, interval = abba_ratio(blocks.rates["ours"], blocks.rates["bare"])
        holds = ratio >= GOAL_RATIO if on_gpu else None
        figures.append(figure(f"ours/bare, {case}", ratio, interval, "ratio", f">= {GOAL_RATIO}", holds))
    if "without" in blocks.rates:
        ratio, interval = abba_ratio(blocks.rates["ours"], blocks.rates["without"])
        figures.append(figure(f"with/without, {case}", ratio, interval, "ratio", "none", None))
    if "one" in blocks.rates:
        ratio, interval = abba_ratio(blocks.rates["ours"], blocks.rates["one"])
        asked = GOAL_EFFICIENCY.get(trial.batch_per_gpu) if on_gpu and count == 2 else None
        goal, holds = (f">= {asked}", ratio / count >= asked) if asked else ("none", None)
        bounds = (interval[0] / count, interval[1] / count)
        figures.append(figure(f"weak efficiency, {case}", ratio / count, bounds, "", goal, holds))
    if "each" in blocks.rates:
        ratio, interval = abba_ratio(blocks.rates["ours"], blocks.rates["each"])
        figures.append(figure(f"ours/each, {case}", ratio, interval, "ratio", "none", None))
    if outcome.peak_bytes:
        figures.append(figure(f"peak memory of all sides, {case}", outcome.peak_bytes, None, "bytes", "none", None))
    return figures


def write(options: dict[str, Any], outcomes: dict[str, Outcome]) -> None:
    """Write everything so far."""
    figures, samples = [], []
    for case, outcome in outcomes.items():
        figures += figures_of(case, outcome)
        samples += [{"case": case, **row} for row in (outcome.blocks.rows() if outcome.blocks else [])]
        if outcome.reason:
            print(f"{case}: {outcome.reason}", flush=True)
            samples.append({"case": case, "reason": outcome.reason})
        if outcome.seconds:
            samples.append({"case": case, "seconds_with_compilation": outcome.seconds})
    folder = write_summary(options["name"], figures, samples)
    tables = {case: outcome.table for case, outcome in outcomes.items() if outcome.table}
    write_kernels(folder, tables)


if __name__ == "__main__":
    main()
