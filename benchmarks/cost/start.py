"""How long does a study take to start, and each further worker group?

    python -m benchmarks.cost.start                        # on all GPUs, else on two CPU ranks
    python -m benchmarks.cost.start --launches 4 --groups 4
    python -m benchmarks.cost.start --cold               # as root: the first launch reads all files from the disk

Each launch is a command of its own, with a Ray of its own, and measures the same trial in several worker groups. Times
come from its results folder. Goals: first warm-up within 25 s of the command, and at most 5 s from when a group's last
trial is stored to the first warm-up of the next group, whose ranks are new processes. The first trial on a host also
measures the matmul limit after its windows, for 5 s per number format; these seconds are part of the trial.

Do groups that follow in one launch vary as much as launches do? If not, the intervals of a study, whose groups mostly
share a launch, would be too narrow. The logarithm of the throughput of each group is split into launches and groups
within them (one-way analysis of variance, Montgomery: Design and Analysis of Experiments, section 3.9).
"""

import argparse
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.measure.measures import summaries
from analysis.read.results import load_reduced
from benchmarks.harness.common import figure, write_summary
from study.capacity import count_gpus
from study.store.store import Store

FIRST_GOAL_S, FURTHER_GOAL_S = 25.0, 5.0
ON_GPUS = (
    "--model resnet50 --batch-per-gpu 64 --loader-workers 4 --set dataset=image_folder_sample "
    "--set decode=torchvision --steps 30"
)
ON_CPUS = "--model mlp --batch-per-gpu 64 --loader-workers 1 --set dataset=synthetic_loader --steps 30"

PARTS = ("process_began", "loop_began", "imported", "context", "grouped", "rehearsed")
"""ends of the parts of a rank's start, see `study.orchestrate.rank.serve`"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=count_gpus(), help="0: two CPU ranks")
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--groups", type=int, default=4, help="worker groups per launch, at least 2")
    parser.add_argument("--work", help="options of `run` for the trial")
    parser.add_argument("--cold", action="store_true", help="drop this host's page cache before the first launch")
    parser.add_argument("--small", action="store_true", help="one launch of two groups on CPU ranks")
    parser.add_argument("--name", default="start", help="folder under benchmarks/results")
    options = parser.parse_args()
    if options.small:
        options.gpus, options.launches, options.groups = 0, 1, 2
    if options.groups < 2:
        parser.error(f"--groups {options.groups}: a further group needs at least 2")
    work = options.work or (ON_GPUS if options.gpus else ON_CPUS)
    arguments = f"run default {work} --gpus {options.gpus or 2} --repeats {options.groups} --address local"
    if options.cold:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    launches = [launched(shlex.split(arguments)) for _ in range(options.launches)]
    samples = [group | {"launch": number} for number, groups in enumerate(launches) for group in groups]
    write_summary(options.name, figures(launches), samples)


def launched(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Run one command. Return its groups in order: times in s, throughput in samples/s, and parts of the start in s.

    `asked_s` is from the command until the group was requested, and the parts are from there.
    """
    with tempfile.TemporaryDirectory(prefix="start-") as out:
        began_at = time.time()
        subprocess.run([sys.executable, "-m", "study.scaling", *arguments, "--out", out], check=True)
        took_s = time.time() - began_at
        store = Store.at(out)
        records = sorted(store.records(), key=lambda record: record["started_at"])
        stored_at = {
            record["trial_id"]: Path(store.trial_folder(record["trial_id"]), "trial.json").stat().st_mtime
            for record in records
        }
        results = load_reduced(out)
        measured = summaries(results.trials, results.windows).set_index("trial_id")["throughput_samples_per_s"]
    ends_at, groups = began_at, []
    for record in records:
        environment, started_at = record["environment"], record["started_at"]
        asked_at = environment["group"]["asked_at"]
        ends = [max(rank[f"{part}_at"] for rank in environment["startup"]) for part in PARTS]
        groups.append(
            {
                "group": record["worker_group"],
                "to_first_warmup_s": started_at - ends_at,
                "samples_per_s": float(measured[record["trial_id"]]),
                "command_s": took_s,
                "asked_s": asked_at - began_at,
            }
            | {f"{part}_after_s": end - asked_at for part, end in zip(PARTS, ends, strict=True)}
        )
        ends_at = stored_at[record["trial_id"]]
    return groups


def figures(launches: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the figures of all launches."""
    first = [groups[0]["to_first_warmup_s"] for groups in launches]
    further = [group["to_first_warmup_s"] for groups in launches for group in groups[1:]]
    slowest_first, slowest = max(first), max(further)
    found = [
        figure(
            "command to first warm-up, slowest", slowest_first, None, "s", f"<= {FIRST_GOAL_S:g}",
            slowest_first <= FIRST_GOAL_S,
        ),
        figure("command to first warm-up, median", statistics.median(first), None, "s", "none", None),
        figure("a further group, slowest", slowest, None, "s", f"<= {FURTHER_GOAL_S:g}", slowest <= FURTHER_GOAL_S),
        figure("a further group, median", statistics.median(further), None, "s", "none", None),
    ]  # fmt: skip
    if len(launches) > 1:
        rates = [[math.log(group["samples_per_s"]) for group in groups] for groups in launches]
        between, within = components(rates)
        found += [
            figure("spread between launches (sd of log throughput)", between, None, "ratio", "none", None),
            figure("spread between groups of a launch (sd of log throughput)", within, None, "ratio", "none", None),
        ]
    return found


def components(values: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the standard deviations between launches and between the groups of a launch, of equally many groups.

    That between launches is what the spread of their means has in excess of the spread within them; 0 if nothing.
    """
    groups = len(values[0])
    within = statistics.fmean(statistics.variance(launch) for launch in values)
    of_means = statistics.variance([statistics.fmean(launch) for launch in values])
    return math.sqrt(max(0.0, of_means - within / groups)), math.sqrt(within)


if __name__ == "__main__":
    main()
