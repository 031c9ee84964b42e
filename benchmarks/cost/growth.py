"""How does the cost of a study grow with its number of trials and steps? Nothing is measured.

    python -m benchmarks.cost.growth

Real: the plan, the store, its check of existing results, and everything that follows a measurement (the function of a
Tune trial: rows to tables to measures to Parquet) for 10 trials spread over each study. The other trials are only
saved. Smaller studies also run under Ray Tune on a local Ray. Fake: the measurement, whose rows (two ranks) exist
beforehand. See `benchmarks/cost/scaling_out.py` for growth with ranks and `benchmarks/cost/analysis.py` for the report.

Times are CPU seconds of this process, so other work on the machine does not count; those under Tune are wall seconds.

Goal: every cost grows linearly: the exponent of a power law over the sizes is at most 1.1.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.harness.common import figure, write_summary
from benchmarks.harness.in_process import InstantKeeper, fake_nodes, fake_trial, instant_payloads
from study.capacity import NodeCapacity
from study.orchestrate.cluster import connect
from study.orchestrate.driver import Point, RunOptions, TrialDriver, grid_of
from study.orchestrate.twin.simulated_ranks import SimulatedRanks, simulated_payloads
from study.plan.trials import plan_trials
from study.store.result import TrialResult
from study.store.store import Store
from study.store.tables import unpacked
from study.studies.study import Study

GOAL = 1.1
WHOLE = 10
"""Trials of a study that go through everything."""

RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", default="1,100,1000,5000", help="a comma list")
    parser.add_argument("--steps", default="100,1000,10000", help="a comma list")
    parser.add_argument("--tune", default="10,40,160", help="trials through Ray Tune; a comma list, or 0 for none")
    parser.add_argument("--small", action="store_true", help="few of each, to see that it works")
    parser.add_argument("--name", default="growth", help="folder under benchmarks/results")
    options = parser.parse_args()
    if options.small:
        options.trials, options.steps, options.tune = "50,200", "100,1000", "0"
    samples: list[dict[str, Any]] = []
    for steps in _sizes(options.steps):
        samples.append(of_steps(steps))
    for count in _sizes(options.trials):
        samples.append(of_trials(count))
        with contextlib.redirect_stdout(None):
            write_summary(options.name, figures(samples), samples)
    samples += through_tune(_sizes(options.tune))
    write_summary(options.name, figures(samples), samples)


def _sizes(text: str) -> list[int]:
    return [size for size in map(int, text.split(",")) if size]


def of_trials(count: int) -> dict[str, Any]:
    """Return CPU seconds of each part of a study of `count` trials, and the memory of its driver at the end."""
    study = a_study(count)
    row: dict[str, Any] = {"kind": "trials", "size": count}
    with tempfile.TemporaryDirectory(prefix="benchmark-growth-") as place:
        planned, row["plan_s"] = least_of_several(lambda: plan_trials(study, fake_nodes(RANKS), {}, []))
        trials = [each.trial for each in planned if each.trial is not None]
        assert len(trials) == count
        store = open_store(place)
        every = max(1, count // WHOLE)
        taken = []
        with measuring(store, trials) as measure:
            measure(trials[0])  # imports, and makes the rows
            steps = unpacked([payload.tables["steps"] for payload in simulated_payloads(trials[0])])
            for number, trial in enumerate(trials):
                began_s = time.process_time()
                if number % every == 0:
                    measure(trial)
                    taken.append(time.process_time() - began_s)
                else:
                    store.save(TrialResult(trial=trial, status="done", steps=steps, started_at=0.0, duration_s=1.0))
        edge = max(1, len(taken) // 5)
        row |= {"trial_s": statistics.median(taken), "first_fifth_s": statistics.median(taken[:edge])}
        row["last_fifth_s"] = statistics.median(taken[-edge:])
        statuses, row["look_s"] = least_of_several(store.statuses)
        assert set(statuses.values()) == {"done"}
        _, row["plan_again_s"] = least_of_several(lambda: plan_trials(study, fake_nodes(RANKS), statuses, []))
        row["memory_bytes"] = psutil.Process().memory_info().rss
    print(f"{count} trials: {row['trial_s'] * 1e3:.0f} ms each, looking at all {row['look_s']:.1f} s", flush=True)
    return row


def least_of_several(made: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a function, and the least CPU seconds of three calls, because threads add noise."""
    seconds = []
    for _ in range(3):
        began_s = time.process_time()
        found = made()
        seconds.append(time.process_time() - began_s)
    return found, min(seconds)


