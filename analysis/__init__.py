"""Data frames in, values out: measures, scaling tables, figures, the report. Imports neither torch nor ray.

import analysis
trials, steps, buckets = analysis.load("results/default")
scaling = analysis.scaling("results/default")
analysis.figure("results/default", "scaling_weak")
"""

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # importing the package costs nothing; `load` brings pandas
    import pandas as pd
    from matplotlib.figure import Figure


class Frames(NamedTuple):
    """A study as tidy data frames; see `load`."""

    trials: "pd.DataFrame"
    steps: "pd.DataFrame"
    buckets: "pd.DataFrame"


def load(directory: str | os.PathLike[str]) -> Frames:
    """Load the results folder `directory`, a path or URI, as three data frames that share the column trial_id.

    trials: one row per trial: its fields, its outcome (status, reason, device_name, hosts, ...), and its measures
    (`measures.summarise`: throughput_samples_per_s, step_s, forward_s, ...), null if it has none.
    steps: one row per rank, window and step; seconds in `*_s`. buckets: one row per gradient bucket of a rank's step.

    Raises results.ResultsError if the folder cannot be read.
    """
    from analysis.measure.measures import MEASURES, summaries
    from analysis.read.results import load as read

    found = read(directory)
    measured = summaries(found.trials, found.windows)[["trial_id", *MEASURES]]
    return Frames(found.trials.merge(measured, on="trial_id", how="left"), found.steps, found.buckets)


def scaling(directory: str | os.PathLike[str]) -> "pd.DataFrame":
    """Return speed-up and efficiency with 95 % intervals, one row per configuration and kind of scaling.

    Columns: scaling (weak, strong or neither), the fields that vary, world_size, reference_world_size, n,
    throughput_samples_per_s, step_s, speed_up, efficiency and plain_efficiency with `_low` and `_high`; see
    `compare.scaling.scaling_rows`. An interval that is not resolved has a positive `_more`: the repeats that it lacks.
    Trials of other environments than the most frequent one are left out.

    Raises results.ResultsError if the folder cannot be read.
    """
    from analysis.predict.inputs import report_inputs
    from analysis.read.results import load_reduced

    first = report_inputs(load_reduced(directory))[0]
    names = [name for name in first.axes if name != "world_size"]
    measured = [
        f"{name}{end}" for name in ("throughput_samples_per_s", "step_s") for end in ("", "_low", "_high", "_more")
    ]
    configured = first.configurations[[*names, *(name for name in measured if name in first.configurations)]]
    rows = first.scaling.join(configured, on="configuration").drop(columns=["configuration", "reference", "series"])
    others = [name for name in rows if name not in ("scaling", *names)]
    return rows[["scaling", *names, *others]]


def figure(directory: str | os.PathLike[str], name: str) -> "Figure | None":
    """Draw a figure of the report, such as "scaling_weak"; None if the study has no data for it.

    Raises ValueError that lists all names if there is none like it, and results.ResultsError if the folder cannot be
    read.
    """
    import matplotlib.pyplot as plt

    from analysis.predict.inputs import report_inputs
    from analysis.read.results import load_reduced
    from analysis.report.sections import PLOTS

    if name not in PLOTS:
        raise ValueError(f"figure must be one of {', '.join(sorted(PLOTS))}, got {name!r}")
    drawn = PLOTS[name](report_inputs(load_reduced(directory))[0])
    if drawn is not None:
        plt.close(drawn)  # pyplot would keep every figure, and a notebook would show it twice
    return drawn
