"""What a check of the data looks at, and what it finds."""

from dataclasses import dataclass

import pandas as pd

from analysis.measure.measures import configuration_of

FALSE_ALARM = 0.05
"""Chance that a check finds anything in a study without its fault, at most."""

MATTERS = 0.02
"""Part of a step, or of throughput, below which an effect is left unsaid: less than hosts differ by from day to day."""


@dataclass(frozen=True)
class Finding:
    """What a check found: its name, one sentence, the trials concerned, and what to do."""

    name: str
    sentence: str
    trial_ids: tuple[str, ...]
    what_to_do: str


@dataclass(frozen=True)
class Data:
    """What checks look at. trials: a row a done trial: trial_id, configuration (number), started_at (s) and
    throughput_samples_per_s, NaN where unknown. shapes: see `step_shape.step_shapes`. windows: see `windows.windows`."""

    trials: pd.DataFrame
    shapes: pd.DataFrame
    windows: pd.DataFrame


def data(found: pd.DataFrame, measured: pd.DataFrame, shapes: pd.DataFrame, of_windows: pd.DataFrame) -> Data:
    """From the frames of an analysis: `scaling.configurations`, `measures.summaries`, and what was read of the steps."""
    rows = measured.reindex(columns=["trial_id", "started_at", "throughput_samples_per_s"])
    trials = rows.assign(configuration=rows["trial_id"].map(configuration_of(found))).dropna(subset="configuration")
    trials = trials.astype({"configuration": int, "started_at": float, "throughput_samples_per_s": float})
    known = set(trials["trial_id"])
    return Data(trials, shapes[shapes["trial_id"].isin(known)], of_windows[of_windows["trial_id"].isin(known)])


def probability(p: float) -> str:
    """A p-value as people read it."""
    return "0.001 or less" if p <= 0.001 else f"{p:.3f}"
