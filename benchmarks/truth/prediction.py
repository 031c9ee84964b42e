"""How accurate are predictions? Predict 4 GPUs from 1 and 2, for every series of results that contains all three.

    python -m benchmarks.truth.prediction --from benchmarks/results/{account,captured,account-first,default-4gpu}

Each series, with its all-reduce sweeps, is cut to 1 and 2 GPUs. A law is chosen and fitted as `predict` does, and
evaluated at 4. The naive estimate is the throughput of one GPU x 4. Goals: mean absolute error at most 3 % and no error
above 8 %, on 12 series or more; if efficiency on 4 GPUs is below 0.9, at most half the naive error.

The law of the communication breakdown, bucket by bucket, was designed after results/account and results/captured had
been measured. It was then validated on results/account-first, from another host. results/default-4gpu is older than all
laws. If a step is host-bound on 1 or 2 GPUs, other work on the host's cores changes it by more than these goals. The
figures are therefore repeated without such series, which are known before 4 GPUs are predicted.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.predict.model import models_of, pooled_spread, predict
from analysis.predict.series import ScalingSeries, series_of
from analysis.read.results import load
from analysis.study import Analysis, analyses
from benchmarks.harness.common import figure, write_summary

SEEN, ASKED = [1, 2], 4
MEAN_GOAL, WORST_GOAL, NAIVE_RATIO_GOAL, SERIES_GOAL = 0.03, 0.08, 0.5, 12
LOW_EFFICIENCY = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="folders", nargs="+", required=True, metavar="DIR", help="results folders")
    parser.add_argument("--name", default="prediction", help="folder under benchmarks/results")
    options = parser.parse_args()
    samples, environments = [], {}
    for folder in options.folders:
        found = list(predicted(folder))
        samples += [sample for sample, _ in found]
        environments[Path(folder).name] = found[0][1] if found else {}
    if not samples:
        parser.error("no series of these folders was measured on 1, 2 and 4 GPUs")
    write_summary(options.name, figures(samples), samples, environments)


def predicted(folder: str) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """Yield each series of a folder with its prediction for 4 GPUs, and the environment of its measurement."""
    for analysis in analyses(load(folder)):
        whole = [series for series in series_of(analysis) if {*SEEN, ASKED} <= {*series.sizes}]
        for model in models_of([series.only(SEEN) for series in whole], pooled_spread(analysis)):
            row = predict(model, [ASKED]).iloc[0]
            series = whole[model.number]
            seen = series.only(SEEN).points["configuration"]
            host_bound = any(value is True for value in analysis.configurations["host_bound"].loc[seen])
            sample = _sample(Path(folder).name, series, model.law, dict(row.items()), analysis)
            yield sample | {"host_bound": host_bound}, analysis.environment


def _sample(folder: str, series: ScalingSeries, law: str, row: Mapping[Any, Any], analysis: Analysis) -> dict[str, Any]:
    by_size = series.points.set_index("world_size")
    step_s = by_size["step_s"]
    alone = float(step_s[1] * by_size["batch_per_gpu"][ASKED] / by_size["batch_per_gpu"][1])
    measured = float(step_s[ASKED])
    names = [name for name in analysis.axes if name in series.fields and name not in analysis.fields.timing]
    variance = float(by_size["variance"].mean())
    return {
        "folder": folder,
        "scaling": series.scaling,
        "fields": {name: _plain(series.fields[name]) for name in names},
        "repeats": int(by_size["n"][ASKED]),
        "law": law,
        "step_s": {str(size): float(step_s[size]) for size in (*SEEN, ASKED)},
        "predicted_step_s": float(row["step_s"]),
        "interval_s": [float(row["step_s_low"]), float(row["step_s_high"])] if np.isfinite(row["step_s_low"]) else None,
        "error": float(row["step_s"]) / measured - 1,
        "naive_error": alone / measured - 1,
        "efficiency": alone / measured,
        "spread_of_a_run": float(np.sqrt(variance)) if np.isfinite(variance) else None,
    }


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def figures(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return figures of all series, of those that are not host-bound, and of those with the default interconnect."""
    found = []
    kinds = {
        "": samples,
        " (not host-bound on 1 and 2)": [s for s in samples if not s["host_bound"]],
        " (interconnect auto)": [s for s in samples if _interconnect(s) == "auto"],
    }
    for label, chosen in kinds.items():
        if not chosen or (label and len(chosen) == len(samples)):
            continue
        errors = [abs(sample["error"]) for sample in chosen]
        low = [sample for sample in chosen if sample["efficiency"] < LOW_EFFICIENCY]
        mean, worst, count = float(np.mean(errors)), float(np.max(errors)), len(chosen)
        found += [
            figure(f"series{label}", count, None, "count", f">= {SERIES_GOAL}", count >= SERIES_GOAL),
            figure(
                f"mean absolute error{label}", mean, None, "share of the step", f"<= {MEAN_GOAL}", mean <= MEAN_GOAL
            ),
            figure(f"largest error{label}", worst, None, "share of the step", f"<= {WORST_GOAL}", worst <= WORST_GOAL),
        ]
        if low:
            ratio = sum(abs(s["error"]) for s in low) / sum(abs(s["naive_error"]) for s in low)
            what = f"error / naive error where efficiency < {LOW_EFFICIENCY}{label}, {len(low)} series"
            found.append(figure(what, ratio, None, "ratio", f"<= {NAIVE_RATIO_GOAL}", ratio <= NAIVE_RATIO_GOAL))
        with_interval = [s for s in chosen if s["interval_s"]]
        if with_interval:
            held = np.mean([s["interval_s"][0] <= s["step_s"][str(ASKED)] <= s["interval_s"][1] for s in with_interval])
            what = f"share of measured steps in their 95 % prediction interval{label}, {len(with_interval)} series"
            found.append(figure(what, float(held), None, "share", ">= 0.93", bool(held >= 0.93)))
    return found


def _interconnect(sample: dict[str, Any]) -> str:
    return str(sample["fields"].get("interconnect") or "auto")


if __name__ == "__main__":
    main()
