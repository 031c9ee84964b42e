"""Find trials in which a rank stopped: one step that takes many times as long as the others."""

from collections.abc import Iterator

import pandas as pd

from analysis.checks.finding import CheckData, Finding
from analysis.read.step_shape import WINDOW
from analysis.text import PHASE_LABELS, join, number

SHORTEST_PAUSE_S = 0.5
"""Shorter interruptions are left to the checks of step times."""

TIMES_AS_LONG = 5.0
"""A step with a pause takes at least this many times the median, and twice a time that recurs: slow loaders let some
steps wait for long."""

PLAIN_TIMES_AS_LONG = 1.5
"""A plain window with a pause takes at least this many times its steps in the window with phases."""

MOST_LISTED = 5


PAUSED = "paused_rank"
"""name of a finding after which the numbers of its trials cannot be used"""


def paused_rank(data: CheckData) -> list[Finding]:
    """Name each trial with a pause, its rank and its time.

    This is no significance test: noise does not reach these bounds. A pause of the plain window, whose steps have no
    times of their own, shows against the window with phases.
    """
    found = [*_in_phases(data), *_in_plain(data)]
    if not found:
        return []
    more = f", and {len(found) - MOST_LISTED} more" if len(found) > MOST_LISTED else ""
    trial_ids = tuple(dict.fromkeys(trial_id for trial_id, _ in found))
    sentence = (
        f"In {len(trial_ids)} trial{'' if len(trial_ids) == 1 else 's'} a rank seems to have stopped for a while: "
        f"{join([f'{trial_id}: {text}' for trial_id, text in found[:MOST_LISTED]])}{more}."
    )
    fix = "Do not use these trials. Remove their folders and run them again, without suspended processes on the hosts."
    return [Finding(PAUSED, sentence, trial_ids, fix)]


def _in_phases(data: CheckData) -> Iterator[tuple[str, str]]:
    shapes = data.shapes[data.shapes["trial_id"].isin(data.trials["trial_id"])]
    excess_s = shapes["longest_s"] - shapes["usual_s"]
    for _, row in shapes[
        (excess_s >= SHORTEST_PAUSE_S)
        & (shapes["longest_s"] >= TIMES_AS_LONG * shapes["usual_s"])
        & (shapes["longest_s"] >= 2 * shapes["recurring_s"])
    ].iterrows():
        where = "on an unknown rank, because all waited" if pd.isna(row["longest_rank"]) else _place(row)
        yield (
            str(row["trial_id"]),
            f"step {row['longest_step']}, {number(row['longest_after_s'], 1)} s into the {WINDOW} window, took "
            f"{number(row['longest_s'], 1)} s instead of {number(row['usual_s'], 3)} s {where}",
        )


def _place(row: pd.Series) -> str:
    label = PHASE_LABELS.get(str(row["longest_phase"]))
    return f"on rank {int(row['longest_rank'])}" + (f", in {label}" if label else "")


def _in_plain(data: CheckData) -> Iterator[tuple[str, str]]:
    rows = data.windows[data.windows["trial_id"].isin(data.trials["trial_id"])]
    plain, phases = (rows[rows["window"] == name] for name in ("plain", WINDOW))
    slowest = plain.sort_values("window_s").groupby("trial_id", observed=True).last()
    phases_s = phases.assign(per_step_s=phases["window_s"] / phases["steps"])
    per_step_s = phases_s.groupby("trial_id", observed=True)["per_step_s"].max().reindex(slowest.index)
    expected_s = per_step_s * slowest["steps"]
    is_paused = (slowest["window_s"] - expected_s >= SHORTEST_PAUSE_S) & (
        slowest["window_s"] >= PLAIN_TIMES_AS_LONG * expected_s
    )
    for trial_id in slowest.index[is_paused]:
        yield (
            str(trial_id),
            f"its plain window took {number(slowest.loc[trial_id, 'window_s'], 1)} s instead of "
            f"{number(expected_s[trial_id], 1)} s; its steps have no times of their own, and ranks wait for each other",
        )
