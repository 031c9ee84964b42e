"""Is the communication breakdown of sharded strategies correct? Compare it with traces, and with a known late rank.

    python -m benchmarks.truth.sharding                       # on two GPUs
    python -m benchmarks.truth.sharding --cases script
    python -m benchmarks.truth.sharding --device cpu          # a small form: two CPU ranks and gloo

Cases: GPT-2 with `fsdp2`, `hsdp` and `zero1`, and `script`, a script that shards its own model by FSDP2. Each trains
twice through the product: without a fault, and with a rank that starts each backward pass 20 ms late. All ranks keep
their trace. Another program than the product's reads it: it takes times of the complete window, without dividing it
into steps, and recognises collectives by the names of kernels. Goals:
- Time with a collective, and its part without computation, are within 5 % or 0.1 ms of the trace's on every rank.
- The product finds every collective of the trace.
- Between 80 % and 125 % of the lateness is reported as lateness of the late rank. Not judged where the host bounds the
  step: the device, on which the delay runs, then idles anyway; nor where the profiler slows a step so much that the
  product reports no lateness.
"""

import argparse
import gzip
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.compare.communication import slowed_by_trace
from analysis.measure.trace import length_s, overlap_s, within_tolerance
from analysis.measure.traced import traced_breakdown
from analysis.read.results import Results, load
from benchmarks.harness.common import RESULTS, command, figure, write_summary
from benchmarks.harness.faulty_workloads import LATE_RANK, LATE_S
from study.capacity import count_cpus, count_gpus
from study.orchestrate.cluster import connect
from study.orchestrate.protocol import Event
from study.orchestrate.tune import run_trials
from study.store.environment import versions
from study.store.store import Store
from trainables.measure.collectives import ANNOTATION, BOUNDARY
from trainables.trial import Trial

WORKLOADS = "benchmarks/harness/faulty_workloads.py"
SCRIPT_FILE = Path(__file__).resolve().parent.parent / "harness" / "doors" / "fsdp2.py"
STRATEGIES = ("fsdp2", "hsdp", "zero1")
SCRIPT = "script"
CASES = (*STRATEGIES, SCRIPT)
SOUND, LATE = "language_model", "late_language_model"
FOUND = (0.8, 1.25)
LEAST_BUSY = 0.8
"""Share of the step in kernels from which a delay on the device makes a rank late."""

SHARED_FIELDS = ("device", "world_size", "cpus_per_rank", "steps", "profile_ranks")
"""fields that a script has, too"""

COLUMNS = {"collectives_s": "communication", "exposed_collectives_s": "exposed"}


def main() -> None:
    options = _options()
    folder = RESULTS / options.out
    store = Store.open(
        str(folder),
        name="sharding-truth",
        question="Is the communication breakdown of sharded strategies correct?",
        configuration=vars(options),
        versions={name: version for name, version in versions().items() if version},
        command=command(),
    )
    planned = trials(options)
    with connect("local") as cluster:
        done = store.statuses()
        missing = [trial for trial in planned.values() if done.get(trial.trial_id) != "done"]
        if missing:
            run_trials("sharding-truth", [missing], store, cluster, on_event=_tell)
    lost = [record["trial_id"] for record in store.records() if record["status"] != "done"]
    if lost:
        sys.exit(f"not done: {', '.join(lost)}")
    samples = compared(load(folder), planned)
    write_summary(options.out, figures(samples), samples)
    for traces in folder.glob("trials/*/traces"):
        shutil.rmtree(traces)  # tens of megabytes each; what was read from them is among the samples


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if count_gpus() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--batch", type=int, help="sequences per rank; default: 32, or 2 on CPU ranks")
    parser.add_argument("--cases", default=",".join(CASES), help="a comma list")
    parser.add_argument("--execution", default="eager", choices=["eager", "compile", "compile_blocks"])
    parser.add_argument("--out", default="sharding-truth", help="folder below benchmarks/results")
    return parser.parse_args()


