"""The acceleration ladder: cumulative changes, one per step of the ladder, and the gain of each."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis.compare.accuracy import Accuracy, by_precision
from analysis.measure.configurations import trial_fields
from analysis.read.study_record import ReferenceLadder, StudyRecord
from analysis.statistics import intervals, log_estimates, ratios_to_reference

BATCHES = 300
"""Number of batches whose time a ladder reports. The study and reference ladders use the same."""

OURS = "this study"

NO_GAIN = "No step gains more than its interval"

COLUMNS = [
    "machine", "step", "against", "samples", "batches_s", "batches_s_more", "throughput_samples_per_s",
    "throughput_samples_per_s_more",
    *(f"{name}{end}" for name in ("step_ratio", "cumulative_ratio") for end in ("", "_low", "_high", "_more")),
    "trained_percent", "trained_percent_low", "trained_percent_high", "n", "trial_ids",
]  # fmt: skip


def is_gain(row: pd.Series, name: str) -> bool:
    """Return False if the interval of a ratio of a row contains no gain. A single repeat has no interval."""
    return not float(row[f"{name}_low"]) <= 1


def ladder_rows(record: StudyRecord, measured: pd.DataFrame, accuracy: Accuracy | None) -> pd.DataFrame:
    """Return `COLUMNS`: one row per ladder step with a done trial, then those of the reference ladders.

    measured: see `measures.summaries`. Empty if the study has no ladder.

    throughput: see `statistics.log_estimates`. batches_s: seconds of `BATCHES` batches on one rank = `BATCHES` times
    the plain step. against: the earlier step from which the step differs in the fewest fields, and of those the last
    one. step_ratio, cumulative_ratio: throughput / that of `against`, and of the first step, with `_low`, `_high` and
    `_more` (see `statistics.ratios`; null for a single repeat). samples: per step of all ranks. trained_percent with
    `_low` and `_high`: accuracy of trainings in the number format of the step, see
    `accuracy.by_precision`.
    """
    measured = measured.set_index("trial_id")
    rows = [
        measured.loc[done_ids].assign(step=name, place=place).reset_index()
        for place, (name, trial_ids) in enumerate(record.ladder_steps)
        if (done_ids := [trial_id for trial_id in trial_ids if trial_id in measured.index])
    ]
    if not rows:
        return pd.DataFrame(columns=COLUMNS)
    trials = pd.concat(rows, ignore_index=True).dropna(subset="throughput_samples_per_s")
    trials["samples"] = trials["throughput_samples_per_s"].astype(float) * trials["step_s"].astype(float)
    estimates = log_estimates(trials, "place", "throughput_samples_per_s", stratum="host_bound")
    step = log_estimates(trials, "place", "step_s", stratum="host_bound")
    grouped = trials.groupby("place")
    frame = pd.DataFrame(
        {
            "machine": OURS,
            "step": grouped["step"].first(),
            "samples": grouped["samples"].median(),
            "batches_s": BATCHES * step["value"],
            "batches_s_more": intervals(step)["more"],
            "throughput_samples_per_s": estimates["value"],
            "throughput_samples_per_s_more": intervals(estimates)["more"],
            "precision": grouped["precision"].first() if "precision" in trials else None,
            "n": estimates["n"],
            "trial_ids": grouped["trial_id"].agg(tuple),
        }
    )
    reached = by_precision(accuracy)
    for end in ("", "_low", "_high"):
        frame[f"trained_percent{end}"] = 100 * frame["precision"].map(reached[f"top1{end}"]).astype(float)
    nearest = _nearest_earlier(trials)
    frame["against"] = nearest.map(frame["step"]).where(nearest != nearest.index, None)
    for name, reference in (("step", nearest), ("cumulative", pd.Series(frame.index[0], index=frame.index))):
        ratio = ratios_to_reference(estimates, reference)
        frame[f"{name}_ratio"] = ratio["ratio"]
        frame[[f"{name}_ratio_{end}" for end in ("low", "high", "more")]] = ratio[["low", "high", "more"]]
    frame.loc[frame.index[0], "step_ratio"] = float("nan")  # the first has no predecessor
    return pd.concat([frame.reset_index(drop=True), reference_rows(record.reference_ladders)], ignore_index=True)[
        COLUMNS
    ]


def _nearest_earlier(trials: pd.DataFrame) -> pd.Series:
    """Return, per place on the ladder, the place of the earlier step from which it differs in the fewest fields.

    Of several, the last one; for the first step, its own place. The step before is another one if it changes something
    that the next step undoes, such as the number format on one GPU.
    """
    names = [name for name in trial_fields(trials) if name not in _NOT_COMPARED]
    fields = trials.drop_duplicates("place").set_index("place")[names].sort_index()
    nearest = {fields.index[0]: fields.index[0]}
    for number, place in enumerate(fields.index[1:], 1):
        earlier = fields.iloc[:number]
        same = (earlier == fields.loc[place]) | (earlier.isna() & fields.loc[place].isna())
        changes = (~same).sum(axis=1)
        nearest[place] = changes[changes == changes.min()].index[-1]
    return pd.Series(nearest)


_NOT_COMPARED = ("repeat", "seed", "step", "place", "samples")


def reference_rows(ladders: Sequence[ReferenceLadder]) -> pd.DataFrame:
    """Return external ladders in the columns of `ladder_rows`, without intervals."""
    rows: list[dict[str, Any]] = []
    for ladder in ladders:
        for number, seconds in enumerate(ladder.batches_s):
            rows.append(
                {
                    "machine": ladder.machine,
                    "step": _published(number),
                    "against": _published(number - 1) if number else None,
                    "samples": ladder.samples,
                    "batches_s": seconds,
                    "throughput_samples_per_s": BATCHES * ladder.samples / seconds,
                    "step_ratio": ladder.batches_s[number - 1] / seconds if number else float("nan"),
                    "cumulative_ratio": ladder.batches_s[0] / seconds,
                    "trial_ids": (),
                }
            )
    return pd.DataFrame(rows).reindex(columns=COLUMNS)


def _published(changes: int) -> str:
    """Return the name of a published step, whose changes are not recorded."""
    return f"after {changes} change{'' if changes == 1 else 's'}" if changes else "start"
