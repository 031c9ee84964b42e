"""How fast does ResNet-50 train on one GPU? Execution modes x batches, against a bare loop of the same mode and batch.

    python -m benchmarks.speed.resnet50_modes --seconds 500
    python -m benchmarks.speed.resnet50_modes --cases compile_graph:1024:stem,compile:512:autotune --profile compile:512
    python -m benchmarks.speed.resnet50_modes --against compile_graph:512 --cases compile_graph:512:pointwise
    python -m benchmarks.speed.resnet50_modes --device cpu --small            # a small form

224 px, bf16, channels_last, resident synthetic images. Both sides stay ready in one process and alternate (ABBA). A
case is mode:batch or mode:batch:lever+lever. A lever sets compiler options for both sides, except two that the bare
loop lacks: `stem` (our trial's `rewritten_stem`) and `uint8` (our images as bytes). Goals, on one H200: the best mode
at least 8,000 images/s; eager at least 0.99 of the bare loop, any other mode not below it.

`--alone` omits the bare loop. `--against CASE` replaces it by our own step of that case, to show the gain of one lever,
mode or batch. `--gradients` compares the compiled gradient, with and without the rewritten stem, with the eager fp32
one, for ResNet-18 at 64 px.

`--profile` also stores the time of each kernel from a Kineto trace, with the least operations and bytes of its
operator, as a roofline (Williams, Waterman and Patterson 2009): kernels.json and kernels.md. Kernels of a CUDA graph
have no operator: profile `eager` or `compile` instead of `graph` and `compile_graph`, which replay the same kernels.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.harness.common import failure_line, figure, write_summary
from benchmarks.harness.levers import LEVERS, STEM, UINT8, UINT8_WORKLOAD, compiler
from benchmarks.harness.ranks import Clock, Place, launch, options_of
from benchmarks.harness.sides import GRADIENT_TOLERANCE, BlockRates, Side, abba, bare, distance, gradient, ours
from benchmarks.speed.roofline import profiled, roofline, write_kernels
from trainables.registry import PRECISIONS, load
from trainables.step.cuda_graph import stream_for
from trainables.step.process import release_memory, settings_for
from trainables.trial import Trial

GOAL_IMAGES_PER_S = 8000
GOAL_DEVICE = "NVIDIA H200"

CASES = (
    "eager:256,compile:256,compile_graph:256,graph:256,compile:512,compile_graph:512,compile_graph:1024,compile:1024,"
    "eager:512,eager:32,compile_graph:32"
)

MEMORY = "both sides do not fit on one GPU: one ran after the other"


def main() -> None:
    parser = options_of(
        __doc__, name="resnet50-modes", small="ResNet-18 at 32 px, eager, on a CPU in seconds", seconds=540
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument(
        "--cases", default=CASES, help="mode:batch[:lever+lever],...; levers: stem, uint8, " + ", ".join(LEVERS)
    )
    parser.add_argument("--profile", default="", help="cases of these whose kernels are listed, a comma list")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--alone", action="store_true", help="without the bare loop")
    parser.add_argument(
        "--against", help="the other side of every case: our own step of this one, eager or as a CUDA graph"
    )
    parser.add_argument("--gradients", action="store_true", help="of the rewritten stem against the plain one's")
    options = parser.parse_args()
    if options.small:
        options.model, options.image_size, options.precision = "resnet18", 32, "fp32"
        options.cases, options.quadruples = "eager:2,eager:4", 2
    if options.against and options.against.partition(":")[0] not in ("eager", "graph", "compile_graph"):
        parser.error("--against: each case resets the compiler's cache; allowed: eager, graph, compile_graph")
    launch(measure, options.device, [1], vars(options))


def measure(place: Place, options: dict[str, Any]) -> None:
    """Measure all cases, in order, on the one rank. Write after each."""
    clock = Clock(place, options["seconds"])
    measured: dict[str, BlockRates] = {}
    reasons: dict[str, str] = {}
    tables: dict[str, Any] = {}
    longest_s = 0.0
    other = None
    if options["against"]:
        with ready(options["against"], place, options) as trial:
            other = (options["against"], Side(ours(trial, place).timed, trial.global_batch))
    for case in options["cases"].split(","):
        if not clock.fits(longest_s):
            reasons[case] = "not run: out of time"
            continue
        begin_s = time.monotonic()
        blocks, table, reason = alternated(case, place, options, clock, other)
        release_memory()
        if reason == MEMORY and other is None:
            blocks = one_by_one(case, place, options, clock)
        measured |= {case: blocks} if blocks else {}
        tables |= {case: table} if table else {}
        reasons |= {case: reason} if reason else {}
        longest_s = max(longest_s, time.monotonic() - begin_s)
        write(options, measured, reasons, tables, {})
    if options["gradients"]:
        write(options, measured, reasons, tables, errors_of_gradients(place, options))


def alternated(
    case: str, place: Place, options: dict[str, Any], clock: Clock, other: tuple[str, Side] | None
) -> tuple[BlockRates | None, dict[str, Any] | None, str]:
    """Alternate both sides. Also return the roofline if requested, and why a part is missing. other: `--against`."""
    blocks = table = None
    try:
        with ready(case, place, options) as trial:
            mine = ours(trial, place)
            sides = {"ours": Side(mine.timed, trial.global_batch)}
            if other:
                sides |= dict([other])
            elif not options["alone"]:
                sides |= {"bare": Side(bare(trial, place), trial.global_batch)}
            blocks = abba(sides, place, 1, options["quadruples"], clock)
            if case in options["profile"].split(","):
                table = roofline(profiled(mine), place.device, trial)
    except torch.OutOfMemoryError:
        return blocks, None, "does not fit on one GPU" if options["alone"] else MEMORY
    except Exception as error:  # noqa: BLE001 - one mode that fails must not cost the others
        return blocks, None, failure_line(error)
    return blocks, table, ""


def one_by_one(case: str, place: Place, options: dict[str, Any], clock: Clock) -> BlockRates:
    """Run one side after the other, if both do not fit in memory. A side that does not fit alone has no blocks."""
    both = BlockRates({"ours": [], "bare": []})
    for name, make in (("ours", lambda trial: ours(trial, place).timed), ("bare", lambda trial: bare(trial, place))):
        with contextlib.suppress(torch.OutOfMemoryError), ready(case, place, options) as trial:
            blocks = abba({name: Side(make(trial), trial.global_batch)}, place, 1, options["quadruples"], clock)
            both.rates[name], both.steps = blocks.rates[name], blocks.steps
        release_memory()
    return both


@contextlib.contextmanager
def ready(case: str, place: Place, options: dict[str, Any]) -> Iterator[Trial]:
    """Provide the case's trial, within the settings that both sides need."""
    mode, batch, lever = (*case.split(":"), "")[:3]
    trial = Trial(
        model=options["model"],
        dataset="synthetic",
        image_size=options["image_size"],
        device=options["device"],
        batch_per_gpu=int(batch),
        precision=options["precision"],
        parallel="none",
        execution=mode,
        memory_format="channels_last",
        warmup_steps=5,
        rewritten_stem=STEM in lever.split("+"),
        workload=UINT8_WORKLOAD if UINT8 in lever.split("+") else "",
    )
    with settings_for(trial, load(PRECISIONS[trial.precision])), compiler(lever), stream_for(trial, place.device):
        yield trial


