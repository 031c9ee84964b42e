"""The acceleration ladder: one change after another, each a rung, and what every rung adds.

study.json lists the rungs in order, `configuration["rungs"] = [{"name": ..., "trial_ids": [...]}, ...]`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.accuracy import by_precision
from analysis.columns import N_COLUMN
from analysis.scaling import Analysis
from analysis.statistics import log_estimates, ratios
from analysis.table import Column, Table

BATCHES = 300
"""Batches whose time a ladder gives, ours as well as the published ones."""

OURS = "this study"


@dataclass(frozen=True)
class PublishedLadder:
    """Seconds of `BATCHES` batches on one GPU of another machine, rung after rung; its rungs have numbers only."""

    batch: int
    seconds: tuple[float, ...]


PUBLISHED = (
    PublishedLadder(256, (336.5, 88.0, 70.1)),
    PublishedLadder(512, (161.0, 81.7, 60.2, 41.6, 38.8, 22.1)),
)
"""Source: published study, another machine; one GPU. Not measured here."""

COLUMNS = [
    "machine", "rung", "samples", "batches_s", "throughput_samples_per_s", "step_ratio", "step_ratio_low", "step_ratio_high",
    "cumulative_ratio", "cumulative_ratio_low", "cumulative_ratio_high", "trained_percent", "trained_percent_low",
    "trained_percent_high", "n", "trial_ids",
]  # fmt: skip


def rungs(study: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Name and trial ids of each rung, in the study's order; empty where it lists none."""
    configuration = study.get("configuration")
    listed = configuration.get("rungs") if isinstance(configuration, dict) else None
    if not isinstance(listed, list):
        return []
    return [
        (str(rung["name"]), [str(trial_id) for trial_id in rung["trial_ids"]])
        for rung in listed
        if isinstance(rung, dict) and isinstance(rung.get("trial_ids"), list) and "name" in rung
    ]


def ladder_rows(analysis: Analysis) -> pd.DataFrame:
    """A row for each rung of this study that has a done trial, then each rung of the published ladders; `COLUMNS`.

    throughput: median of the rung's trials. batches_s: seconds of `BATCHES` batches of one rank = `BATCHES` times the
    median plain step. step_ratio and cumulative_ratio: throughput / that of the rung before that was measured, and of the
    first, without unit, with `_low` and `_high` (see `statistics.ratios`; null where a rung has one repeat). samples: of
    one step on all ranks. trained_percent with `_low` and `_high`: accuracy of trainings in the rung's number format (see
    `accuracy.by_precision`). Without rungs of its own the study has no ladder, and the frame is empty.
    """
    measured = analysis.measured.set_index("trial_id")
    rows = [
        measured.loc[known].assign(rung=name, place=place).reset_index()
        for place, (name, trial_ids) in enumerate(rungs(analysis.results.study))
        if (known := [trial_id for trial_id in trial_ids if trial_id in measured.index])
    ]
    if not rows:
        return pd.DataFrame(columns=COLUMNS)
    trials = pd.concat(rows, ignore_index=True).dropna(subset="throughput_samples_per_s")
    trials["samples"] = trials["throughput_samples_per_s"].astype(float) * trials["step_s"].astype(float)
    estimates = log_estimates(trials, "place", "throughput_samples_per_s")
    grouped = trials.groupby("place")
    frame = pd.DataFrame(
        {
            "machine": OURS,
            "rung": grouped["rung"].first(),
            "samples": grouped["samples"].median(),
            "batches_s": BATCHES * grouped["step_s"].median(),
            "throughput_samples_per_s": estimates["median"],
            "precision": grouped["precision"].first() if "precision" in trials else None,
            "n": estimates["n"],
            "trial_ids": grouped["trial_id"].agg(tuple),
        }
    )
    reached = by_precision(analysis.accuracy)
    for end in ("", "_low", "_high"):
        frame[f"trained_percent{end}"] = 100 * frame["precision"].map(reached[f"top1{end}"]).astype(float)
    before = pd.Series(frame.index, index=frame.index).shift().fillna(frame.index[0]).astype(int)
    for name, reference in (("step", before), ("cumulative", pd.Series(frame.index[0], index=frame.index))):
        ratio = ratios(estimates, estimates.loc[reference].set_axis(estimates.index))
        ratio.loc[reference == frame.index, ["low", "high"]] = float("nan")
        frame[[f"{name}_ratio", f"{name}_ratio_low", f"{name}_ratio_high"]] = ratio[["ratio", "low", "high"]]
    frame.loc[frame.index[0], "step_ratio"] = float("nan")  # nothing is before it
    return pd.concat([frame.reset_index(drop=True), published_rows()], ignore_index=True)[COLUMNS]


def published_rows() -> pd.DataFrame:
    """The published ladders in the columns of `ladder_rows`, without intervals, for none was published."""
    rows: list[dict[str, Any]] = []
    for ladder in PUBLISHED:
        for number, seconds in enumerate(ladder.seconds):
            rows.append(
                {
                    "machine": f"another machine's, batch {ladder.batch}",
                    "rung": f"published rung {number + 1}",
                    "samples": ladder.batch,
                    "batches_s": seconds,
                    "throughput_samples_per_s": BATCHES * ladder.batch / seconds,
                    "step_ratio": ladder.seconds[number - 1] / seconds if number else float("nan"),
                    "cumulative_ratio": ladder.seconds[0] / seconds,
                    "trial_ids": (),
                }
            )
    return pd.DataFrame(rows).reindex(columns=COLUMNS)


def ladder(analysis: Analysis) -> Table:
    """What each rung of the acceleration ladder adds, and all of them together."""
    return Table(
        "Acceleration ladder",
        (
            Column("machine", "machine", "this study's rungs were measured here; another machine's are published numbers, and were not."),
            Column("rung", "rung", "one change after another, in the order of the study."),
            Column("samples", "samples a step", "of all ranks together.", decimals=0),
            Column("batches_s", f"{BATCHES} batches (s)", f"{BATCHES} plain steps, without instruments.", decimals=1),
            Column("throughput_samples_per_s", "throughput (samples/s)", "median of the repeats.", decimals=0),
            Column("step_ratio", "step speed-up", "throughput / that of the rung before [95 % interval, Welch's t on logarithms].", decimals=2, interval=True),
            Column("cumulative_ratio", "cumulative speed-up", "throughput / that of the first rung, same interval.", decimals=2, interval=True),
            Column("trained_percent", "trained to (%)", _trained_note(analysis), decimals=2, interval=True, optional=True),
            N_COLUMN,
        ),
        ladder_rows(analysis),
        "Published rungs: a published study, another machine, one GPU. Its seconds and these stand on different hardware; compare the "
        "speed-ups, not the seconds.",
        blocks=("machine",),
    )  # fmt: skip


def _trained_note(analysis: Analysis) -> str:
    """What the accuracies of the rungs' number formats are."""
    reached = by_precision(analysis.accuracy)
    on = f": {reached['trained'].iloc[0]}" if len(reached) else ""
    return f"held-out accuracy of trainings in the rung's number format{on}, mean of the seeds [95 % interval]."
