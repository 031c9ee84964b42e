"""Data frames in, values out: measures, scaling tables, figures, the report. Imports neither torch nor ray.

import analysis
trials, steps, buckets = analysis.load("results/default")
"""

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # importing the package costs nothing; `load` brings pandas
    import pandas as pd


class Frames(NamedTuple):
    """A study as tidy data frames; see `load`."""

    trials: "pd.DataFrame"
    steps: "pd.DataFrame"
    buckets: "pd.DataFrame"


def load(directory: str | os.PathLike[str]) -> Frames:
    """The results folder `directory`, a path or URI, as three data frames that share the column trial_id.

    trials: a row a trial: its fields, how it went (status, reason, device_name, hosts, ...), and its measures
    (`measures.summarise`: throughput_samples_per_s, step_s, forward_s, ...), null where it has none.
    steps: a row a rank, window and step; seconds in `*_s`. buckets: a row a gradient bucket of a rank's step.

    Raises results.ResultsError, one line, where the folder cannot be read.
    """
    from analysis.measure.measures import MEASURES, summaries
    from analysis.read.results import load as read

    found = read(directory)
    measured = summaries(found.trials, found.windows)[["trial_id", *MEASURES]]
    return Frames(found.trials.merge(measured, on="trial_id", how="left"), found.steps, found.buckets)
