"""How much time does the orchestration of a trial cost on 2 to 256 ranks? Needs no GPUs.

    python -m benchmarks.cost.scaling_out

A simulation on one machine, in two forms. Real in both: the keeper and its worker group
(`study/orchestrate/worker_group.py`), the trial's driver (`study/orchestrate/driver.py`), what a rank does besides
measuring (`study/orchestrate/rank.py`), and the store. Fake in both: GPUs and nodes; the measurement, which returns its
rows at once; the loader server of each rank; and Ray, whose calls become calls within this process. The figures
therefore exclude the cost of Ray calls and of starting Ray workers.
- processes: every rank is a process with a gloo connection to every other, and rehearses a step. These ranks share two
  cores, unlike those of a cluster, so times are upper bounds. Limited to as many ranks as the machine can hold.
- threads: every rank is a thread, and messages are pickled but pass through memory. What remains is the work of driver
  and keeper, which does not get faster on a cluster.

Figures: seconds to open a worker group; seconds of a trial from its start to its saved folder, by part (the part of the
tables is measured by building them a second time); size of the trial's Parquet files; memory of the driver.
"""

import argparse
import contextlib
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil

from benchmarks.harness.common import figure, write_summary
from benchmarks.harness.fake_ranks import ThreadRanks, process_ranks
from benchmarks.harness.in_process import fake_nodes, fake_trial
from study.orchestrate.driver import Point, RunOptions, TrialDriver, result_of
from study.orchestrate.group import RankBackend
from study.orchestrate.keeper import Keeper
from study.orchestrate.protocol import Outcome
from study.orchestrate.twin.in_process import LocalGauge, LocalKeeper
from study.store.result import TrialResult
from study.store.store import Store
from trainables.trial import Trial

OPENING_LIMIT_S = 600.0
BACKENDS: dict[str, Callable[[], RankBackend]] = {"threads": ThreadRanks, "processes": process_ranks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="2,8,32,64,128,256,512", help="ranks that are threads; a comma list")
    parser.add_argument("--processes", default="2,8,32", help="ranks that are processes; a comma list, or 0 for none")
    parser.add_argument("--trials", type=int, default=5, help="of each number of ranks; the median counts")
    parser.add_argument("--small", action="store_true", help="2 and 8 ranks, 2 trials: to see that it works")
    parser.add_argument("--name", default="scaling-out", help="folder under benchmarks/results")
    options = parser.parse_args()
    sizes = [(kind, int(size)) for kind in BACKENDS for size in getattr(options, kind).split(",") if int(size)]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every rank holds a connection to every other, per group
    samples: list[dict[str, Any]] = []
    for kind, ranks in sizes:
        if options.small and ranks > 8:
            continue
        began_s = time.monotonic()
        samples += simulated(kind, ranks, 2 if options.small else options.trials)
        print(f"{ranks} {kind}: {time.monotonic() - began_s:.0f} s in all", flush=True)
        with contextlib.redirect_stdout(None):
            write_summary(options.name, figures(samples), samples)
    write_summary(options.name, figures(samples), samples)


class TimedKeeper(LocalKeeper):
    """A keeper that notes how long the last measurement took, and its outcome."""

    seconds = 0.0
    outcome: Outcome | None = None

    def measure(self, *arguments: Any) -> Outcome:
        started_s = time.monotonic()
        self.outcome = super().measure(*arguments)
        self.seconds = time.monotonic() - started_s
        return self.outcome


class TimedStore(Store):
    """A store that notes how long each trial took to save."""

    def save(self, result: TrialResult) -> None:
        started_s = time.monotonic()
        super().save(result)
        SAVED_S.append(time.monotonic() - started_s)


SAVED_S: list[float] = []


