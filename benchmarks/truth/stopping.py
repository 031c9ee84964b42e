"""What windows that stop early save, and what their intervals cover: recorded and generated steps, replayed.

    python -m benchmarks.truth.stopping                                     # the recorded steps under benchmarks/results
    python -m benchmarks.truth.stopping --of results/default --width 0.02

Recorded: step times of phases windows in results folders, without the first step of each, which alone begins on an idle
device. What that costs a plain window, which is one span too, is reported for itself: how much longer it took than as many
median steps, in steps; blocks do not pay it, for a step that is not timed comes before them. A long series of steps is
drawn from each window by whole pieces (a moving-block bootstrap: Künsch 1989), so that what depends on its neighbour stays
beside it; its true step time is then the mean of the recorded steps. Generated: lognormal step times of known median and
first-order autocorrelation. Each series is replayed by the product's rule (`trainables.measure.stopping`), by one without its
corrections, and by fixed counts. Reported: the share of steps that the rule runs, with those before blocks, the coverage of
the interval at which it stops (goal at least 0.95), and its error against that of a fixed count with as many steps on
average (equal error: ratio at most 1.1).
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from analysis.load.results import load
from benchmarks.harness.common import RESULTS, figure, write_summary
from trainables.measure.stopping import LOOKS, MOST_BLOCKS, between_looks, block_lengths, relative_width

Series = NDArray[np.float64]
COVERAGE_GOAL = 0.95
ERROR_GOAL = 1.1
QUANTILES = {seen: float(stats.t.ppf(0.975, seen - 1)) for seen in range(2, MOST_BLOCKS + 1)}
OFTEN = 0.25
"""share of its replays from which a window counts as one that stops early"""

PIECE = 5
"""recorded steps that stay together"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--of", default=f"{RESULTS / 'default-1gpu'},{RESULTS / 'default-4gpu'}", help="results folders"
    )
    parser.add_argument("--width", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=200, help="most steps of a window")
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
    """Logarithms of step times [series, steps]: normal, mean 0, this standard deviation, and AR(1)."""
    noise = rng.standard_normal((series, steps))
    logs = np.empty_like(noise)
    logs[:, 0] = noise[:, 0]
    for step in range(1, steps):
        logs[:, step] = autocorrelation * logs[:, step - 1] + math.sqrt(1 - autocorrelation**2) * noise[:, step]
    return spread * logs


def resampled(rng: np.random.Generator, logs: Series, series: int, steps: int) -> Series:
    """Series [series, steps] of pieces of the recorded one, which is taken as a ring."""
    pieces = math.ceil(steps / PIECE)
    begins = rng.integers(len(logs), size=(series, pieces, 1))
    return logs[(begins + np.arange(PIECE)) % len(logs)].reshape(series, -1)[:, :steps]


def recorded(folders: list[Path]) -> Iterator[tuple[str, Series, float]]:
    """Of each done trial's first rank: name, logarithms of the phases window's step times from the second on, and by how many
    of their median the plain window lasted longer than its steps."""
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
    """What the rule makes of series of logarithms, and what others do; `true`: logarithm of each one's true step time."""
    lengths = block_lengths(0, logs.shape[1])
    ends = np.cumsum(lengths)
    means = np.stack([np.exp(part).mean(axis=1) for part in np.split(logs, ends[:-1], axis=1)], axis=1)
    stopped = [_stop(row, width) for row in means.tolist()]
    steps = np.array([ends[seen - 1] for seen, _ in stopped])
    runs = np.cumsum([len(run) for run in between_looks(lengths)])
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
    """Blocks that the product's rule runs, and half the width of the interval then, in logarithms."""
    seen = next((n for n in LOOKS if n <= len(step_s) and relative_width(step_s[:n]) <= width), len(step_s))
    return seen, math.asinh(relative_width(step_s[:seen]) / 2)


def _uncorrected(step_s: Series, width: float) -> tuple[float, float]:
    """Centre and half width where a plain 95 % interval is looked at after every block from the fifth on."""
    logs = np.log(step_s)
    for seen in range(LOOKS[0], len(logs) + 1):
        half = QUANTILES[seen] * logs[:seen].std(ddof=1) / math.sqrt(seen)
        if 2 * math.sinh(half) <= width:
            break
    return float(logs[:seen].mean()), float(half)


def _coverage(name: str, coverage: float) -> dict[str, Any]:
    return figure(name, coverage, None, "", f">= {COVERAGE_GOAL}", coverage >= COVERAGE_GOAL)


def figures(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A few lines for each generated case, and the whole of the recorded ones together."""
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
