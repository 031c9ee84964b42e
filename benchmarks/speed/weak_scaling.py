"""How well do eager DDP steps scale weakly, and what does each DDP option change?

    python -m benchmarks.speed.weak_scaling --seconds 500            # 1 to 4 (and 8) GPUs, as many as there are
    python -m benchmarks.speed.weak_scaling --device cpu --small     # a small form

Resident synthetic images of 224 px, bf16, channels_last. The step on N GPUs and the one on the first of them stay ready
in the same processes and alternate (ABBA), so that efficiency = rate of N / (N x rate of one) has its own interval. DDP
options are tried one at a time, on the most GPUs, before smaller numbers of GPUs. Goals: ResNet-50 at batch 256 and
ResNet-18 at 512 at least 0.985, VGG-19 at 256 at least 0.95.
"""

import time
from typing import Any

from benchmarks.harness.common import figure, write_summary
from benchmarks.harness.levers import VARIANTS
from benchmarks.harness.ranks import Clock, Place, launch, options_of, sizes_that_fit
from benchmarks.harness.sides import BlockRates, Side, abba, ours
from study.capacity import count_gpus
from trainables.registry import PRECISIONS, load
from trainables.step.process import drop_buckets, release_memory, settings_for
from trainables.trial import Trial

GOALS = {"resnet50": 0.985, "resnet18": 0.985, "vgg19": 0.95}


def main() -> None:
    parser = options_of(__doc__, name="weak-scaling", small="a small MLP on two CPU ranks", seconds=540, quadruples=4)
    parser.add_argument("--device", default="cuda" if count_gpus() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--cases", default="vgg19:256,resnet50:256,resnet18:512", help="model:batch,...")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="a comma list")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--gpus", help="ranks above one, a comma list; left out: powers of two up to all GPUs")
    options = parser.parse_args()
    if options.small:
        options.cases, options.image_size, options.precision, options.quadruples = "mlp:64", 32, "fp32", 2
        options.variants = "default,gradients copied back from buckets"
    available = count_gpus() if options.device == "cuda" else 2
    sizes = sizes_that_fit(options.gpus or "2,4,8", available)
    if not sizes:
        raise SystemExit(f"weak scaling needs two GPUs or more; there are {available}")
    launch(measure, options.device, [1, *sizes], vars(options))


def cases(options: dict[str, Any], sizes: list[int]) -> list[tuple[str, Trial]]:
    """Return variant and trial: all models with each variant on the most ranks, then with the default on fewer."""
    models = [case.split(":") for case in options["cases"].split(",")]
    wanted = options["variants"].split(",")
    order = [(name, sizes[-1]) for name in wanted]
    order += [("default", size) for size in reversed(sizes[:-1]) if "default" in wanted]
    return [
        (
            name,
            Trial(
                model=model,
                dataset="synthetic",
                image_size=options["image_size"],
                device=options["device"],
                world_size=size,
                batch_per_gpu=int(batch),
                precision=options["precision"],
                memory_format="channels_last",
                warmup_steps=5,
            ).but(**VARIANTS[name]),
        )
        for name, size in order
        for model, batch in models
    ]


def measure(place: Place, options: dict[str, Any]) -> None:
    """Measure all cases, in order. Rank 0 writes after each. Ranks that a case does not use sleep."""
    clock = Clock(place, options["seconds"])
    measured: dict[tuple[str, Trial], BlockRates] = {}
    skipped: list[dict[str, Any]] = []
    longest_s = 0.0
    for name, trial in cases(options, sorted(place.groups)[1:]):
        if not clock.fits(longest_s):
            skipped.append({**what(name, trial), "reason": "not run: out of time"})
            continue
        begin_s = time.monotonic()
        if place.rank < trial.world_size:
            measured[name, trial] = against_one(trial, place, options["quadruples"], clock)
            release_memory()
        longest_s = max(longest_s, time.monotonic() - begin_s)
        if place.rank == 0:
            write(options, measured, skipped)
    if place.rank == 0:
        write(options, measured, skipped)


def what(variant: str, trial: Trial) -> dict[str, Any]:
    fields = ("model", "batch_per_gpu", "precision", "world_size")
    return {"variant": variant, **{name: getattr(trial, name) for name in fields}}


def against_one(trial: Trial, place: Place, quadruples: int, clock: Clock) -> BlockRates:
    """Alternate the trial on its ranks and the same on the first of them with DDP's defaults."""
    one = trial.but(world_size=1, **{name: Trial.model_fields[name].default for name in _DDP_OPTIONS})
    with settings_for(trial, load(PRECISIONS[trial.precision])):
        alone = ours(one, place).timed if place.rank == 0 else None
        sides = {"all": Side(ours(trial, place).timed, trial.global_batch), "one": Side(alone, one.global_batch)}
        blocks = abba(sides, place, trial.world_size, quadruples, clock)
        del sides, alone
        if place.rank == 0:
            drop_buckets(place.groups[1][0], place.device)
        drop_buckets(place.groups[trial.world_size][0], place.device)
    return blocks


_DDP_OPTIONS = ("parallel", "bucket_mb", "gradient_as_bucket_view", "static_graph", "broadcast_buffers")


def write(
    options: dict[str, Any], measured: dict[tuple[str, Trial], BlockRates], skipped: list[dict[str, Any]]
) -> None:
    """Write everything so far."""
    on_gpu = options["device"] == "cuda"
    figures = []
    for (variant, trial), blocks in measured.items():
        name = f"{trial.model} batch {trial.batch_per_gpu}, {trial.world_size} {trial.device}, {variant}"
        ratio, interval = blocks.ratio()
        value, (low, high) = ratio / trial.world_size, (bound / trial.world_size for bound in interval)
        goal = GOALS.get(trial.model) if on_gpu and variant == "default" else None
        asked, holds = (f">= {goal}", value >= goal) if goal else ("none", None)
        figures.append(figure(f"weak efficiency, {name}", value, (low, high), "", asked, holds))
        rate, interval = blocks.rate("all")
        figures.append(figure(f"rate, {name}", rate, interval, "images/s", "none", None))
    samples = [{**what(*case), **row} for case, blocks in measured.items() for row in blocks.rows()]
    write_summary(options["name"], figures, samples + skipped)


if __name__ == "__main__":
    main()
