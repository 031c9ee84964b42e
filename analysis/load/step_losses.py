"""From steps to losses: a row for each step of a trial, over its ranks."""

import numpy as np
import pandas as pd

LOSS_COLUMNS = ("trial_id", "window", "step", "loss", "unfinite_losses", "loss_scale")

_KEYS = ["trial_id", "window", "step"]

_WINDOWS = ["warmup", "plain", "phases"]


def step_losses(steps: pd.DataFrame) -> pd.DataFrame:
    """A row for each step of the warm-up, plain and phases windows, with `LOSS_COLUMNS`, in the order of steps.

    steps: in the layout of steps.parquet; a column that it lacks counts as null. loss: mean over the ranks, null where
    one's is (a loss that is not finite is kept as null). unfinite_losses: ranks without one. loss_scale: the scale after
    the step, which all ranks share; null without loss scaling.
    """
    steps = steps.assign(**{name: np.nan for name in ("loss", "loss_scale") if name not in steps})
    noted = steps.loc[steps["window"].isin(_WINDOWS), [*_KEYS, "loss", "loss_scale"]]
    grouped = noted.groupby(_KEYS, sort=False, observed=True)
    size, count = grouped.size(), grouped["loss"].count()
    result = pd.DataFrame(
        {
            "loss": grouped["loss"].mean().where(count == size),
            "unfinite_losses": size - count,
            "loss_scale": grouped["loss_scale"].max(),
        }
    ).reset_index()
    # Small types: this is the only frame of a report with a row for each step. Loss scales are powers of two, exact in float32.
    result["trial_id"] = result["trial_id"].astype("category").cat.remove_unused_categories()
    result["window"] = result["window"].astype(pd.CategoricalDtype(_WINDOWS))
    result[["step", "unfinite_losses"]] = result[["step", "unfinite_losses"]].astype(np.int32)
    result["loss_scale"] = result["loss_scale"].astype(np.float32)
    return result[list(LOSS_COLUMNS)].sort_values(["trial_id", "step"], kind="stable", ignore_index=True)
