"""How much does the study slow down the training that it measures? Compare its windows with a bare torchrun loop.

    python -m benchmarks.cost.overhead --world-sizes 1,4 --cases resnet50:256:bf16,resnet50:32:bf16,resnet18:512:bf16

Both sides stay up on the same GPUs and run alternately (ABBA), each time with a new model and its own warm-up; the
other side sleeps. Goal: the lower end of the interval of plain / bare is at least 0.99.

If a step is host-bound, two processes of the same program can differ by more than that for their whole life. With
`--restarts` both sides are restarted that many times. All quadruples of one start are then one sample, and the interval
is over starts: `--cases resnet50:32:bf16 --restarts 8 --quadruples 2`.

The speed of the host can also change by 10 % within seconds (one H200, ResNet-50, batch 32: a busy core needs 16 to 22
ms for the same step, pinned or not). With `--in-turn` both sides keep their models and alternate every `--steps` steps,
the study within one trial's plain window and then its phases window: `--in-turn --steps 5 --quadruples 100`. `--in-turn
same-process` runs the bare loop's blocks between the study's, in the study's process; only the cost of the study's code
remains. `--in-turn control` replaces the study by a second bare loop, to show how much two processes of one program
differ.
"""

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from analysis.measure.measures import summarise
from benchmarks.harness.common import abba_ratio, figure, write_summary
from benchmarks.harness.in_turn import workload_file
from benchmarks.harness.live_keeper import live_keeper
from benchmarks.harness.sides import ddp_options
from benchmarks.harness.turns import LEAD_STEPS, new_turns
from study.capacity import count_gpus
from study.orchestrate.driver import table_of
from study.orchestrate.protocol import Job
from study.plan.placement import ProcessKind, layouts
from trainables.trial import Trial

ROOT = Path(__file__).resolve().parent.parent.parent

PROCESSES, SAME_PROCESS, CONTROL = "processes", "same-process", "control"

Ours = Callable[[Trial], dict[str, Any]]
Bare = Callable[..., float]
Rows = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--world-sizes", default="1")
    parser.add_argument(
        "--cases", default="resnet50:256:bf16,resnet50:32:bf16,resnet18:512:bf16", help="model:batch:precision,..."
    )
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup-steps", type=int, default=15)
    parser.add_argument(
        "--quadruples", default="4", help="ABBA rounds of each case, at least 2: one number, or one for each"
    )
    parser.add_argument("--restarts", type=int, default=1, help="times that both sides are started")
    parser.add_argument(
        "--in-turn",
        nargs="?",
        const=PROCESSES,
        choices=[PROCESSES, SAME_PROCESS, CONTROL],
        help="turns of --steps steps with the models of one trial: of two processes, of one, or of two bare loops",
    )
    parser.add_argument("--name", default="overhead", help="folder under benchmarks/results")
    options = parser.parse_args()

    cases = options.cases.split(",")
    rounds = [int(number) for number in options.quadruples.split(",")]
    rounds = rounds * len(cases) if len(rounds) == 1 else rounds
    taken: dict[Trial, list[dict[str, Any]]] = {}
    for world_size in (int(size) for size in options.world_sizes.split(",")):
        trials = [_trial(case, world_size, options) for case in cases]
        for restart in range(options.restarts):
            with _measuring(options, trials, world_size) as measured:
                for trial, quadruples in zip(trials, rounds, strict=True):
                    for rows in measured(trial, quadruples):
                        taken.setdefault(trial, []).extend({**row, "restart": restart} for row in rows)
                        _write(options.name, taken, options.in_turn)  # what is measured is not lost to a later failure


