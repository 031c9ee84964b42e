"""How long does the report of a large study take, and how much memory?

    python -m benchmarks.cost.analysis

Generates two results folders in a temporary directory: 200 trials with 2 million rows of steps, and 2,000 trials with
20 million. Step times follow a law with noise (`tests/support/frames.py`); no training is measured. Then runs `python
-m study.scaling report` on each in a subprocess. Goals: at most 60 s and 2 GB for the larger folder, and at most 11
times the time for ten times the rows.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from benchmarks.harness.common import figure, write_summary
from study.store.tables import parquet_bytes
from tests.support.frames import communication, gpu_law, grid, record, steps, write_study, write_trial

ROWS_PER_TRIAL = 10_000
GOAL_S, GOAL_GB, GOAL_RATIO = 60.0, 2.0, 11.0
OF_EACH_RANK = 3 + 5 + 5 + 10 + 3 * 10
"""Steps of a rank outside its two timed windows: warm-up, issue, busy, transfer_synced, and three of communication."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2_000, help="of the larger folder; the smaller has a tenth")
    parser.add_argument("--repeats", type=int, default=3, help="reports of each folder; the median counts")
    parser.add_argument("--name", default="analysis", help="folder under benchmarks/results")
    options = parser.parse_args()
    samples = []
    with tempfile.TemporaryDirectory(prefix="benchmark-analysis-") as place:
        for trials in (options.trials // 10, options.trials):
            directory = Path(place) / str(trials)
            rows = generate(directory, trials)
            samples += [report(directory) | {"trials": trials, "rows": rows} for _ in range(options.repeats)]
    write_summary(options.name, _figures(pd.DataFrame(samples)), samples)


def generate(directory: Path, count: int) -> int:
    """Write a results folder of `count` trials on 1 to 8 GPUs, five repeats each. Return its number of step rows."""
    base = {"device": "cuda", "image_size": 224, "cpus_per_rank": 8, "communication_steps": 10, "sweep_bytes": 2**28}
    trials = grid(
        base,
        loader_workers=[4, 6, 8, 10],
        model=["resnet18", "resnet50", "vgg19", "vit_b_16", "mlp"],
        batch_per_gpu=[32, 64, 128, 256, 512],
        world_size=[1, 2, 4, 8],
        repeat=range(5),
    )
    rng = np.random.default_rng(0)
    write_study(directory)
    rows = 0
    for fields in trials[:count]:
        fields["steps"] = (ROWS_PER_TRIAL // fields["world_size"] - OF_EACH_RANK) // 2
        law = gpu_law(fields)
        measured = law.pop("communication")
        law["step_s"] *= float(np.exp(0.006 * rng.standard_normal()))
        frame = steps(fields, **law, noise=0.02, rng=rng)
        tables: dict[str, pd.DataFrame] = {"steps": frame}
        if fields["world_size"] > 1:
            more, tables["buckets"], tables["sweep"] = communication(
                fields, plain_step_s=law["step_s"], noise=0.02, rng=rng, **measured
            )
            tables["steps"] = pd.concat([frame, more], ignore_index=True)
        folder = write_trial(directory, record(fields))
        for name, table in tables.items():
            content = parquet_bytes(name, pa.Table.from_pandas(table, preserve_index=False))
            (folder / f"{name}.parquet").write_bytes(content)
        rows += len(tables["steps"])
    return rows


def report(directory: Path) -> dict[str, Any]:
    """Run the command on the folder. Return wall seconds and the peak memory of its process."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "study.scaling", "report", str(directory)], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status != 0:
        raise RuntimeError(f"the report of {directory} ended with exit code {os.waitstatus_to_exitcode(status)}")
    return {
        "report_s": seconds,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_memory_bytes": 1024 * usage.ru_maxrss,  # Linux gives KiB
        "load_average_1min": os.getloadavg()[0],
    }


def _figures(samples: pd.DataFrame) -> list[dict[str, Any]]:
    small, large = (part for _, part in samples.groupby("trials"))
    label = f"report of {large['trials'].iloc[0]:,} trials, {large['rows'].iloc[0]:,} rows"
    seconds, memory = float(large["report_s"].median()), float(large["peak_memory_bytes"].max()) / 1e9
    ratio = seconds / float(small["report_s"].median())
    cpu_s = float(large["cpu_s"].median())
    cpu_ratio = cpu_s / float(small["cpu_s"].median())
    goal = f"<= {GOAL_RATIO:.0f}"
    return [
        figure(label, seconds, None, "s", f"<= {GOAL_S:.0f}", seconds <= GOAL_S),
        figure(f"{label}: CPU time", cpu_s, None, "s", "none", None),
        figure(f"{label}: peak memory", memory, None, "GB", f"<= {GOAL_GB:.0f}", memory <= GOAL_GB),
        figure("its time over that of a tenth of the trials", ratio, None, "ratio", goal, ratio <= GOAL_RATIO),
        figure("the same in CPU time", cpu_ratio, None, "ratio", goal, cpu_ratio <= GOAL_RATIO),
    ]


if __name__ == "__main__":
    main()
