"""How long does a study take beyond its measuring windows, and where does the time until its first step go?

    python -m benchmarks.cost.clock                     # up to 4 GPUs, or CPU ranks without a GPU
    python -m benchmarks.cost.clock --small             # 4 trials on CPU ranks

The grid has 3 GPU counts x 3 batches x 2 precisions x 2 loader-worker counts = 36 trials, with one repeat and one
worker group. Each trial is measured for about `--window-s` seconds; an uncounted first pass of few steps determines how
many steps that takes. With fewer GPUs there are fewer counts, and the figures say so. The windows of a trial are
everything that it times, from warm-up to the all-reduce limit. Goals on 4 H200: wall time at most 1.15 x the sum of
windows, including Ray's start, which is reported separately; and under 25 s from the command to the first warm-up step.
"""

import argparse
import itertools
import math
import tempfile
import time
from typing import Any

from benchmarks.harness.common import figure, write_summary
from study.capacity import count_cpus, count_gpus
from study.orchestrate.cluster import Cluster, connect
from study.orchestrate.tune import run_trials
from study.store.store import Store
from trainables.clock import process_start_unix_s
from trainables.trial import Trial

RATIO_GOAL = 1.15
START_GOAL_S = 25.0
PROBED_STEPS = 10

PARTS = (
    ("command to Ray asked for: interpreter and imports", "process_began_at", "ray_asked_at"),
    ("Ray's own start", "ray_asked_at", "connected_at"),
    ("keeper: to the worker group asked for", "connected_at", "asked_at"),
    ("Ray Train: to the last rank's process", "asked_at", "process_began"),
    ("ranks: torch imported, default group made", "process_began", "loop_began"),
    ("ranks: other imports, loaders' parent", "loop_began", "imported"),
    ("ranks: context on the device", "imported", "context"),
    ("ranks: facts and groups", "context", "grouped"),
    ("ranks: first step of each group (NCCL)", "grouped", "rehearsed"),
    ("to the first trial's warm-up: workload, model", "rehearsed", "first_warmup_at"),
)
"""Parts of the start in order, by the times at which they start and end."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=min(4, count_gpus()), help="the most; 0: CPU ranks")
    parser.add_argument("--window-s", type=float, default=5.0, help="seconds of measuring a trial")
    parser.add_argument("--model", help="left out: resnet50 at 64 px on GPUs, mlp on CPU ranks")
    parser.add_argument("--small", action="store_true", help="4 trials on CPU ranks, judged against nothing")
    parser.add_argument("--name", default="clock", help="folder under benchmarks/results")
    options = parser.parse_args()
    if options.small:
        options.gpus, options.window_s = 0, min(options.window_s, 1.0)
    trials = grid(options)
    times = {"process_began_at": process_start_unix_s(), "ray_asked_at": time.time()}
    with connect("local") as cluster:
        times["connected_at"] = time.time()
        probed = records(cluster, [trial.but(steps=PROBED_STEPS) for trial in trials])
        sized = [for_seconds(record, options.window_s) for record in probed]
        begin_s = time.perf_counter()
        timed = records(cluster, sized)
        wall_s = time.perf_counter() - begin_s
    write_summary(options.name, figures(options, times, probed, timed, wall_s), samples(timed))


def grid(options: argparse.Namespace) -> list[Trial]:
    """Return every combination in running order. Neighbours differ in their number of GPUs."""
    on_gpus = options.gpus > 0
    sizes = [size for size in (1, 2, 4) if size <= (options.gpus or 2)]
    batches = [256, 128, 64] if on_gpus else [16, 8, 4]
    precisions, workers = ["bf16", "fp32"] if on_gpus else ["fp32", "bf16"], [0, 2]
    if options.small:
        batches, precisions, workers = [16, 8], ["fp32"], [0]
    base = Trial(
        model=options.model or ("resnet50" if on_gpus else "mlp"),
        dataset="synthetic_loader",
        image_size=64
        if on_gpus
        else 32,  # without loader processes the host makes the images; 256 of 224 px take a second
        device="cuda" if on_gpus else "cpu",
        memory_format="channels_last" if on_gpus else "contiguous",
        cpus_per_rank=max(1, count_cpus() // max(1, count_gpus())) if on_gpus else 1,
        warmup_steps=11 if on_gpus else 2,
        prefetch_batches=1,
    )
    if not on_gpus:  # over gloo, the sweep would be most of a trial
        base = base.but(sweep_bytes=2**20)
    return [
        base.but(world_size=size, batch_per_gpu=batch, precision=precision, loader_workers=count)
        for count, precision, batch, size in itertools.product(workers, precisions, batches, sizes)
    ]


def records(cluster: Cluster, trials: list[Trial]) -> list[dict[str, Any]]:
    """Measure the trials in one worker group. Return their records in running order."""
    with tempfile.TemporaryDirectory(prefix="clock-") as out:
        question = "What does a grid take besides its windows?"
        store = Store.open(out, name="clock", question=question, configuration={}, versions={}, command="")
        run_trials("clock", [trials], store, cluster)
        found = sorted(store.records(), key=lambda record: record["started_at"])
    unfinished = [f"{record['trial_id']}: {record['reason']}" for record in found if record["status"] != "done"]
    if unfinished:
        raise RuntimeError(f"not done: {'; '.join(unfinished)}")
    return found


def for_seconds(record: dict[str, Any], seconds: float) -> Trial:
    """Return the trial with enough steps to last about `window_s` seconds. All its windows scale with its steps."""
    trial = Trial.model_validate(record["trial"])
    return trial.but(steps=max(PROBED_STEPS, math.ceil(PROBED_STEPS * seconds / record["duration_s"])))


def figures(
    options: argparse.Namespace,
    times: dict[str, float],
    probed: list[dict[str, Any]],
    timed: list[dict[str, Any]],
    wall_s: float,
) -> list[dict[str, Any]]:
    """Return wall time over window time, and each part of the start."""
    windows_s = sum(record["duration_s"] for record in timed)
    opened_s = timed[0]["environment"]["group"]["opened_at"] - timed[0]["environment"]["group"]["asked_at"]
    where = f"{len(timed)} trials on up to {options.gpus or 2} {'cuda' if options.gpus else 'cpu'}"
    judged = options.gpus >= 4 and not options.small
    ray_s = times["connected_at"] - times["ray_asked_at"]
    ratio = (wall_s + ray_s) / windows_s
    goal = f"<= {RATIO_GOAL} with 36 trials on 4 H200"
    holds = ratio <= RATIO_GOAL if judged else None
    found = [
        figure(f"wall-clock with Ray's start / windows, {where}", ratio, None, "ratio", goal, holds),
        figure(f"wall-clock of the grid / windows, {where}", wall_s / windows_s, None, "ratio", "none", None),
        figure(f"sum of windows, {where}", windows_s, None, "s", "none", None),
        figure("Ray's start", ray_s, None, "s", "none", None),
        figure("worker group, from asked for to open", opened_s, None, "s", "none", None),
    ]
    known = start_times(times, probed[0])
    for name, begins, ends in PARTS:
        found.append(figure(f"start: {name}", known[ends] - known[begins], None, "s", "none", None))
    start_s = known["first_warmup_at"] - known["process_began_at"]
    holds = start_s < START_GOAL_S if judged else None
    found.append(figure("command to first warm-up", start_s, None, "s", f"< {START_GOAL_S} on a GPU host", holds))
    return found


def start_times(times: dict[str, float], first: dict[str, Any]) -> dict[str, float]:
    """Return the end time of each part of the start on its slowest rank. `first` is the record of the first trial."""
    ranks = first["environment"]["startup"]
    names = ("process_began", "loop_began", "imported", "context", "grouped", "rehearsed")
    slowest = {name: max(rank[f"{name}_at"] for rank in ranks) for name in names}
    return (
        times
        | slowest
        | {"asked_at": first["environment"]["group"]["asked_at"], "first_warmup_at": first["started_at"]}
    )


def samples(timed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the times of each trial's windows."""
    return [
        {name: record[name] for name in ("trial_id", "started_at", "duration_s")} | {"steps": record["trial"]["steps"]}
        for record in timed
    ]


if __name__ == "__main__":
    main()
