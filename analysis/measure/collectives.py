"""Reduce traced collectives to transfer, wait, hidden and exposed time per operation."""

import pandas as pd

_STEP = ["trial_id", "window", "step"]

MATCHED = [*_STEP, "operation", "group", "bytes", "collective"]
"""Columns that identify a collective on all its ranks."""

SECONDS = ["duration_s", "transfer_s", "wait_s", "hidden_s", "exposed_s", "exposed_transfer_s", "exposed_wait_s"]

COLUMNS = ["calls", "bytes", *SECONDS]


def matched(collectives: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `collectives` with `SECONDS`. The argument has the layout of collectives.parquet.

    A collective ends on all ranks when the last one has arrived and the data are transferred, so it first waits and
    then transfers. duration_s: end - start. transfer_s: the shortest duration of any rank, that of the last to arrive.
    wait_s: the excess on this rank. exposed_s: duration without hidden_s. exposed_transfer_s: the last part of it, at
    most the transfer. exposed_wait_s: the rest.
    """
    rows = collectives.copy()
    rows["duration_s"] = rows["end_s"] - rows["start_s"]
    rows["transfer_s"] = rows.groupby(MATCHED, dropna=False)["duration_s"].transform("min")
    rows["wait_s"] = rows["duration_s"] - rows["transfer_s"]
    rows["exposed_s"] = (rows["duration_s"] - rows["hidden_s"]).clip(lower=0.0)
    rows["exposed_transfer_s"] = rows[["exposed_s", "transfer_s"]].min(axis=1)
    rows["exposed_wait_s"] = rows["exposed_s"] - rows["exposed_transfer_s"]
    return rows


def by_operation(collectives: pd.DataFrame) -> pd.DataFrame:
    """Return `COLUMNS` per trial and operation, as sums per step: a frame with the index (trial_id, operation).

    collectives: in the layout of collectives.parquet. Median over the steps of a rank, then mean over ranks. A step
    without the operation counts as 0. `bytes` is null if the size of any call is unknown.
    """
    if collectives.empty:
        index = pd.MultiIndex.from_arrays([[], []], names=["trial_id", "operation"])
        return pd.DataFrame(columns=COLUMNS, index=index, dtype=float)
    rows = matched(collectives)
    keys = ["trial_id", "rank", "operation"]
    per_step = rows.groupby([*keys, "step"])[SECONDS].sum()
    grouped = rows.groupby([*keys, "step"])
    per_step["calls"] = grouped.size()
    per_step["bytes"] = grouped["bytes"].sum(min_count=1).where(grouped["bytes"].count() == per_step["calls"])
    steps = rows.groupby(["trial_id", "rank"])["step"].unique()
    complete = [
        (trial, rank, name, step) for trial, rank, name in _combinations(rows, keys) for step in steps[trial, rank]
    ]
    per_step = per_step.reindex(pd.MultiIndex.from_tuples(complete, names=per_step.index.names))
    counted = [*SECONDS, "calls"]
    per_step[counted] = per_step[counted].fillna(0.0)
    return per_step.groupby(level=keys).median().groupby(level=["trial_id", "operation"]).mean()[COLUMNS]


def _combinations(rows: pd.DataFrame, keys: list[str]) -> list[tuple[str, int, str]]:
    return list(rows[keys].drop_duplicates().itertuples(index=False, name=None))
