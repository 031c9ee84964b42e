"""How many steps do windows that stop early save, and how often do their intervals contain the true value?

    python -m benchmarks.truth.stopping                 # the recorded steps under benchmarks/results
    python -m benchmarks.truth.stopping --of results/default --width 0.02

Recorded: step times of phases windows in results folders, without the first step, which starts on an idle device. The
cost of that start to a plain window is reported separately: the duration of the window in median steps, minus its
number of steps. Blocks do not pay it, because an untimed step precedes them. A long series is drawn from each window by
a moving-block bootstrap (Künsch 1989), which preserves the dependence between neighbours. Its true step time is the
mean of the recorded steps.

Generated: log-normal step times of known median and first-order autocorrelation.

Each series is replayed by the product's rule (`trainables.measure.stopping`), by the rule without its corrections, and
by fixed counts. Reported: the share of steps that the rule runs, including those before blocks; the coverage of the
interval at which it stops (goal: at least 0.95); and its error relative to a fixed count with the same average number
of steps (goal: at most 1.1).
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from analysis.read.results import load
from benchmarks.harness.common import RESULTS, figure, write_summary
from trainables.measure.stopping import CHECKS, MAX_BLOCKS, block_lengths, blocks_between_checks, relative_width

Series = NDArray[np.float64]
COVERAGE_GOAL = 0.95
ERROR_GOAL = 1.1
QUANTILES = {seen: float(stats.t.ppf(0.975, seen - 1)) for seen in range(2, MAX_BLOCKS + 1)}
OFTEN = 0.25
"""Windows that stop early in at least this share of replays count as stopping early."""

PIECE = 5
"""Length of the pieces of the bootstrap, in recorded steps."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--of", default=f"{RESULTS / 'default-1gpu'},{RESULTS / 'default-4gpu'}", help="results folders"
    )
    parser.add_argument("--width", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=200, help="maximum steps per window")
    parser.add_argument(
        "--series", type=int, default=1000, help="replays of each generated case; a recorded window has a fifth"
    )
    parser.add_argument("--small", action="store_true", help="fewer replays, in seconds")
    parser.add_argument("--name", default="stopping", help="folder under benchmarks/results")
    options = parser.parse_args()
    series = 200 if options.small else options.series
    rng = np.random.default_rng(0)
    samples = []
    for autocorrelation in (0.0, 0.5, 0.9):
        for spread in (0.003, 0.01, 0.03):
            drawn = generated(rng, series, options.steps, autocorrelation, spread)
            what = {"kind": "generated", "autocorrelation": autocorrelation, "spread": spread}
            samples.append(what | replayed(drawn, np.zeros(series), options.width))
    series = max(50, series // 5)
    for name, logs, start_steps in recorded([Path(folder) for folder in options.of.split(",")]):
        true = np.full(series, math.log(float(np.exp(logs).mean())))
        drawn = resampled(rng, logs, series, options.steps)
        alike = float(np.corrcoef(logs[:-1], logs[1:])[0, 1])
        own = {"window": name, "start_steps": start_steps, "autocorrelation": alike}
        samples.append({"kind": "recorded"} | own | replayed(drawn, true, options.width))
    write_summary(options.name, figures(samples), samples)


def generated(rng: np.random.Generator, series: int, steps: int, autocorrelation: float, spread: float) -> Series:
    """Return logarithms of step times [series, steps]: normal with mean 0, standard deviation `spread`, and AR(1)."""
    noise = rng.standard_normal((series, steps))
    logs = np.empty_like(noise)
    logs[:, 0] = noise[:, 0]
    for step in range(1, steps):
        logs[:, step] = autocorrelation * logs[:, step - 1] + math.sqrt(1 - autocorrelation**2) * noise[:, step]
    return spread * logs


def resampled(rng: np.random.Generator, logs: Series, series: int, steps: int) -> Series:
    """Return series [series, steps] made of pieces of the recorded one, which is treated as circular."""
    pieces = math.ceil(steps / PIECE)
    starts = rng.integers(len(logs), size=(series, pieces, 1))
    return logs[(starts + np.arange(PIECE)) % len(logs)].reshape(series, -1)[:, :steps]


def recorded(folders: list[Path]) -> Iterator[tuple[str, Series, float]]:
    """Yield, for the first rank of each done trial: name, logarithms of step times, and start cost in steps.

    Step times are those of the phases window from the second step on. The start cost is the duration of the plain
    window in median steps, minus its number of steps.
    """
    for folder in folders:
        results = load(folder)
        of_first_rank = results.steps[results.steps["rank"] == 0]
        for trial_id in results.trials.loc[results.trials["status"] == "done", "trial_id"]:
            steps = of_first_rank[of_first_rank["trial_id"] == trial_id]
            phases, plain = (steps[steps["window"] == name] for name in ("phases", "plain"))
            if len(phases) >= 4 * PIECE:
                logs = np.log(phases["step_s"].to_numpy(dtype=float))[1:]
                start_steps = float(plain["window_s"].iloc[0] / np.exp(np.median(logs))) - len(plain)
                yield f"{folder.name}/{trial_id}", logs, start_steps


def replayed(logs: Series, true: Series, width: float) -> dict[str, Any]:
    """Return the results of the rule and of its alternatives on series of logarithms.

    true: logarithm of the true step time of each series.
    """
    lengths = block_lengths(0, logs.shape[1])
    ends = np.cumsum(lengths)
    means = np.stack([np.exp(part).mean(axis=1) for part in np.split(logs, ends[:-1], axis=1)], axis=1)
    stopped = [_stop(row, width) for row in means.tolist()]
    steps = np.array([ends[seen - 1] for seen, _ in stopped])
    runs = np.cumsum([len(run) for run in blocks_between_checks(lengths)])
    lead_in_steps = np.array([1 + np.searchsorted(runs, seen) for seen, _ in stopped])
    centres = np.array([np.log(row[:seen]).mean() for row, (seen, _) in zip(means, stopped, strict=True)])
    halves = np.array([half for _, half in stopped])
    eager = [_uncorrected(row, width) for row in means]
    fixed_blocks = max(2, int(np.searchsorted(ends, steps.mean())) + 1)
    fixed = np.log(means[:, :fixed_blocks]).mean(axis=1)
    error, fixed_error = (float(np.sqrt(np.mean((found - true) ** 2))) for found in (centres, fixed))
    return {
        "steps_share": float((steps + lead_in_steps).mean() / ends[-1]),
        "stopped_early": float(np.mean(steps < ends[-1])),
        "coverage": float(np.mean(np.abs(centres - true) <= halves)),
        "coverage_uncorrected": float(
            np.mean([abs(centre - real) <= half for (centre, half), real in zip(eager, true, strict=True)])
        ),
        "error": error,
        "fixed_steps": int(ends[fixed_blocks - 1]),
        "fixed_error": fixed_error,
        "full_error": float(np.sqrt(np.mean((np.log(means).mean(axis=1) - true) ** 2))),
    }


def _stop(step_s: list[float], width: float) -> tuple[int, float]:
    """Return the number of blocks that the product's rule runs, and the half width of its interval, in logarithms."""
    seen = next((n for n in CHECKS if n <= len(step_s) and relative_width(step_s[:n]) <= width), len(step_s))
    return seen, math.asinh(relative_width(step_s[:seen]) / 2)


def _uncorrected(step_s: Series, width: float) -> tuple[float, float]:
    """Return centre and half width if a plain 95 % interval is checked after every block from the fifth on."""
    logs = np.log(step_s)
    for seen in range(CHECKS[0], len(logs) + 1):
        half = QUANTILES[seen] * logs[:seen].std(ddof=1) / math.sqrt(seen)
        if 2 * math.sinh(half) <= width:
            break
    return float(logs[:seen].mean()), float(half)


def _coverage(name: str, coverage: float) -> dict[str, Any]:
    return figure(name, coverage, None, "", f">= {COVERAGE_GOAL}", coverage >= COVERAGE_GOAL)


def figures(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return figures for each generated case, and for all recorded windows together."""
    found = []
    for sample in samples:
        if sample["kind"] == "generated":
            name = f"generated, autocorrelation {sample['autocorrelation']}, spread {sample['spread']}"
            found.append(figure(f"steps run, {name}", sample["steps_share"], None, "of the most", "none", None))
            found.append(_coverage(f"coverage where it stops, {name}", sample["coverage"]))
            found.append(
                figure(f"the same, uncorrected, {name}", sample["coverage_uncorrected"], None, "", "none", None)
            )
    real = [sample for sample in samples if sample["kind"] == "recorded"]
    if real:
        name = f"{len(real)} recorded windows"
        mean = {key: float(np.mean([s[key] for s in real])) for key in ("steps_share", "coverage", "stopped_early")}
        ratio = float(np.exp(np.mean([math.log(s["error"] / s["fixed_error"]) for s in real])))
        found.append(
            figure(f"steps run, {name}", mean["steps_share"], None, "of the most", "< 1", mean["steps_share"] < 1)
        )
        found.append(figure(f"windows that stop early, {name}", mean["stopped_early"], None, "share", "none", None))
        found.append(_coverage(f"coverage, {name}", mean["coverage"]))
        early = [sample for sample in real if sample["stopped_early"] >= OFTEN]
        if early:
            what = f"the {len(early)} of these that stop early in {OFTEN:.0%} of their replays or more"
            found.append(_coverage(f"coverage, {what}", float(np.mean([sample["coverage"] for sample in early]))))
            start = float(np.mean([sample["start_steps"] for sample in early]))
            found.append(figure(f"what the start of a span costs, {what}", start, None, "steps", "none", None))
        alike = float(np.median([sample["autocorrelation"] for sample in real]))
        found.append(figure(f"autocorrelation of steps, median of {name}", alike, None, "", "none", None))
        name = f"error / that of a fixed count with as many steps, {name}"
        found.append(figure(name, ratio, None, "ratio of root mean squares", f"<= {ERROR_GOAL}", ratio <= ERROR_GOAL))
    return found


if __name__ == "__main__":
    main()