def of_steps(steps: int) -> dict[str, Any]:
    """Return CPU seconds and stored bytes of one trial with this many steps, given its rows."""
    trial = fake_trial(RANKS, steps=steps)
    with tempfile.TemporaryDirectory(prefix="benchmark-growth-") as place:
        store = open_store(place)
        with measuring(store, [trial]) as measure:
            measure(trial)  # makes the rows, which is no part of the figure
            began_s = time.process_time()
            measure(trial)
            seconds = time.process_time() - began_s
        folder = Path(store.trial_folder(trial.trial_id))
        stored = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{steps} steps: {seconds * 1e3:.0f} ms, {stored / 1e6:.2f} MB", flush=True)
    return {"kind": "steps", "size": steps, "trial_s": seconds, "stored_bytes": stored}


def through_tune(sizes: list[int]) -> list[dict[str, Any]]:
    """Return the seconds that studies of these sizes take under Ray Tune, on a local Ray."""
    if not sizes:
        return []
    from study.orchestrate.tune import tune_grid

    rows = []
    with connect("local") as cluster:
        nodes = [NodeCapacity(node.node_id, node.address, cpus=RANKS, gpus=RANKS) for node in cluster.nodes]
        shown = type(cluster)(nodes, "", None, cluster.driver_resource, cluster.log_dir)
        for count in sizes:
            trials = [row.trial for row in plan_trials(a_study(count), nodes, {}, []) if row.trial is not None]
            with tempfile.TemporaryDirectory(prefix="benchmark-growth-") as place:
                store = open_store(place)
                began_s = time.monotonic()
                with contextlib.redirect_stdout(None):
                    tune_grid(
                        "growth", grid_of([trials], isolate=False), store, shown, ranks=SimulatedRanks(instant_payloads)
                    )
                seconds = time.monotonic() - began_s
                assert len(store.statuses()) == count
            rows.append({"kind": "tune", "size": count, "tune_s": seconds})
            print(f"{count} trials through Ray Tune: {seconds:.1f} s", flush=True)
    return rows


def open_store(place: str) -> Store:
    return Store.open(
        place, name="growth", question="How does it grow?", configuration={}, versions={}, command="benchmark"
    )


@contextlib.contextmanager
def measuring(store: Store, trials: list[Any]) -> Any:
    """Return a function that takes a trial through everything that follows its measurement."""
    reported: list[dict[str, Any]] = []
    nodes = fake_nodes(RANKS)
    driver = TrialDriver.of(trials, nodes, InstantKeeper(), store, RunOptions(), lambda: nodes)

    def measure(trial: Any) -> None:
        driver.run(Point(trial, "block"), reported.append)
        assert reported.pop()["status"] == "done"

    yield measure


def a_study(count: int) -> Study:
    """Return `count` trials: 10 batch sizes, or one, times repeats."""
    batches = 10 if count >= 10 else 1
    base = {name: value for name, value in fake_trial(RANKS).model_dump().items() if name != "repeat"}
    return Study(
        name="growth",
        question="How does it grow?",
        base=base,
        axes={"batch_per_gpu": tuple(range(8, 8 * batches + 8, 8))},
        repeats=count // batches,
    )


def figures(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every cost at each size, and the exponent of a power law through all sizes but the smallest."""
    made = []
    named = {
        "trials": ("plan_s", "trial_s", "look_s", "plan_again_s", "memory_bytes"),
        "steps": ("trial_s", "stored_bytes"),
        "tune": ("tune_s",),
    }
    for kind, costs in named.items():
        rows = [sample for sample in samples if sample["kind"] == kind]
        for cost in costs:
            for row in rows:
                unit, scale = ("MB", 1e-6) if cost.endswith("_bytes") else ("s", 1.0)
                made.append(figure(f"{kind}: {cost} at {row['size']}", row[cost] * scale, None, unit, "", None))
            larger = rows[1:] if len(rows) > 2 else rows
            if len(larger) > 1:
                sizes, values = [row["size"] for row in larger], [row[cost] for row in larger]
                slope = float(np.polyfit(np.log(sizes), np.log(values), 1)[0])
                made.append(
                    figure(f"{kind}: exponent of {cost}", slope, None, "1", f"<= {GOAL}", slope <= GOAL),
                )
    for row in (sample for sample in samples if sample["kind"] == "trials"):
        ratio = row["last_fifth_s"] / row["first_fifth_s"]
        made.append(figure(f"trials: last fifth / first fifth at {row['size']}", ratio, None, "1", "", None))
    return made


if __name__ == "__main__":
    main()