@contextlib.contextmanager
def _measuring(
    options: argparse.Namespace, trials: list[Trial], world_size: int
) -> Iterator[Callable[[Trial, int], Iterable[Rows]]]:
    """Both sides, up and waiting: what gives the rows of a trial's quadruples."""
    with contextlib.ExitStack() as stack:
        if options.in_turn == SAME_PROCESS:
            ours = stack.enter_context(warm_group(trials))
            yield lambda trial, quadruples: _blocks(trial, quadruples, partial(_window, ours, same_process=True))
            return
        bare = stack.enter_context(bare_loop(world_size, options.device))
        if options.in_turn == CONTROL:
            second = stack.enter_context(bare_loop(world_size, options.device))
            yield lambda trial, quadruples: _blocks(trial, quadruples, partial(_bare_blocks, second, side="A"), bare)
            return
        ours = stack.enter_context(warm_group(trials))
        if options.in_turn:
            yield lambda trial, quadruples: _blocks(trial, quadruples, partial(_window, ours), bare)
        else:
            yield lambda trial, quadruples: _quadruples(trial, quadruples, ours, bare)


def _write(name: str, taken: dict[Trial, Rows], in_turn: str | None) -> None:
    """Write everything so far, and the figures with enough samples for an interval."""
    figures = [found for trial, rows in taken.items() for found in _figures(trial, rows, in_turn)]
    write_summary(name, figures, [row for rows in taken.values() for row in rows])


