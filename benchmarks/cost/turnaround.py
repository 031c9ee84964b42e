"""How much time passes between trials, from the end of one trial's last window to the start of the next warm-up?

    python -m benchmarks.cost.turnaround                        # GPUs if there are any, else CPU ranks
    python -m benchmarks.cost.turnaround --of results/default   # of an existing study; nothing is measured

The same grid runs twice: with warm worker groups, and with a fresh group per trial (`--isolate`). Times come from the
results folders of the study. Goal: at most 1 s within one warm group.
"""

import argparse
import itertools
import statistics
import tempfile
from typing import Any

from benchmarks.harness.common import figure, write_summary
from study.capacity import count_cpus, count_gpus
from study.orchestrate.cluster import Cluster, connect
from study.orchestrate.tune import run_trials
from study.store.store import Store
from trainables.trial import Trial

GOAL_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--isolated-trials",
        type=int,
        default=3,
        help="how many trials of the grid run isolated; each starts a group. 0: none, else at least 2",
    )
    parser.add_argument("--of", metavar="DIR", help="read the warm groups of this results folder instead")
    parser.add_argument("--name", default="turnaround", help="folder under benchmarks/results")
    options = parser.parse_args()
    if options.isolated_trials == 1:
        parser.error("--isolated-trials 1: a turnaround lies between two trials; give 0 or at least 2")

    if options.of:
        records = Store.at(options.of).records()
        warm = _gaps(records, isolate=False)
        write_summary(options.name, _warm_figures(warm), warm, records[0]["environment"])
        return
    trials = grid(count_gpus(), count_cpus())
    with connect("local") as cluster:
        warm = gaps(cluster, trials, isolate=False)
        alone = trials[: options.isolated_trials]
        isolated = gaps(cluster, alone, isolate=True) if alone else []
    figures = _warm_figures(warm)
    if isolated:
        median_s = statistics.median(gap["gap_s"] for gap in isolated)
        figures.append(figure("median turnaround with --isolate", median_s, None, "s", "none", None))
    write_summary(options.name, figures, warm + isolated)


def _warm_figures(warm: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for gap in warm:
        print(f"{gap['gap_s']:7.3f} s  before {gap['trial_id']}")
    warm_s = [gap["gap_s"] for gap in warm]
    return [
        figure("longest turnaround in a warm group", max(warm_s), None, "s", f"<= {GOAL_S}", max(warm_s) <= GOAL_S),
        figure("median turnaround in a warm group", statistics.median(warm_s), None, "s", "none", None),
    ]


def grid(gpus: int, cpus: int) -> list[Trial]:
    """Return trials whose neighbours differ in world size, batch, loader workers and precision."""
    device = "cuda" if gpus else "cpu"
    base = Trial(
        model="resnet18_small" if gpus else "resnet18",
        device=device,
        memory_format="channels_last",
        cpus_per_rank=max(1, cpus // gpus) if gpus else 1,
        steps=20 if gpus else 5,
        warmup_steps=5 if gpus else 2,
        prefetch_batches=1,
    )
    if not gpus:  # gloo would take most of the time of a trial, which is not what is asked
        base = base.but(communication_steps=1, sweep_bytes=2**20)
    largest = gpus or min(2, cpus)
    sizes = [size for size in (1, 2, 4, 8) if size <= largest]
    precisions = ("bf16", "fp32") if gpus else ("fp32",)
    return [
        base.but(world_size=size, batch_per_gpu=batch, loader_workers=workers, precision=precision)
        for workers in (0, 2)
        for batch in ((128, 32) if gpus else (4, 8))
        for precision in precisions
        for size in sizes
    ]


def gaps(cluster: Cluster, trials: list[Trial], isolate: bool) -> list[dict[str, Any]]:
    """Run the trials in this order and return the times between them, as `_gaps` does."""
    with tempfile.TemporaryDirectory(prefix="turnaround-") as out:
        store = Store.open(
            out, name="turnaround", question="How long is it between trials?", configuration={}, versions={}, command=""
        )
        run_trials("turnaround", [trials], store, cluster, isolate=isolate)
        records = store.records()
    unfinished = [record["trial_id"] for record in records if record["status"] != "done"]
    if unfinished:
        raise RuntimeError(f"not done: {', '.join(unfinished)}")
    return _gaps(records, isolate)


def _gaps(records: list[dict[str, Any]], isolate: bool) -> list[dict[str, Any]]:
    """Return the time before each trial but the first; without `isolate` only within a worker group."""
    return [
        {
            "trial_id": record["trial_id"],
            "isolated": isolate,
            "gap_s": record["started_at"] - (before["started_at"] + before["duration_s"]),
        }
        for before, record in itertools.pairwise(sorted(records, key=lambda record: record["started_at"]))
        if isolate or record["worker_group"] == before["worker_group"]
    ]


if __name__ == "__main__":
    main()