def trials(options: argparse.Namespace) -> dict[tuple[str, str], Trial]:
    """Return the trials by case and workload."""
    on_gpus = options.device == "cuda"
    base = Trial(
        model="gpt2" if on_gpus else "gpt2_tiny",
        dataset="synthetic",
        sequence_length=1024 if on_gpus else 64,
        precision="bf16" if on_gpus else "fp32",
        batch_per_gpu=options.batch or (32 if on_gpus else 2),
        device=options.device,
        world_size=options.gpus,
        cpus_per_rank=max(1, count_cpus() // options.gpus) if on_gpus else 1,
        execution=options.execution,
        optimizer="adamw",
        learning_rate=3e-4,
        steps=20 if on_gpus else 5,
        communication_steps=10 if on_gpus else 3,
        sweep_bytes=2**20,
        profile_ranks="all",
    )
    asked = options.cases.split(",")
    planned = {
        (parallel, name): base.but(parallel=parallel, workload=f"{WORKLOADS}:{name}")
        for parallel in STRATEGIES
        if parallel in asked
        for name in (SOUND, LATE)
    }
    if SCRIPT in asked:
        sizes = [] if on_gpus else ["--width", "64", "--blocks", "2", "--batch-size", "64"]
        for name, late_ms in ((SOUND, 0.0), (LATE, 1e3 * LATE_S)):
            planned[SCRIPT, name] = Trial(
                script=str(SCRIPT_FILE),
                script_arguments=shlex.join([*sizes, "--late-ms", f"{late_ms:g}"]),
                **{field: getattr(base, field) for field in SHARED_FIELDS},
            )
    return planned


def _tell(event: Event) -> None:
    if event.kind == "trial_ended" and event.trial is not None:
        print(f"{event.trial.trial_id}: {event.status} {event.reason}", flush=True)


def traced_window(path: Path) -> dict[str, float]:
    """Return seconds per step with a collective, and without computation at the same time, and collectives per step."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    events = [event for event in events if event.get("ph") == "X"]
    ends = [event["ts"] for event in events if event["name"] == BOUNDARY and event["cat"] == ANNOTATION]
    if ends:  # a script, whose trace starts a step earlier
        steps, issued = len(ends) - 1, _issued(events)
        events = [event for event, time in zip(events, issued, strict=True) if min(ends) <= time < max(ends)]
    else:
        steps = sum(event["name"] == "step" and event["cat"] == ANNOTATION for event in events)
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if work:
        communication = [event for event in work if event["name"].lower().startswith("nccl")]
        compute = [event for event in work if not event["name"].lower().startswith("nccl")]
    else:
        communication = [event for event in events if event["name"].startswith("gloo:")]
        communication = [event for event in communication if event["name"] != "gloo:barrier"]  # before the first step
        compute = [event for event in events if event.get("cat") == "cpu_op" and event["name"].startswith("aten::")]
    spans, busy = _intervals(communication), _intervals(compute)
    total_s = length_s(spans)
    return {
        "communication_s": total_s / steps,
        "exposed_s": (total_s - overlap_s(spans, busy)) / steps,
        "calls": len(communication) / steps,
    }


def _issued(events: Sequence[dict[str, Any]]) -> list[float]:
    """Return when the host issued each event: for work of the device, when it launched it."""
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    return [launched.get(event.get("args", {}).get("correlation"), event["ts"]) for event in events]


def _intervals(events: Sequence[dict[str, Any]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    pairs = [(event["ts"], event["ts"] + event["dur"]) for event in events]
    return np.array(pairs, dtype=float).reshape(-1, 2) / 1e6


def compared(results: Results, planned: dict[tuple[str, str], Trial]) -> list[dict[str, Any]]:
    """Return what the product and the trace say, one sample per trial and rank."""
    slowed = slowed_by_trace(results.trials, results.windows)
    breakdown = traced_breakdown(results.collectives, results.windows)
    paths = results.trials.set_index("trial_id")["trace_paths"]
    traced = _traced_windows([path for trial in planned.values() for path in paths[trial.trial_id]])
    samples = []
    for (parallel, workload), trial in planned.items():
        own = results.steps[(results.steps["trial_id"] == trial.trial_id) & results.steps["collectives_s"].notna()]
        calls = results.collectives[results.collectives["trial_id"] == trial.trial_id]
        values = breakdown.astype(object).to_dict("index")[trial.trial_id]
        late = values["waited_for_rank"]
        for path in paths[trial.trial_id]:
            rank = int(Path(path).name.removeprefix("rank").partition(".")[0])
            steps = own[own["rank"] == rank]
            sample: dict[str, Any] = {
                "parallel": parallel,
                "workload": workload,
                "rank": rank,
                "step_s": float(steps["step_s"].mean()),
                "kernels_s": None if steps["kernels_s"].isna().all() else float(steps["kernels_s"].mean()),
                "calls": int((calls["rank"] == rank).sum()) / len(steps),
                "slowed": bool(trial.trial_id in slowed.index),
                "lateness_s": float(values["lateness_s"]) + float(values["hidden_lateness_s"]),
                "late_rank": None if pd.isna(late) else int(late),
            }
            sample |= {f"{name}_s": float(steps[column].mean()) for column, name in COLUMNS.items()}
            samples.append(sample | {f"trace_{name}": value for name, value in traced[path].items()})
    return samples


def _traced_windows(paths: Sequence[str]) -> dict[str, dict[str, float]]:
    """Read traces in as many processes as there are cores: on GPUs, that of one rank takes several seconds."""
    with ProcessPoolExecutor(count_cpus(), mp_context=get_context("spawn")) as pool:
        return dict(zip(paths, pool.map(traced_window, map(Path, paths)), strict=True))


def figures(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return differences from the traces, and the share of the lateness that is found."""
    found = []
    for parallel in dict.fromkeys(sample["parallel"] for sample in samples):
        own = [sample for sample in samples if sample["parallel"] == parallel]
        for name in COLUMNS.values():
            pairs = [(sample[f"trace_{name}_s"], sample[f"{name}_s"]) for sample in own]
            trace_s, product_s = max(pairs, key=lambda pair: abs(pair[1] - pair[0]))
            agree = all(within_tolerance(*pair) for pair in pairs)
            unit = f"ms of {1e3 * trace_s:.3f}"
            difference_ms = 1e3 * (product_s - trace_s)
            found.append(
                figure(f"{name}, breakdown - trace, {parallel}", difference_ms, None, unit, "5 % or 0.1 ms", agree)
            )
        missed = max(abs(sample["calls"] - sample["trace_calls"]) for sample in own)
        found.append(figure(f"collectives missed, {parallel}", missed, None, "per step", "0", missed == 0))
        by_workload = {sample["workload"]: sample for sample in own}
        late, sound = by_workload[LATE], by_workload[SOUND]
        ratio = (late["lateness_s"] - (sound["lateness_s"] if sound["late_rank"] == LATE_RANK else 0.0)) / LATE_S
        slowed = sum(sample["slowed"] for sample in own) / len(own)
        busy = _busy_share([sample for sample in own if sample["workload"] == SOUND])
        unit = f"of {1e3 * LATE_S:.0f} ms, reported for rank {late['late_rank']}"
        holds: bool | None = late["late_rank"] == LATE_RANK and FOUND[0] <= ratio <= FOUND[1]
        if busy is not None and busy < LEAST_BUSY:
            holds, unit = None, f"{unit}; not judged: host-bound, kernels take {100 * busy:.0f} % of the step"
        elif slowed:  # the product then reports no lateness
            holds, unit = None, f"{unit}; not judged: slowed too much by the profiler"
        found.append(figure(f"lateness found, {parallel}", ratio, None, unit, "0.8 to 1.25", holds))
        found.append(figure(f"trials slowed too much by the profiler, {parallel}", slowed, None, "share", "none", None))
    return found


def _busy_share(samples: Sequence[dict[str, Any]]) -> float | None:
    """Return the share of the step in kernels, of the rank with the largest. None on CPU ranks."""
    shares = [sample["kernels_s"] / sample["step_s"] for sample in samples if sample["kernels_s"] is not None]
    return max(shares, default=None)


if __name__ == "__main__":
    main()
