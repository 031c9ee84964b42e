"""Do all doors measure the same training alike, and does the script door attribute delays correctly?

    python -m benchmarks.truth.doors --gpus 1,2

One training (`benchmarks/harness/doors`) runs as factory, script, loop and train function, and as a bare script under
torchrun. In each round, every form starts in new processes and runs once per number of GPUs. Each round starts with
another form. Further runs through the script door delay rank 1, load slowly, and disable peer-to-peer copies (VGG-19).
Goals: throughputs of all doors within 1 % of each other and of the bare script; phases within 5 % or 0.2 ms of the
factory's; plain steps of a script at least 0.995 of the bare script; delays attributed within 20 %.

    python -m benchmarks.truth.doors --gpus 1,2 --forms plain,added --delayed-rounds 0 --name doors-added

compares a script for a single GPU under `--add-ddp` ("added") with one that puts its own model into DDP with default
options ("plain").
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.compare.communication import slowed_by_trace, trial_breakdown
from analysis.measure.communication import bucket_rows
from analysis.measure.measures import summarise
from analysis.read.results import Results, load
from benchmarks.harness.common import RESULTS, command, figure, ratio_interval, write_summary
from benchmarks.harness.live_keeper import live_keeper
from study.orchestrate.driver import result_of, table_of
from study.orchestrate.protocol import Job
from study.plan.placement import ProcessKind, layouts
from study.store.environment import package_versions
from study.store.packing import pack
from study.store.store import Store
from trainables.trial import Trial

FORMS = Path(__file__).resolve().parent.parent / "harness" / "doors"
DOORS = ("factory", "script", "loop", "function")
PHASES = ("forward_s", "backward_s", "optimizer_s")
LOADING = ("load_wait_s", "host_to_device_s")
LATE_MS, LOAD_FACTOR = 20.0, 2.0
FOUND_AS = {
    "late rank": ("none", ("exposed_wait_s", "hidden_lateness_s")),
    "slow loader": ("none", LOADING),
    "no P2P": ("fast link", ("exposed_wire_s", "kernels_s")),
}
"""case -> the case without its delay, and the measures that should contain the delay

A late rank makes the others wait, partly behind their computation, which is slower meanwhile. Without P2P, collectives
copy through the host's memory for longer, and computation, which shares multiprocessors and memory with them, takes
longer meanwhile.
"""

EXPOSED = ("exposed_wire_s", "exposed_wait_s", "hidden_lateness_s")
"""columns of the breakdown that each delayed run notes, beside the time of its kernels"""

BARE, PLAIN, ADDED = "bare", "plain", "added"
FORMS_RUN = (*DOORS, BARE)
STUDY = "study"
"""folder of the trials, next to the summary"""

Run = dict[str, Any]
Measure = Callable[[Trial, str], Run]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="1,2", help="numbers of ranks")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--model", default="resnet50", help="of torchvision; on CPU ranks always resnet18 in fp32")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forms", default=",".join(FORMS_RUN), help="forms to run, a comma list; also plain, added")
    parser.add_argument("--delayed-rounds", type=int, default=3, help="rounds that also run the delayed scripts")
    parser.add_argument("--cases", default=",".join(FOUND_AS), help="delays to run, a comma list")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="start no run after this many seconds")
    parser.add_argument("--name", default="doors", help="folder under benchmarks/results")
    options = parser.parse_args()
    sizes = [int(size) for size in options.gpus.split(",")]
    runs: list[Run] = []
    ends_s = time.monotonic() + options.budget_s
    with _measuring(options, sizes) as measure:
        for round_, door in _order(options.rounds, options.forms.split(",")):
            for size in sizes:
                if time.monotonic() < ends_s:
                    runs.append(_run(options, measure, round_, door, size))
            if door == "script" and round_ < options.delayed_rounds and max(sizes) > 1:
                runs += _delayed_runs(options, measure, round_, max(sizes), runs, ends_s)
            write_summary(options.name, figures(runs), runs)  # a later failure loses nothing
    pack(str(RESULTS / options.name / STUDY))


def _order(rounds: int, forms: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield round and form in running order. Each round starts with another form."""
    for number in range(rounds):
        first = number % len(forms)
        yield from ((number, form) for form in (*forms[first:], *forms[:first]))


def _arguments(options: argparse.Namespace, *more: str) -> str:
    model = ["--model", options.model] if options.device == "cuda" else ["--model", "resnet18", "--fp32"]
    sizes = ["--batch-size", str(options.batch), "--image-size", str(options.image_size)]
    return shlex.join([*model, *sizes, *more])