def simulated(kind: str, ranks: int, count: int) -> list[dict[str, Any]]:
    """Return a row for the opening of a group, and one for each of `count` trials in it."""
    trials = [fake_trial(ranks, repeat=repeat) for repeat in range(count)]
    nodes = fake_nodes(ranks)
    rows: list[dict[str, Any]] = []
    no_store = cast(Store, None)  # no checkpoints are kept
    live = Keeper(
        "scaling-out", [], no_store, {"left": count}, LocalGauge, BACKENDS[kind](), start_timeout_s=OPENING_LIMIT_S
    )
    with tempfile.TemporaryDirectory(prefix="benchmark-scaling-out-") as place, TimedKeeper(live) as keeper:
        store = TimedStore.open(
            place, name="scaling-out", question="What does it cost?", configuration={}, versions={}, command="benchmark"
        )
        driver = TrialDriver.of(trials, nodes, keeper, store, RunOptions(), lambda: nodes)
        started_s = time.monotonic()
        keeper.call("_group_for", driver.layout(trials[0]), "block-0", live.slots[0])
        rows.append({"kind": "group", "ranks_are": kind, "ranks": ranks, "seconds": time.monotonic() - started_s})
        rows += [
            _timed(trial, driver, keeper, {"kind": "trial", "ranks_are": kind, "ranks": ranks}) for trial in trials
        ]
    return rows


def _timed(trial: Trial, driver: TrialDriver, keeper: TimedKeeper, row: dict[str, Any]) -> dict[str, Any]:
    """Run a trial, and return what its parts took."""
    reported: list[dict[str, Any]] = []
    started_s = time.monotonic()
    driver.run(Point(trial, "block-0"), reported.append)
    seconds = time.monotonic() - started_s
    assert reported[-1]["status"] == "done", reported[-1]
    assert keeper.outcome is not None
    started_s = time.monotonic()
    result_of(trial, keeper.outcome)
    tables_s = time.monotonic() - started_s
    stored = {path.name: path.stat().st_size for path in Path(driver.store.trial_folder(trial.trial_id)).iterdir()}
    return row | {
        "seconds": seconds,
        "ranks_s": keeper.seconds,
        "tables_s": tables_s,
        "save_s": SAVED_S[-1],
        "stored_bytes": sum(stored.values()),
        "files": stored,
        "driver_memory_bytes": psutil.Process().memory_info().rss,
    }


def figures(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians by number of ranks, and how they grow: the exponent of a power law through them."""
    made = []
    parts = {"seconds": "in all", "ranks_s": "ranks", "tables_s": "tables", "save_s": "saving"}
    for kind in dict.fromkeys(sample["ranks_are"] for sample in samples):
        of_kind = [sample for sample in samples if sample["ranks_are"] == kind]
        sizes = sorted({sample["ranks"] for sample in of_kind})
        medians: dict[str, list[float]] = {name: [] for name in (*parts, "stored_bytes")}
        for ranks in sizes:
            here = [sample for sample in of_kind if sample["ranks"] == ranks]
            opening_s = next(sample["seconds"] for sample in here if sample["kind"] == "group")
            made.append(figure(f"worker group of {ranks} {kind} opens", opening_s, None, "s", "", None))
            for name, values in medians.items():
                values.append(statistics.median(sample[name] for sample in here if sample["kind"] == "trial"))
            for name, what in parts.items():
                made.append(figure(f"trial on {ranks} {kind}, {what}", medians[name][-1], None, "s", "", None))
            stored = medians["stored_bytes"][-1]
            made.append(figure(f"trial on {ranks} {kind}, stored", stored / 1e6, None, "MB", "", None))
        large = [index for index, size in enumerate(sizes) if size >= 8]
        if len(large) > 1:
            for name, what in (("seconds", "time"), ("stored_bytes", "stored bytes")):
                logs = np.log([sizes[index] for index in large]), np.log([medians[name][index] for index in large])
                slope = float(np.polyfit(*logs, 1)[0])
                text = f"exponent of a trial's {what} over {kind}, from 8"
                made.append(figure(text, slope, None, "1", "<= 1.1", slope <= 1.1))
    return made


if __name__ == "__main__":
    main()
