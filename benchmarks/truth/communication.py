"""Is the communication breakdown correct? Compare it with a profiler, a bare all-reduce sweep, and injected faults.

    python -m benchmarks.truth.communication                    # ResNet-50 and VGG-19, batch 32 and 256, all GPUs
    python -m benchmarks.truth.communication --gpus 2,4 --interconnects auto,socket
    python -m benchmarks.truth.communication --device cpu       # a small form: gloo, no trace, one interconnect

All trials run through the product into one results folder, given by `--out`; a rerun measures only what is missing.
Goals:
- Live exposed time on every rank is within 5 % or 0.1 ms of the trace's.
- Bus bandwidth of the study's sweep is at least 0.97 of a bare sweep's from 16 MiB on. Smaller messages are
  launch-bound: on 2 H200 a launch took 35 us in one process and 48 us in the next.
- Bus bandwidth at 1 GiB on 4 GPUs is at least 350 GB/s.
- Each fault is found: between 80 % and 125 % of its cost per step is reported as lateness of the late rank, as load
  wait, or as exposed transfer, if the fault costs at least 10 % of the step.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.measure.allreduce import sweep_seconds
from analysis.measure.communication import bucket_rows, communication_breakdown
from analysis.measure.measures import summaries
from analysis.measure.trace import agreement
from analysis.read.results import Results, load
from analysis.report.report import write_report
from analysis.text import field_value
from benchmarks.harness.common import RESULTS, command, figure, kept_samples, write_summary
from benchmarks.harness.faulty_workloads import LATE_RANK
from study.capacity import count_cpus, count_gpus
from study.orchestrate.cluster import Cluster, connect
from study.orchestrate.protocol import Event
from study.orchestrate.tune import run_trials
from study.store.environment import versions
from study.store.store import Store
from trainables.measure.allreduce_sweep import sweep_sizes
from trainables.trial import Trial

ROOT = Path(__file__).resolve().parent.parent.parent
FAULTS = "benchmarks/harness/faulty_workloads.py"
MIB, GIB, GB = 2**20, 2**30, 1e9

SWEEP_GOAL = 0.97
LAUNCH_BOUND_BYTES = 16 * MIB
BUS_GOAL_BYTES_PER_S = 350 * GB
"""At 1 GiB on 4 GPUs connected by NVLink."""
FOUND_GOAL = 0.8
JUDGED_COST = 0.1
"""A fault that costs less than this share of the step is reported but has no goal: single trials differ by several
percent, and a host-bound step can hide the fault completely."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"models": "resnet50,vgg19", "batches": "32,256", "interconnects": "auto,socket,no_p2p", "image_size": 224},
    "cpu": {"models": "mlp", "batches": "4,8", "interconnects": "auto", "image_size": 32},
}


@dataclass
class AccountBenchmark:
    """The state of this benchmark: options, results folder, and the figures and samples so far."""

    options: argparse.Namespace
    folder: Path
    store: Store
    figures: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def on_gpus(self) -> bool:
        return bool(self.options.device == "cuda")

    @property
    def sizes(self) -> list[int]:
        """World sizes above one, the largest last."""
        return sorted(int(size) for size in str(self.options.gpus).split(","))

    def save(self) -> None:
        """Write all figures and samples so far, so that they survive if the run ends early."""
        write_summary(str(self.folder), self.figures, self.samples)

    def results(self) -> Results:
        return load(self.folder)


