"""Reduce steps to losses: one row per trial and step, over all ranks."""

import numpy as np
import pandas as pd

LOSS_COLUMNS = ("trial_id", "window", "step", "loss", "non_finite_losses", "loss_scale")

_KEYS = ["trial_id", "window", "step"]

_WINDOWS = ["warmup", "plain", "phases"]


def step_losses(steps: pd.DataFrame) -> pd.DataFrame:
    """Return one row per step of the warm-up, plain and phases windows, with `LOSS_COLUMNS`, in step order.

    steps: in the layout of steps.parquet; missing columns count as null.

    Columns of the result: loss is the mean over ranks, null if any rank's is null (non-finite losses are stored as
    null). non_finite_losses counts the ranks whose loss is null. loss_scale is the scale after the step, which all
    ranks share; null without loss scaling.
    """
    steps = steps.assign(**{name: np.nan for name in ("loss", "loss_scale") if name not in steps})
    in_windows = steps.loc[steps["window"].isin(_WINDOWS), [*_KEYS, "loss", "loss_scale"]]
    grouped = in_windows.groupby(_KEYS, sort=False, observed=True)
    size, count = grouped.size(), grouped["loss"].count()
    result = pd.DataFrame(
        {
            "loss": grouped["loss"].mean().where(count == size),
            "non_finite_losses": size - count,
            "loss_scale": grouped["loss_scale"].max(),
        }
    ).reset_index()
    # Small types, because no other frame of a report has one row per step. Loss scales are powers of two, so float32 is
    # exact.
    result["trial_id"] = result["trial_id"].astype("category").cat.remove_unused_categories()
    result["window"] = result["window"].astype(pd.CategoricalDtype(_WINDOWS))
    result[["step", "non_finite_losses"]] = result[["step", "non_finite_losses"]].astype(np.int32)
    result["loss_scale"] = result["loss_scale"].astype(np.float32)
    return result[list(LOSS_COLUMNS)].sort_values(["trial_id", "step"], kind="stable", ignore_index=True)
