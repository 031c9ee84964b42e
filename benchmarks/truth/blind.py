"""Do predictions hold that were written down before the larger number of GPUs was measured?

    python -m study.scaling run default --gpus 1,2 --out RESULTS
    python -m benchmarks.truth.blind predict RESULTS --gpus 4      # then commit prediction.json
    python -m study.scaling run default --gpus 4 --out RESULTS
    python -m benchmarks.truth.blind judge RESULTS

`predict` writes what the command `predict` says, and never replaces it. `judge` compares it with the steps measured
since. The naive estimate is the step of one GPU. Goals: a mean absolute error of at most 3 %, and intervals that hold
in 90 % of the series.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import pandas as pd

from analysis.measure.measures import summaries
from analysis.read.results import load_reduced
from benchmarks.harness.common import RESULTS, figure, write_summary

MEAN_GOAL, COVERAGE_GOAL = 0.03, 0.9
PREDICTED = ("step_s", "step_s_low", "step_s_high", "caveat")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["predict", "judge"])
    parser.add_argument("results", help="results folder")
    parser.add_argument("--gpus", type=int, default=4, help="number of GPUs to predict")
    parser.add_argument("--name", default="blind", help="folder under benchmarks/results")
    options = parser.parse_args()
    file = RESULTS / options.name / "prediction.json"
    if options.what == "judge":
        samples = compared(json.loads(file.read_text()), options.results)
        if not any(sample["step_s"] and sample["measured_s"] for sample in samples):
            parser.error(f"{options.results} has none of the configurations that {file} predicts")
        write_summary(options.name, figures(samples), samples)
    elif file.exists():
        parser.error(f"{file} holds a prediction; judge it, or give another --name")
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(prediction(options.results, options.gpus), indent=1) + "\n")


def prediction(results: str, gpus: int) -> dict[str, Any]:
    """Return what the command `predict` says about each series, and when. Fields: those in which series differ."""
    command = [sys.executable, "-m", "study.scaling", "predict", results, "--gpus", str(gpus), "--json"]
    said = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    fields = [series["fields"] for series in said["series"]]
    varied = [name for name in fields[0] if len({json.dumps(of[name]) for of in fields}) > 1]
    rows = [
        {"fields": {name: fields[row["series"]][name] for name in varied}} | {name: row.get(name) for name in PREDICTED}
        for row in said["predictions"]
    ]
    return {"written_at": datetime.now(UTC).isoformat(timespec="seconds"), "gpus": gpus, "series": rows}


def compared(predicted: dict[str, Any], results: str) -> list[dict[str, Any]]:
    """Return each predicted series with the measured steps, the geometric mean over repeats."""
    read = load_reduced(results)
    measured = summaries(read.trials, read.windows)
    samples = []
    for series in predicted["series"]:
        alike = measured
        for name, value in series["fields"].items():
            alike = alike[alike[name] == value]
        found = {size: _step_s(alike[alike["world_size"] == size]) for size in (1, predicted["gpus"])}
        samples.append(series | {"alone_s": found[1], "measured_s": found[predicted["gpus"]]})
    return samples


def _step_s(rows: pd.DataFrame) -> float | None:
    values = [float(value) for value in rows["step_s"].dropna()]
    return statistics.geometric_mean(values) if values else None


def figures(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the error of each series, their mean next to the naive one, and how many intervals hold."""
    result, errors, naive, held = [], [], [], []
    for sample in samples:
        name = ", ".join(f"{field} {value}" for field, value in sample["fields"].items())
        if not sample["measured_s"]:
            continue
        if not sample["step_s"]:
            result.append(figure(f"{name}: not predicted, {sample['caveat']}", math.nan, None, "", "none", None))
            continue
        errors.append(sample["step_s"] / sample["measured_s"] - 1)
        naive.append(abs(sample["alone_s"] / sample["measured_s"] - 1))
        bounds = sample["step_s_low"], sample["step_s_high"]
        if None not in bounds:
            held.append(bounds[0] <= sample["measured_s"] <= bounds[1])
        interval = tuple(bound / sample["measured_s"] - 1 for bound in bounds) if None not in bounds else None
        result.append(figure(f"{name}: error of the step", errors[-1], interval, "", "none", None))
    mean = statistics.fmean(map(abs, errors))
    goal = f"<= {MEAN_GOAL}"
    result.append(figure(f"mean absolute error, {len(errors)} series", mean, None, "", goal, mean <= MEAN_GOAL))
    result.append(figure("mean absolute error of the naive estimate", statistics.fmean(naive), None, "", "none", None))
    if held:
        share = statistics.fmean(held)
        goal = f">= {COVERAGE_GOAL}"
        result.append(figure(f"intervals that hold, of {len(held)}", share, None, "", goal, share >= COVERAGE_GOAL))
    return result


if __name__ == "__main__":
    main()