def main() -> None:
    benchmark = _opened(_options())
    bare = [bare_sweeps(benchmark)]
    with connect("local") as cluster:
        run(benchmark, cluster, [*plain_trials(benchmark), *fault_trials(benchmark)])
        benchmark.figures += instrument_figures(benchmark) + fault_figures(benchmark)
        benchmark.save()
        bare.append(bare_sweeps(benchmark))
        benchmark.samples += [{"kind": "bare sweep", "run": i, **row} for i, rows in enumerate(bare) for row in rows]
        benchmark.figures += sweep_figures(benchmark)
        benchmark.save()
        for interconnect in benchmark.options.interconnects.split(",") if benchmark.on_gpus else []:
            run(benchmark, cluster, traced_trials(benchmark, interconnect))
            benchmark.figures += trace_figures(benchmark, interconnect) + slow_wire_figures(benchmark, interconnect)
            benchmark.save()
    write_report(benchmark.folder)
    for traces in benchmark.folder.glob("trials/*/traces"):
        shutil.rmtree(traces)  # tens of megabytes each; their results are among the samples and in the report
    lost = [record["trial_id"] for record in benchmark.store.records() if record["status"] != "done"]
    if lost:
        sys.exit(f"not done: {', '.join(lost)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if count_gpus() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--gpus", help="comma-separated world sizes above one; default: all GPUs, or two CPU ranks")
    parser.add_argument("--models")
    parser.add_argument("--batches", help="per rank")
    parser.add_argument("--interconnects", help="in this order; auto must come first, as the reference")
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--out", default="communication", help="folder; relative paths are below benchmarks/results")
    options = parser.parse_args()
    for name, value in DEFAULTS[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.gpus = options.gpus or (count_gpus() if options.device == "cuda" else 2)
    return options


def _opened(options: argparse.Namespace) -> AccountBenchmark:
    folder = RESULTS / options.out
    kept = kept_samples(options.out)
    store = Store.open(
        str(folder),
        name="communication",
        question="Is the communication breakdown correct?",
        configuration=vars(options),
        versions={name: version for name, version in versions().items() if version},
        command=command(),
    )
    # traces are read once and then removed
    return AccountBenchmark(options, folder, store, samples=[sample for sample in kept if sample["kind"] == "trace"])


# ------------------------------------------------------------------------------------------------------------- trials


def _base(benchmark: AccountBenchmark) -> Trial:
    on_gpus = benchmark.on_gpus
    return Trial(
        dataset="synthetic",
        image_size=benchmark.options.image_size,
        device=benchmark.options.device,
        world_size=benchmark.sizes[-1],
        cpus_per_rank=max(1, count_cpus() // max(benchmark.sizes[-1], count_gpus())) if on_gpus else 1,
        precision="bf16" if on_gpus else "fp32",
        memory_format="channels_last",
        steps=20,
        communication_steps=10,
        sweep_bytes=GIB if on_gpus else 4 * MIB,
    )


def _cases(benchmark: AccountBenchmark) -> list[Trial]:
    """Return every model with every batch, on all ranks."""
    models, batches = benchmark.options.models.split(","), benchmark.options.batches.split(",")
    base = _base(benchmark)
    return [base.but(model=model, batch_per_gpu=int(batch)) for model in models for batch in batches]


def plain_trials(benchmark: AccountBenchmark) -> list[Trial]:
    """Return trials without a profiler, on one rank and on several."""
    return [trial.but(world_size=size) for trial in _cases(benchmark) for size in (1, *benchmark.sizes)]


def fault_trials(benchmark: AccountBenchmark) -> list[Trial]:
    """Return a device-bound trial with a late rank and a host-bound one with a slow loader. Neither is hidden."""
    cases = _cases(benchmark)
    smallest, largest = (choose(cases, key=lambda trial: trial.batch_per_gpu) for choose in (min, max))
    return [largest.but(workload=f"{FAULTS}:late_rank"), smallest.but(workload=f"{FAULTS}:slow_loader")]


def traced_trials(benchmark: AccountBenchmark, interconnect: str) -> list[Trial]:
    """Return trials in which every rank keeps a trace."""
    traced = {"profile_ranks": "all", "interconnect": interconnect}
    return [trial.but(world_size=size, **traced) for trial in _cases(benchmark) for size in benchmark.sizes]


def run(benchmark: AccountBenchmark, cluster: Cluster, trials: Sequence[Trial]) -> None:
    """Run the trials that are not done yet, with one worker group per process configuration."""
    done = benchmark.store.statuses()
    missing = [trial for trial in trials if done.get(trial.trial_id) != "done"]
    if missing:
        run_trials("communication", [missing], benchmark.store, cluster, on_event=_tell)


def _tell(event: Event) -> None:
    if event.kind == "trial_ended" and event.trial is not None:
        print(f"{event.trial.trial_id}: {event.status} {event.reason}", flush=True)


def bare_sweeps(benchmark: AccountBenchmark) -> list[dict[str, Any]]:
    """Return the rows of `bare_sweep.py` under torchrun for every world size, with a column world_size."""
    messages = sweep_sizes(_base(benchmark).sweep_bytes, [])
    return [
        {"world_size": size, **row}
        for size in benchmark.sizes
        for row in bare_sweep(benchmark.options.device, size, messages)
    ]


def bare_sweep(device: str, world_size: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return the rows of `bare_sweep.py` under torchrun on `world_size` ranks."""
    with tempfile.TemporaryDirectory(prefix="bare-sweep-") as folder:
        out = Path(folder) / "sweep.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        script = [str(ROOT / "benchmarks/harness/bare_sweep.py"), device, ",".join(map(str, sizes)), str(out)]
        subprocess.run([*launcher, *script], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return list(json.loads(out.read_text()))


# ------------------------------------------------------------------------------------------------------------ figures


def _name(trial: Trial) -> str:
    what = f", {field_value('interconnect', trial.interconnect)}" if trial.interconnect != "auto" else ""
    return f"{trial.model} batch {trial.batch_per_gpu} on {trial.world_size} {trial.device}{what}"


def _measured(benchmark: AccountBenchmark) -> pd.DataFrame:
    """Return summary and communication breakdown per done trial, indexed by trial_id."""
    results = benchmark.results()
    rows = summaries(results.trials, results.windows).set_index("trial_id")
    breakdown = communication_breakdown(bucket_rows(results.buckets, results.steps, results.trials), results.windows)
    phases = results.windows[results.windows["window"] == "phases"]
    # ranks wait for each other, so the step waits as long for its batch as the latest rank
    rows["latest_load_wait_s"] = phases.groupby("trial_id")["load_wait_s"].max()
    return rows.join(breakdown[["waited_for_rank", "lateness_s", "exposed_wire_s"]])


def instrument_figures(benchmark: AccountBenchmark) -> list[dict[str, Any]]:
    """Return the measurement overhead: step time of the instrumented windows relative to the plain window."""
    found = _measured(benchmark)
    figures = []
    for trial in plain_trials(benchmark):
        if trial.world_size > 1 and trial.trial_id in found.index:
            for window, column in (("phases", "instruments_ratio"), ("communication", "communication_ratio")):
                ratio = found[column].astype(float).to_dict()[trial.trial_id]
                figures.append(
                    figure(f"{window}/plain, {_name(trial)}", ratio, None, "ratio of step times", "none", None)
                )
    return figures


def fault_figures(benchmark: AccountBenchmark) -> list[dict[str, Any]]:
    """Return the share of each fault's cost per step that is reported as its true cause."""
    found = _measured(benchmark)
    late, slow = fault_trials(benchmark)
    figures = []
    if share := _share(found, late.but(workload=""), late, "lateness_s"):
        named = found["waited_for_rank"].astype(object)[late.trial_id]
        waited_for = "no rank" if pd.isna(named) else f"rank {named}"
        figures.append(
            _found(
                f"late rank, reported as wait for {waited_for}, {_name(late)}", share, waited_for == f"rank {LATE_RANK}"
            )
        )
    if share := _share(found, slow.but(workload=""), slow, "latest_load_wait_s"):
        figures.append(_found(f"slow loader, reported as load wait of the latest rank, {_name(slow)}", share))
    return figures


def slow_wire_figures(benchmark: AccountBenchmark, interconnect: str) -> list[dict[str, Any]]:
    """Return the share of the cost of a socket-only interconnect that is reported as exposed communication."""
    if interconnect != "socket":
        return []
    found = _measured(benchmark)
    figures = []
    for trial in traced_trials(benchmark, interconnect):
        share = _share(found, trial.but(interconnect="auto"), trial, "exposed_wire_s")
        if share:
            figures.append(_found(f"slow interconnect, reported as exposed transfer, {_name(trial)}", share))
    return figures


def _share(found: pd.DataFrame, sound: Trial, faulty: Trial, column: str) -> tuple[float, float, float] | None:
    """Return (growth of the column / growth of the step time, that growth in seconds, and as a share of the step).

    None if a trial is missing.
    """
    if not {sound.trial_id, faulty.trial_id} <= set(found.index):
        return None
    part_s, cost_s = (
        found[name].astype(float)[faulty.trial_id] - found[name].astype(float)[sound.trial_id]
        for name in (column, "step_s")
    )
    return float(part_s / cost_s), float(cost_s), float(cost_s / found["step_s"].astype(float)[sound.trial_id])


def _found(name: str, share: tuple[float, float, float], right: bool = True) -> dict[str, Any]:
    value, cost_s, cost_share = share
    unit = f"of the {1e3 * cost_s:.1f} ms that it costs ({100 * cost_share:.1f} % of the step)"
    if cost_share < JUDGED_COST:
        return figure(name, value, None, unit, f"none: costs less than {100 * JUDGED_COST:.0f} % of the step", None)
    holds = right and FOUND_GOAL <= value <= 1 / FOUND_GOAL
    return figure(name, value, None, unit, f"{FOUND_GOAL} to {1 / FOUND_GOAL}", holds)


def sweep_figures(benchmark: AccountBenchmark) -> list[dict[str, Any]]:
    """Compare the study's sweeps with bare ones: the lowest bandwidth ratio, and the largest message's bandwidth."""
    results = benchmark.results()
    bare = pd.DataFrame([sample for sample in benchmark.samples if sample["kind"] == "bare sweep"])
    figures = []
    for world_size in benchmark.sizes:
        ids = [trial.trial_id for trial in plain_trials(benchmark) if trial.world_size == world_size]
        ours = sweep_seconds(results.sweep[results.sweep["trial_id"].isin(ids)])
        ours_s = ours.groupby("bytes")["seconds"].median()
        rows = bare[bare["world_size"] == world_size].rename(columns={"run": "trial_id"})
        bare_s = sweep_seconds(rows).groupby("bytes")["seconds"].median()
        ratio = (bare_s / ours_s).dropna()
        judged_bytes = LAUNCH_BOUND_BYTES if benchmark.on_gpus else MIB
        benchmark.samples += [
            {"kind": "busbw ratio", "world_size": world_size, "bytes": size, "ratio": value}
            for size, value in ratio.items()
        ]
        least, worst_size = min(
            (float(value), int(str(size))) for size, value in ratio[ratio.index >= judged_bytes].items()
        )
        size = int(ours_s.index.max())
        bus = size / ours_s[size] * 2 * (world_size - 1) / world_size
        where = f"{world_size} {benchmark.options.device}"
        judged = benchmark.on_gpus and world_size == 4 and size == GIB
        figures += [
            figure(
                f"busbw of our sweep / bare, least from {judged_bytes >> 20} MiB on ({worst_size} B), {where}",
                least,
                None,
                "ratio",
                f">= {SWEEP_GOAL}",
                least >= SWEEP_GOAL,
            ),
            figure(
                f"busbw at {size} B, {where}",
                bus / GB,
                None,
                "GB/s",
                f">= {BUS_GOAL_BYTES_PER_S / GB:.0f}" if judged else "none",
                bool(bus >= BUS_GOAL_BYTES_PER_S) if judged else None,
            ),
        ]
    return figures


def trace_figures(benchmark: AccountBenchmark, interconnect: str) -> list[dict[str, Any]]:
    """Compare exposed time, live vs. trace, on the rank with the largest difference."""
    results = benchmark.results()
    known = {sample["trial_id"] for sample in benchmark.samples if sample["kind"] == "trace"}
    trials = results.trials[~results.trials["trial_id"].isin(known)]
    rows = json.loads(agreement(replace(results, trials=trials)).to_json(orient="records"))
    benchmark.samples += [{"kind": "trace", **row} for row in rows]
    figures = []
    for trial in traced_trials(benchmark, interconnect):
        ranks = [s for s in benchmark.samples if s["kind"] == "trace" and s["trial_id"] == trial.trial_id]
        problems = [sample["problem"] for sample in ranks if sample["problem"]]
        print("".join(f"{problem}\n" for problem in problems), end="")
        if ranks:
            differences_s = [sample["exposed_difference_s"] or 0.0 for sample in ranks]
            figures.append(
                figure(
                    f"exposed, live - trace, {_name(trial)}",
                    1e3 * max(differences_s, key=abs),
                    None,
                    f"ms of {1e3 * (ranks[0]['exposed_trace_s'] or 0.0):.3f}",
                    "within 5 % or 0.1 ms",
                    all(sample["holds"] for sample in ranks),
                )
            )
    return figures


if __name__ == "__main__":
    main()