def errors_of_gradients(place: Place, options: dict[str, Any]) -> dict[str, float]:
    """Return relative distances of compiled gradients, with plain and rewritten stem, from the eager fp32 gradient."""
    trial = Trial(
        model="resnet18",
        dataset="synthetic",
        image_size=64,
        device=options["device"],
        batch_per_gpu=32,
        precision=options["precision"],
        parallel="none",
        execution="compile",
        memory_format="channels_last",
        warmup_steps=5,
    )
    reference = gradient(trial.but(execution="eager", precision="fp32"), place)
    stems = {"plain": trial, "rewritten": trial.but(rewritten_stem=True)}
    return {name: distance(each, place, reference) for name, each in stems.items()}


def write(
    options: dict[str, Any],
    measured: dict[str, BlockRates],
    reasons: dict[str, str],
    tables: dict[str, Any],
    errors: dict[str, float],
) -> None:
    """Write everything so far."""
    on_gpu = options["device"] == "cuda"
    judged = on_gpu and torch.cuda.get_device_name() == GOAL_DEVICE
    figures = []
    rated = {case: blocks for case, blocks in measured.items() if len(blocks.rates["ours"]) > 1}
    for case, blocks in rated.items():
        rate, interval = blocks.rate("ours")
        figures.append(figure(f"{options['model']} {case}", rate, interval, "images/s", "none", None))
        if options["against"]:
            name = f"{case} / {options['beside']}, ABBA"
            figures.append(figure(name, *blocks.ratio(), "ratio of images/s", "none", None))
        elif len(blocks.rates.get("bare", ())) > 1:
            ratio, interval = blocks.ratio()
            least = 0.99 if case.startswith("eager") else 1.0
            how, judging = ("one after the other", False) if case in reasons else ("ABBA", on_gpu)
            holds = interval[1] >= least if judging else None
            name, goal = f"ours/bare, {case}, {how}", f">= {least} (upper end)"
            figures.append(figure(name, ratio, interval, "ratio of images/s", goal, holds))
    if rated:
        best = max(rated, key=lambda case: rated[case].rate("ours")[0])
        rate, interval = rated[best].rate("ours")
        goal = f">= {GOAL_IMAGES_PER_S} on one {GOAL_DEVICE}"
        holds = rate >= GOAL_IMAGES_PER_S if judged else None
        figures.append(figure(f"best mode ({best})", rate, interval, "images/s", goal, holds))
    for stem, error in errors.items():
        goal = f"<= {GRADIENT_TOLERANCE} of the plain stem's"
        holds = error <= GRADIENT_TOLERANCE * errors["plain"] if stem != "plain" else None
        name = f"gradient's distance from fp32, resnet18 compiled, {stem} stem"
        figures.append(figure(name, error, None, "relative", goal, holds))
    samples = [{"case": case, **row} for case, blocks in measured.items() for row in blocks.rows()]
    samples += [{"case": case, "reason": reason} for case, reason in reasons.items()]
    for case, reason in reasons.items():
        print(f"{case}: {reason}", flush=True)
    folder = write_summary(options["name"], figures, samples)
    write_kernels(folder, tables)


if __name__ == "__main__":
    main()
