"""Do other people's tools find the same communication? Compare the breakdown with four of them, on two ranks.

    python -m benchmarks.truth.others --steps measure --folder DIR     # on the host with two GPUs
    python -m benchmarks.truth.others --steps evaluate --folder DIR    # anywhere; writes benchmarks/results/others
    python -m benchmarks.truth.others --device cpu --small             # both, on two gloo ranks

Every group of processes runs a case with this project's windows, and then, in the same processes:
- steps of the same model under DDP, timed by the wall clock, with DDP's own Logger (`_get_ddp_logging_data`), and steps
  under no_sync;
- a bare all-reduce sweep (`benchmarks/harness/bare_sweep.py`).
The profile window is compared with torch's profiler, and the traces of the first group with Holistic Trace Analysis
(HTA). HTA reads traces only, so it need not be installed where the GPUs are.

Goals: step times within 5 %, exposed time within 10 % or 0.2 ms of the Logger's and within 5 % or 0.1 ms of the
profiler's, the sweep's bandwidth within 5 % from 16 MiB on, HTA's overlap within 2 percentage points. Two windows of a
host-bound step differ by more than that from each other; such figures are reported as they are.
"""

import argparse
import gzip
import importlib
import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd

from analysis.measure.allreduce import sweep_seconds
from analysis.measure.communication import bucket_rows, communication_breakdown, step_rows
from analysis.measure.measures import summarise
from analysis.measure.trace import TraceError, check_trial, length_s, overlap_s, read_kernels
from analysis.read.reduce import windows
from benchmarks.harness.bare_loop import timed_s
from benchmarks.harness.bare_sweep import sweep as bare_sweep
from benchmarks.harness.common import RESULTS, environment_here, figure, ratio_interval, write_summary
from benchmarks.harness.ranks import Place, launch
from study.capacity import count_cpus, count_gpus
from study.plan.placement import INTERCONNECT_VARIABLES
from study.store.tables import packed, unpacked
from trainables.data.loader import endless_batches
from trainables.measure.run import run
from trainables.step.context import RankSetup, rank_context
from trainables.step.process import rehearse
from trainables.step.step import training_step
from trainables.step.timing import no_mark, without_garbage_collection
from trainables.trial import Trial

RANKS = 2
MIB = 2**20
MEASURED = "measured.json.gz"
LOGGED_STEPS, SETTLING_STEPS = 20, 12
BANDWIDTH_BOUND_BYTES = 16 * MIB
LOGGER_TIMES = ("forward_compute", "backward_compute", "backward_comm", "backward_compute_comm_overlap")
"""names of DDP's Logger, in nanoseconds with the suffix _time"""
STEP_GOAL, SWEEP_GOAL, OVERLAP_GOAL = 0.05, 0.05, 0.02
LOGGER_GOAL, PROFILER_GOAL = (0.10, 2e-4), (0.05, 1e-4)
"""relative tolerance, and seconds; the wider one counts"""