def trial_of(
    options: argparse.Namespace, door: str, size: int, round_: int, *more: str, environment: str = ""
) -> Trial:
    """Return the trial of a door on `size` ranks. more: further arguments of the training."""
    workload = f"{FORMS / 'factory.py'}:{options.model if options.device == 'cuda' else 'resnet18_fp32'}"
    arguments = _arguments(options, *more)
    form: dict[str, Any] = {
        "factory": {"workload": workload, "image_size": options.image_size, "memory_format": "channels_last"},
        "script": {"script": str(FORMS / "script.py"), "script_arguments": arguments, "script_env": environment},
        "loop": {"script": str(FORMS / "loop.py"), "script_arguments": arguments},
        PLAIN: {"script": str(FORMS / "script.py"), "script_arguments": f"{arguments} --plain-ddp"},
        ADDED: {"script": str(FORMS / "single.py"), "script_arguments": arguments, "add_ddp": True},
        "function": {
            "train_function": f"{FORMS / 'function.py'}:train_func",
            "function_config": json.dumps({"arguments": arguments}),
        },
    }[door]
    return Trial(
        **form,
        device=options.device,
        world_size=size,
        cpus_per_rank=max(1, len(os.sched_getaffinity(0)) // 2),
        batch_per_gpu=options.batch if door == "factory" else 32,
        warmup_steps=20,
        steps=options.steps,
        repeat=round_,
    )


@contextlib.contextmanager
def _measuring(options: argparse.Namespace, sizes: Sequence[int]) -> Iterator[Measure]:
    """Yield a function that measures a trial in the worker group of a block, stores it, and returns its measures."""
    store = Store.open(
        str(RESULTS / options.name / STUDY),
        name="doors",
        question="Do all doors measure the same training alike?",
        configuration={},
        versions=package_versions(),
        command=command(),
    )
    with live_keeper() as (nodes, measured):

        def measure(trial: Trial, block: str) -> Run:
            alike = [trial] if trial.door == "function" else [trial.but(world_size=size) for size in sizes]
            layout = layouts(alike, nodes)[ProcessKind.of(trial)]
            source = Path(trial.workload.rpartition(":")[0]).read_text() if trial.workload else None
            outcome = measured(Job(trial.trial_id, trial, source), layout, block)
            store.save(result_of(trial, outcome))
            values = summarise(table_of("steps", outcome.payloads).to_pandas())
            measures = {name: values[name] for name in (*PHASES, *LOADING, "step_s")}
            return {"trial_id": trial.trial_id, "samples_per_s": values["throughput_samples_per_s"]} | measures

        yield measure


def _run(options: argparse.Namespace, measure: Measure, round_: int, door: str, size: int) -> Run:
    """Run a form once, and return its measures."""
    if door == BARE:
        step_s = bare_step_s(options, size)
        run: Run = {"step_s": step_s, "samples_per_s": size * options.batch / step_s}
    else:
        run = measure(trial_of(options, door, size, round_), f"round {round_}")
    print(run := {"round": round_, "door": door, "size": size, "case": "equal"} | run, flush=True)
    return run


def _delayed_runs(
    options: argparse.Namespace, measure: Measure, round_: int, size: int, runs: Sequence[Run], ends_s: float
) -> list[Run]:
    """Run the script with each delay, and without, until the time is over."""
    plain_s = next(run["step_s"] for run in reversed(runs) if run["door"] == "script" and run["size"] == size)
    load_ms = LOAD_FACTOR * plain_s * 1e3
    cases: dict[str, tuple[tuple[str, ...], str]] = {
        "none": ((), "DELAY=none"),
        "late rank": (("--late-ms", str(LATE_MS)), ""),
        "slow loader": (("--load-ms", f"{load_ms:.1f}"), ""),
    }
    if options.device == "cuda":  # a training whose step depends on the link
        vgg19 = ("--model", "vgg19", "--batch-size", "32")
        cases |= {"fast link": (vgg19, "DELAY=none"), "no P2P": (vgg19, "NCCL_P2P_DISABLE=1")}
    asked = options.cases.split(",")
    needed = {*asked, *(FOUND_AS[case][0] for case in asked)}
    cases = {case: way for case, way in cases.items() if case in needed}
    result = []
    for case, (more, environment) in cases.items():
        if time.monotonic() > ends_s:
            break
        run = measure(trial_of(options, "script", size, round_, *more, environment=environment), f"round {round_}")
        result.append({"round": round_, "door": "script", "size": size, "case": case} | run)
    results = load(RESULTS / options.name / STUDY)
    for run in attributed(results, result):
        print(run, flush=True)
    return result


def attributed(results: Results, runs: Sequence[Run]) -> Sequence[Run]:
    """Note in each run what the study's breakdown says of it; None where a profiler slowed its trace too much."""
    rows = bucket_rows(results.buckets, results.steps, results.trials)
    breakdown = trial_breakdown(rows, slowed_by_trace(results.trials, results.windows), results.windows)
    for run in runs:
        parts = breakdown.loc[[str(run["trial_id"])]].iloc[0]
        run |= {name: None if pd.isna(parts[name]) else float(parts[name]) for name in EXPOSED}
        own = results.steps[results.steps["trial_id"] == run["trial_id"]]
        run["kernels_s"] = float(own.groupby("rank")["kernels_s"].median().max())
    return runs


def bare_step_s(options: argparse.Namespace, size: int) -> float:
    """Return the seconds per step of the slowest rank of the bare script under torchrun."""
    with tempfile.TemporaryDirectory(prefix="doors-") as folder:
        file = Path(folder) / "seconds"
        arguments = shlex.split(_arguments(options, "--bare-steps", str(options.steps), "--bare-file", str(file)))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
        environment = os.environ | {"OMP_NUM_THREADS": threads}
        subprocess.run([*command, str(FORMS / "script.py"), *arguments], check=True, env=environment)
        seconds = [json.loads(Path(f"{file}-{rank}.json").read_text()) for rank in range(size)]
    return max(seconds) / options.steps


def figures(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the figures of all rounds. With one round they have no interval."""
    by_case: dict[tuple[str, str, int], dict[int, Run]] = defaultdict(dict)
    for run in runs:
        by_case[run["case"], run["door"], run["size"]][run["round"]] = run
    sizes = sorted({run["size"] for run in runs})
    result = []
    for size in sizes:
        equal = {door: by_case["equal", door, size] for door in (*DOORS, ADDED, PLAIN, BARE)}
        for door, other in itertools.combinations(equal, 2):
            result += _ratio(f"{door} / {other} on {size}", equal[door], equal[other])
        for door in DOORS[1:]:
            result += _phases(f"{door} on {size}", equal[door], equal["factory"])
    result += _attributed(by_case, max(sizes))
    return result


def _ratio(name: str, first: dict[int, Run], second: dict[int, Run]) -> list[dict[str, Any]]:
    rounds = sorted(first.keys() & second.keys())
    if not rounds:
        return []
    logs = [math.log(first[key]["samples_per_s"] / second[key]["samples_per_s"]) for key in rounds]
    ratio, interval = ratio_interval(logs) if len(logs) > 1 else (math.exp(logs[0]), None)
    name += f", {len(rounds)} round{'' if len(rounds) == 1 else 's'}"
    if name.startswith(f"script / {BARE}"):
        return [figure(name, ratio, interval, "ratio of samples/s", ">= 0.995", ratio >= 0.995)]
    return [figure(name, ratio, interval, "ratio of samples/s", "0.99 to 1.01", abs(ratio - 1) <= 0.01)]


def _phases(name: str, door: dict[int, Run], factory: dict[int, Run]) -> list[dict[str, Any]]:
    result = []
    for phase in PHASES:
        pairs = [(door[key][phase], factory[key][phase]) for key in sorted(door.keys() & factory.keys())]
        if not pairs:
            continue
        known = [(value, reference) for value, reference in pairs if value is not None and reference is not None]
        if len(known) < len(pairs):
            result.append(figure(f"{phase} of {name}", math.nan, None, "ms", "measured", False))
            continue
        value_s = sum(value for value, _ in known) / len(known)
        reference_s = sum(reference for _, reference in known) / len(known)
        off_s = value_s - reference_s
        holds = abs(off_s) <= max(0.05 * reference_s, 0.2e-3)
        goal = f"factory's {reference_s * 1e3:.3f} within 5 % or 0.2 ms"
        result.append(figure(f"{phase[:-2]} of {name}", value_s * 1e3, None, "ms", goal, holds))
    return result


def _attributed(by_case: dict[tuple[str, str, int], dict[int, Run]], size: int) -> list[dict[str, Any]]:
    """Return how much of each delay is found in the measure that should contain it."""
    result = []
    for case, (without, measures) in FOUND_AS.items():
        delayed, plain = by_case[case, "script", size], by_case[without, "script", size]
        rounds = delayed.keys() & plain.keys()
        if not rounds:
            continue
        grown_s = statistics.fmean(delayed[key]["step_s"] - plain[key]["step_s"] for key in rounds)
        found_s = statistics.fmean(
            sum((delayed[key][name] or 0.0) - (plain[key][name] or 0.0) for name in measures) for key in rounds
        )
        if grown_s > 0:
            share = found_s / grown_s
            parts = " + ".join(measure.removesuffix("_s") for measure in measures)
            name = f"{case}: share of the growth of the step ({grown_s * 1e3:.2f} ms) found as {parts}"
            result.append(figure(name, share, None, "ratio", "0.8 to 1.2", 0.8 <= share <= 1.2))
        if case == "late rank":
            goal = f"{LATE_MS:g} injected"
            result.append(figure(f"{case}: growth of the step", grown_s * 1e3, None, "ms", goal, None))
    return result


if __name__ == "__main__":
    main()
