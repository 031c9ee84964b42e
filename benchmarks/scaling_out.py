"""What the orchestration of a trial costs on 2 to 256 ranks, without GPUs:  python -m benchmarks.scaling_out

A simulation on one machine, in two forms. Real in both: the keeper and its worker group (`study/worker_group.py`), the
trial's function (`study/tuning.py`), what a rank does besides measuring (`study/rank.py`), and the store. Fake in both: the
GPUs and nodes; the measurement, which gives its rows at once; the loaders' server of each rank; Ray, whose calls become
calls within this process, so that neither their cost nor the start of Ray's workers is in these figures.
- processes: every rank is a process with a gloo connection to every other, and rehearses a step. A cluster's ranks do not
  share two cores as these do, so that times are upper bounds. This is for as many ranks as the machine can hold.
- threads: every rank is a thread, and what they say to each other is pickled as there but goes through memory: what is left
  is what the driver and the keeper do, which does not get faster on a cluster.

Figures: seconds to open a worker group; seconds of a trial from its start to its saved folder, and how they divide; bytes
that reach the keeper; the size of the trial's Parquet files; memory of the driver.
"""

import argparse
import asyncio
import contextlib
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import psutil

from benchmarks.common import figure, write_summary
from benchmarks.fake_ranks import start_processes, start_threads
from benchmarks.in_process import Calls, fake_nodes, fake_trial, without_ray
from study import tuning
from study.keeper import Keeper
from study.layout import ProcessKind, layouts
from study.store import Store

OPENING_LIMIT_S = 600.0
STARTS = {"threads": start_threads, "processes": start_processes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="2,8,32,64,128,256,512", help="ranks that are threads; a comma list")
    parser.add_argument("--processes", default="2,8,32", help="ranks that are processes; a comma list, or 0 for none")
    parser.add_argument("--trials", type=int, default=5, help="of each number of ranks; the median counts")
    parser.add_argument("--small", action="store_true", help="2 and 8 ranks, 2 trials: to see that it works")
    parser.add_argument("--name", default="scaling-out", help="folder under benchmarks/results")
    options = parser.parse_args()
    sizes = [(kind, int(size)) for kind in STARTS for size in getattr(options, kind).split(",") if int(size)]
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


def simulated(kind: str, ranks: int, count: int) -> list[dict[str, Any]]:
    """A row for the opening of a group, and one for each of `count` trials in it."""
    trials = [fake_trial(ranks, repeat=repeat) for repeat in range(count)]
    keeper = Calls(
        Keeper("scaling-out", [], cast(Store, None), {"left": count}, mock.MagicMock())
    )  # keeps no checkpoints
    reported: list[dict[str, Any]] = []
    spans: dict[str, list[float]] = {"measure_s": [], "tables_s": [], "save_s": []}
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="benchmark-scaling-out-") as place,
        without_ray(keeper, STARTS[kind], reported),
        mock.patch("study.keeper.START_TIMEOUT_S", OPENING_LIMIT_S),
    ):
        store = Store.open(
            place, name="scaling-out", question="What does it cost?", configuration={}, versions={}, command="benchmark"
        )
        layout = layouts(trials, fake_nodes(ranks))
        task = tuning._Task(keeper, store, layout, False, 600.0, 30.0, {}, {})
        began_s = time.monotonic()
        asyncio.run_coroutine_threadsafe(
            keeper.actor._group_for(layout[ProcessKind.of(trials[0])], "block-0", keeper.actor.slots[0]), keeper.loop
        ).result()
        rows.append({"kind": "group", "ranks_are": kind, "ranks": ranks, "seconds": time.monotonic() - began_s})
        with (
            _timed(tuning, "table_of", spans["tables_s"]),
            _timed(Store, "save", spans["save_s"]),
            _timed(tuning, "_measured", spans["measure_s"]),
        ):
            for trial in trials:
                for taken in spans.values():
                    taken.clear()
                began_s = time.monotonic()
                tuning.measure_point({"point": {"trial": trial.model_dump(), "block": "block-0"}}, task)
                whole_s = time.monotonic() - began_s
                assert reported[-1]["status"] == "done", reported[-1]
                sums = {name: sum(taken) for name, taken in spans.items()}
                sums["ranks_s"] = sums.pop("measure_s") - sums["tables_s"]
                folder = Path(store.trial_folder(trial.trial_id))
                stored = {path.name: path.stat().st_size for path in folder.iterdir()}
                rows.append(
                    {
                        "kind": "trial",
                        "ranks_are": kind,
                        "ranks": ranks,
                        "seconds": whole_s,
                        **sums,
                        "stored_bytes": sum(stored.values()),
                    }
                    | {"files": stored, "driver_memory_bytes": psutil.Process().memory_info().rss}
                )
        keeper.close.remote().result()
    return rows


@contextlib.contextmanager
def _timed(owner: Any, name: str, taken: list[float]) -> Any:
    """Appends the seconds of each call of `owner.name`."""
    original = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        began_s = time.monotonic()
        try:
            return original(*arguments, **options)
        finally:
            taken.append(time.monotonic() - began_s)

    with mock.patch.object(owner, name, call):
        yield


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