CASES: Mapping[str, dict[str, Any]] = {
    "ResNet-50 batch 32": {"model": "resnet50", "interconnect": "auto"},
    "VGG-19 batch 32 without P2P": {"model": "vgg19", "interconnect": "no_p2p"},
}
SMALL_CASES: Mapping[str, dict[str, Any]] = {"MLP batch 8": {"model": "mlp"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if count_gpus() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--steps", default="measure,evaluate", help="comma-separated: measure, evaluate")
    parser.add_argument("--groups", type=int, default=3, help="groups of processes per case")
    parser.add_argument("--seconds", type=float, default=240, help="start no group of processes later than this")
    parser.add_argument("--small", action="store_true", help="one tiny model in two groups, in seconds")
    parser.add_argument("--folder", type=Path, help="folder of the measurements; default: that of the results")
    parser.add_argument("--name", default="others", help="folder under benchmarks/results")
    options = parser.parse_args()
    folder = options.folder or RESULTS / options.name
    steps = options.steps.split(",")
    if "measure" in steps:
        measure(folder, options.device, 2 if options.small else options.groups, options.small, options.seconds)
    if "evaluate" in steps:
        evaluate(folder, options.name)


# ------------------------------------------------------------------------------------------------------------ measure


def measure(folder: Path, device: str, groups: int, small: bool, seconds: float) -> None:
    """Measure all cases in turn, each group in new processes. Writes after each, so that a kill loses one group."""
    folder.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    environment = environment_here()
    measured: list[dict[str, Any]] = []
    for group in range(groups):
        for case, fields in (SMALL_CASES if small else CASES).items():
            if time.monotonic() - started_s > seconds:
                print(f"{case}, group {group}: left out, {seconds:.0f} s are over", flush=True)
                continue
            trial = _trial(fields, device, small, group)
            variables = patch.dict(os.environ, INTERCONNECT_VARIABLES[trial.interconnect])  # for the processes below
            with variables, tempfile.TemporaryDirectory(prefix="others-") as of_group:
                launch(measure_rank, device, [RANKS], trial.model_dump(), of_group)
                ranks = [json.loads(Path(of_group, f"rank{rank}.json").read_text()) for rank in range(RANKS)]
                found = {"case": case, "group": group, "trial": trial.model_dump(), "ranks": ranks}
                measured.append(found | {"profiler": profiled(found, Path(of_group))})
                if group == 0:  # a few files of megabytes are enough for HTA
                    for trace in Path(of_group).glob("rank*.json.gz"):
                        (folder / _slug(case)).mkdir(exist_ok=True)
                        shutil.copy(trace, folder / _slug(case))
            content = json.dumps({"environment": environment, "measured": measured})
            (folder / MEASURED).write_bytes(gzip.compress(content.encode()))
            print(f"{case}, group {group}: measured after {time.monotonic() - started_s:.0f} s", flush=True)


def _trial(fields: Mapping[str, Any], device: str, small: bool, group: int) -> Trial:
    base: dict[str, Any] = {"device": device, "dataset": "synthetic", "world_size": RANKS, "repeat": group}
    if small:
        return Trial(
            **base, **fields, image_size=32, batch_per_gpu=8, steps=6, communication_steps=4, sweep_bytes=4 * MIB
        )
    on_gpus = (
        {"precision": "bf16", "memory_format": "channels_last", "profile_ranks": "all"} if device == "cuda" else {}
    )
    cores = max(1, count_cpus() // RANKS)
    sizes = {"image_size": 224, "batch_per_gpu": 32, "steps": 20, "communication_steps": 10, "sweep_bytes": 256 * MIB}
    return Trial(**base, **fields, **on_gpus, **sizes, cpus_per_rank=cores)


def measure_rank(place: Place, fields: dict[str, Any], folder: str) -> None:
    """Measure one group's case on this rank, with this project and with the other tools. Writes rank<R>.json."""
    trial = Trial(**fields)
    group, control = place.groups[RANKS]
    setup = RankSetup(place.rank, place.device, group, control)
    rehearse(place.device, group)
    output = run(trial, setup)
    content: dict[str, Any] = {"tables": output.tables} | logged_steps(trial, setup)
    sizes = sorted({row["bytes"] for row in output.tables["sweep"] if row["bytes"] % 4 == 0})
    content["bare_sweep"] = bare_sweep(sizes, place.device)
    if output.trace is not None:
        Path(folder, f"rank{place.rank}.json.gz").write_bytes(output.trace)
        content["trace"] = _trace_rows(trial, place, Path(folder))
    Path(folder, f"rank{place.rank}.json").write_text(json.dumps(content))


def logged_steps(trial: Trial, setup: RankSetup) -> dict[str, Any]:
    """Return seconds per step of the same model under DDP by the wall clock, and what DDP's Logger says of each step.

    The Logger reads its events at the next forward pass, which waits for the device. The timed steps run without it.
    """
    with rank_context(trial, setup) as context, without_garbage_collection():
        model: Any = context.strategy.wrap_model(context.workload.model, trial, context.group)
        batches = endless_batches(trial, context.workload, context.rank)
        train = training_step(context, model)

        def step() -> None:
            train(next(batches), no_mark)

        seconds: dict[str, list[float]] = {"step_s": [], "no_sync_step_s": []}
        for _ in range(SETTLING_STEPS):
            step()
        for name, synchronised in (("step_s", True), ("no_sync_step_s", False)) * 2:
            with nullcontext() if synchronised else context.strategy.unsynchronised(model):
                step()
                wall_s = timed_s(step, LOGGED_STEPS, setup.device, setup.control)
            seconds[name].append(wall_s / LOGGED_STEPS)
        model._set_ddp_runtime_logging_sample_rate(1)
        logged = []
        for _ in range(LOGGED_STEPS + 2):
            step()
            data = model._get_ddp_logging_data()
            logged.append({name: int(data.get(f"{name}_time", 0)) / 1e9 for name in LOGGER_TIMES})
        return {"seconds": seconds, "logger": logged[2:]}  # a row describes the step before it


def _trace_rows(trial: Trial, place: Place, folder: Path) -> dict[str, float]:
    """Return the seconds of communication kernels in this rank's trace, and of their part that overlaps compute."""
    kernels = read_kernels(str(folder / f"rank{place.rank}.json.gz"), trial.world_size)
    copies = kernels["name"].str.startswith(("Memcpy", "Memset"))
    spans = ["begin_s", "end_s"]
    communication = kernels.loc[kernels["communication"], spans].to_numpy(float)
    compute = kernels.loc[~kernels["communication"] & ~copies, spans].to_numpy(float)
    return {"communication_s": length_s(communication), "overlap_s": overlap_s(communication, compute)}


def _slug(case: str) -> str:
    return case.lower().replace(" ", "-")


# ----------------------------------------------------------------------------------------------------------- evaluate


def evaluate(folder: Path, name: str) -> None:
    """Write the summary of the measurements in `folder`."""
    content = json.loads(gzip.decompress((folder / MEASURED).read_bytes()))
    samples = []
    for group in content["measured"]:
        samples += [*compared(group), *group["profiler"], *(holistic(folder, group) if group["group"] == 0 else [])]
    write_summary(name, figures(samples), samples, content["environment"])


def frames_of(group: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """Return the frames steps, buckets, sweep and trials of one group's case."""
    trial = Trial(**group["trial"])
    frames = {
        table: unpacked(packed(table, rank["tables"][table]) for rank in group["ranks"])
        .to_pandas()
        .assign(trial_id=trial.trial_id)
        for table in ("steps", "buckets", "sweep")
    }
    return frames | {"trials": pd.DataFrame([trial.model_dump() | {"trial_id": trial.trial_id, "trace_paths": ()}])}


def compared(group: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield our value and the others' of one group: step times, exposed time of each rank, all-reduce times."""
    frames = frames_of(group)
    common = {"case": group["case"], "group": group["group"]}
    rows = bucket_rows(frames["buckets"], frames["steps"], frames["trials"])
    breakdown = communication_breakdown(rows, windows(frames["steps"])).iloc[0]
    measures = summarise(frames["steps"])
    seconds = [rank["seconds"] for rank in group["ranks"]]
    ours = {"step_s": measures["step_s"], "no_sync_step_s": breakdown["no_sync_step_s"]}
    for name, our_s in ours.items():
        theirs_s = max(float(np.mean(of_rank[name])) for of_rank in seconds)
        yield common | {"tool": "wall clock", "what": name, "ours": float(our_s or np.nan), "theirs": theirs_s}
    per_step = step_rows(rows[rows["window"] == "communication"])
    exposed = per_step.groupby("rank")["exposed_s"].median()
    for rank, of_rank in enumerate(group["ranks"]):
        logged = pd.DataFrame(of_rank["logger"])
        theirs_s = float((logged["backward_comm"] - logged["backward_compute_comm_overlap"]).median())
        yield common | {
            "tool": "Logger",
            "what": "exposed_s",
            "rank": rank,
            "ours": float(exposed[rank]),
            "theirs": theirs_s,
        }
        forward_s = frames["steps"].query("window == 'phases' and rank == @rank")["forward_s"].median()
        theirs_s = float(logged["forward_compute"].median())
        yield common | {
            "tool": "Logger",
            "what": "forward_s",
            "rank": rank,
            "ours": float(forward_s),
            "theirs": theirs_s,
        }
    sweep = sweep_seconds(frames["sweep"]).set_index("bytes")["seconds"]
    bare = pd.DataFrame([row for rank in group["ranks"] for row in rank["bare_sweep"]])
    bare_s = bare.groupby(["bytes", "repetition"])["seconds"].mean().groupby(level="bytes").median()
    for size in sweep.index.intersection(bare_s.index):
        yield common | {
            "tool": "bare sweep",
            "what": str(size),
            "ours": float(sweep[size]),
            "theirs": float(bare_s[size]),
        }


def profiled(group: Mapping[str, Any], traces: Path) -> list[dict[str, Any]]:
    """Return our exposed time and that of torch's profiler, for the same steps of each rank; empty without traces."""
    frames = frames_of(group)
    trial = frames["trials"].iloc[0].copy()
    trial["trace_paths"] = tuple(str(path) for path in sorted(traces.glob("rank*.json.gz")))
    common = {"case": group["case"], "group": group["group"], "tool": "profiler", "what": "exposed_s"}
    if not trial["trace_paths"]:
        return []
    try:
        found = check_trial(trial, frames["buckets"], frames["steps"])
    except TraceError as error:
        return [common | {"problem": str(error)}]
    return [
        common
        | {"rank": int(row["rank"]), "ours": float(row["exposed_live_s"]), "theirs": float(row["exposed_trace_s"])}
        for _, row in found.iterrows()
    ]


def holistic(folder: Path, group: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the share of communication that overlaps compute, from the same traces by HTA and by this project.

    HTA counts all communication kernels, such as the broadcast of buffers, and gaps between compute kernels as exposed.
    The live breakdown, the second row of a rank, counts gradients only, and all before the last gradient as hidden.
    """
    common = {"case": group["case"], "group": group["group"], "tool": "HTA"}
    traces = folder / _slug(group["case"])
    if not traces.exists():
        return []
    if importlib.util.find_spec("hta") is None:
        return [common | {"what": "overlap", "problem": "HolisticTraceAnalysis is not installed"}]
    try:
        analyzer = importlib.import_module("hta.trace_analysis").TraceAnalysis(trace_dir=str(traces))
        theirs = analyzer.get_comm_comp_overlap(visualize=False).set_index("rank")["comp_comm_overlap_pctg"]
    except Exception as error:  # noqa: BLE001  a failure of the other tool is a result
        return [common | {"what": "overlap", "problem": f"{type(error).__name__}: {error}"}]
    frames = frames_of(group)
    live = step_rows(bucket_rows(frames["buckets"].query("window == 'profile'"), frames["steps"], frames["trials"]))
    sums = live.groupby("rank")[["hidden_s", "communication_s"]].sum()
    rows = []
    for rank, share in theirs.items():
        trace = group["ranks"][rank]["trace"]
        ours = {"overlap": trace["overlap_s"] / trace["communication_s"]}
        ours["hidden share, live"] = float(sums["hidden_s"][rank] / sums["communication_s"][rank])
        rows += [
            common | {"what": what, "rank": int(rank), "ours": value, "theirs": float(share) / 100}
            for what, value in ours.items()
        ]
    return rows


def figures(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one figure per case, tool and quantity: ours / theirs, the mean over ranks, with an interval over groups.

    A problem, such as a tool that is not installed, is a figure that does not hold.
    """
    found = []
    frame = pd.DataFrame(list(samples))
    for key, rows in frame.groupby(["case", "tool", "what"], sort=False):
        case, tool, what = map(str, key)
        if "problem" in rows and rows["problem"].notna().any():
            problem = rows["problem"].dropna().iloc[0]
            found.append(figure(f"{case}: {tool}, {what}: {problem}", float("nan"), None, "", "measured", False))
        elif tool != "bare sweep":
            found.append(_figure(f"{case}: {what.removesuffix('_s')}, ours / {tool}", rows, *_goal(tool, what)))
        elif int(what) >= BANDWIDTH_BOUND_BYTES:
            name = f"{case}: all-reduce of {int(what) / MIB:.0f} MiB, ours / {tool}"
            found.append(_figure(name, rows, SWEEP_GOAL, 0.0))
    return found


def _goal(tool: str, what: str) -> tuple[float, float] | tuple[None, None]:
    """Return the relative and absolute tolerance. None if the quantities are defined differently."""
    if what in ("hidden share, live", "forward_s"):
        return None, None
    if tool == "HTA":
        return 0.0, OVERLAP_GOAL
    if what != "exposed_s":
        return STEP_GOAL, 0.0
    return LOGGER_GOAL if tool == "Logger" else PROFILER_GOAL


def _figure(name: str, rows: pd.DataFrame, relative: float | None, absolute: float | None) -> dict[str, Any]:
    means = rows.groupby("group")[["ours", "theirs"]].mean()
    ours, theirs = means.mean()
    ratios = means["ours"] / means["theirs"]
    logs = np.log(ratios[(ratios > 0) & np.isfinite(ratios)].to_numpy(float))
    interval = ratio_interval(list(logs))[1] if len(logs) > 1 else None
    is_share = theirs <= 1 and absolute == OVERLAP_GOAL or "share" in name
    unit = f"ratio; {ours:.3f} and {theirs:.3f}" if is_share else f"ratio; {1e3 * ours:.3f} and {1e3 * theirs:.3f} ms"
    ratio = float(np.exp(logs.mean())) if len(logs) else float("nan")
    if relative is None or absolute is None:
        return figure(name, ratio, interval, unit, "none: defined differently", None)
    goal = f"difference <= {100 * relative:.0f} %" if relative else f"difference <= {absolute}"
    goal += f" or {1e3 * absolute:.1f} ms" if relative and absolute else ""
    return figure(name, ratio, interval, unit, goal, bool(abs(ours - theirs) <= max(relative * theirs, absolute)))


if __name__ == "__main__":
    main()