def _trial(case: str, world_size: int, options: argparse.Namespace) -> Trial:
    model, batch, precision = case.split(":")
    return Trial(
        model=model,
        dataset="synthetic",
        image_size=options.image_size,
        device=options.device,
        world_size=world_size,
        cpus_per_rank=max(1, len(os.sched_getaffinity(0)) // max(world_size, count_gpus())),
        batch_per_gpu=int(batch),
        precision=precision,
        memory_format="channels_last",
        warmup_steps=options.warmup_steps,
        steps=options.steps,
    )


def _quadruples(trial: Trial, quadruples: int, ours: Ours, bare: Bare) -> Iterator[Rows]:
    """Return throughputs in samples/s in running order: ours, bare, bare, ours; each with a new model."""
    bare(trial), ours(trial)  # thrown away: autotuning, allocator
    for _ in range(quadruples):
        taken: Rows = []
        for side in "ABBA":
            if side == "A":
                measured = ours(trial)
                plain = measured["throughput_samples_per_s"]
                phases = plain / measured["instruments_ratio"]
                taken.append(_what(trial) | {"side": "ours", "plain": plain, "phases": phases})
            else:
                taken.append(_what(trial) | {"side": "bare", "plain": trial.global_batch * trial.steps / bare(trial)})
        yield taken


def _window(ours: Ours, trial: Trial, quadruples: int, folder: Path, same_process: bool = False) -> None:
    """Run one trial with the study's blocks."""
    steps = 2 * quadruples * (LEAD_STEPS + trial.steps) + 1
    ours(trial.but(workload=workload_file(folder, trial.steps, same_process), steps=steps, communication_steps=0))


def _bare_blocks(bare: Bare, trial: Trial, quadruples: int, folder: Path, side: str = "B") -> None:
    bare(trial, blocks=4 * quadruples, turns=str(folder), side=side)


def _blocks(
    trial: Trial, quadruples: int, first: Callable[[Trial, int, Path], None], bare: Bare | None = None
) -> Iterator[Rows]:
    """Yield the throughputs of blocks of steps, first in the plain window and then in the phases window.

    first: runs the study's side, or both sides if `bare` is None. The "phases" blocks of the bare loop are further bare
    blocks, which run alternately with those of the phases window.
    """
    with tempfile.TemporaryDirectory(prefix="turns-") as name, ThreadPoolExecutor(1) as pool:
        folder = Path(name)
        new_turns(folder, trial.world_size)
        theirs = pool.submit(_bare_blocks, bare, trial, quadruples, folder) if bare else None
        first(trial, quadruples, folder)
        if theirs:
            theirs.result()
        yield _rows_of(trial, quadruples, folder)


def _rows_of(trial: Trial, quadruples: int, folder: Path) -> Rows:
    windows = {}
    for side in ("ours", "bare"):
        ranks = [json.loads((folder / f"{side}-{rank}.json").read_text()) for rank in range(trial.world_size)]
        rates = [trial.global_batch * trial.steps / max(of_ranks) for of_ranks in zip(*ranks, strict=True)]
        windows[side] = zip(rates[: 2 * quadruples], rates[2 * quadruples :], strict=True)
    taken: Rows = []
    for side in quadruples * ("ours", "bare", "bare", "ours"):
        plain, phases = next(windows[side])
        taken.append(_what(trial) | {"side": side, "plain": plain, "phases": phases})
    return taken


def _what(trial: Trial) -> dict[str, Any]:
    return {"model": trial.model, "batch_per_gpu": trial.batch_per_gpu, "world_size": trial.world_size}


def _figures(trial: Trial, taken: Rows, in_turn: str | None) -> list[dict[str, Any]]:
    """Return the ratios of a case, none with fewer than two samples.

    The interval is over the quadruples of a single start, or over starts.
    """
    name = f"{trial.model} batch {trial.batch_per_gpu} {trial.precision} on {trial.world_size} {trial.device}"
    sizes = list(Counter(row["restart"] for row in taken).values())
    starts = [size for size in sizes if size == sizes[0]]  # the last one may be under way
    together = 1 if len(sizes) == 1 else sizes[0] // 4
    taken = taken[: sum(starts)]
    if len(taken) // 4 // together < 2:
        return []
    found = []
    for window in ("plain", "phases"):
        bare = [row[window if window in row else "plain"] for row in taken if row["side"] == "bare"]
        ratio, interval = abba_ratio([row[window] for row in taken if row["side"] == "ours"], bare, together)
        judged = window == "plain" and in_turn != CONTROL
        goal, holds = (">= 0.99 (lower end)", interval[0] >= 0.99) if judged else ("none", None)
        what = {CONTROL: f"bare/bare beside {window}", SAME_PROCESS: f"{window}/bare of the same process"}.get(
            in_turn or "", f"{window}/bare"
        )
        found.append(figure(f"{what}, {name}", ratio, interval, "ratio of samples/s", goal, holds))
    found.append(figure(f"bare, {name}", sorted(bare)[len(bare) // 2], None, "samples/s", "none", None))
    return found


@contextlib.contextmanager
def warm_group(trials: list[Trial]) -> Iterator[Callable[[Trial], dict[str, Any]]]:
    """A function that measures a trial in the product's own warm worker group and summarises it."""
    with live_keeper() as (nodes, measured):
        places = layouts(trials, nodes)

        def measure(trial: Trial) -> dict[str, Any]:
            outcome = measured(Job(trial.trial_id, trial), places[ProcessKind.of(trial)], "block")
            return summarise(table_of("steps", outcome.payloads).to_pandas())

        yield measure


@contextlib.contextmanager
def bare_loop(world_size: int, device: str) -> Iterator[Bare]:
    """A function that asks the bare loop for a trial's wall seconds; the loop runs under torchrun meanwhile."""
    with tempfile.TemporaryDirectory(prefix="bare-loop-") as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        command += ["-m", "benchmarks.harness.bare_loop", folder]
        environment = os.environ | {"BARE_DEVICE": device, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, cwd=ROOT)
        numbers = itertools.count()

        def ask(job: dict[str, Any]) -> Path:
            k = next(numbers)
            temporary = Path(folder) / f"go-{k}.tmp"
            temporary.write_text(json.dumps(job))
            temporary.rename(Path(folder) / f"go-{k}.json")
            return Path(folder) / f"done-{k}.json"

        def measure(trial: Trial, **more: Any) -> float:
            fields = trial.model_dump(include={"model", "precision", "image_size", "warmup_steps", "steps"})
            answer = ask(fields | {"batch": trial.batch_per_gpu, "ddp": ddp_options(trial)} | more)
            while not answer.exists():
                if process.poll() is not None:
                    raise RuntimeError(f"the bare loop ended with status {process.returncode}")
                time.sleep(0.01)
            return float(json.loads(answer.read_text())["wall_s"])

        try:
            yield measure
        finally:
            ask({})
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=60)
            process.kill()


if __name__ == "__main__":
    main()
