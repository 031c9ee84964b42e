"""From steps to losses: a row for each step of a trial, over its ranks."""

import numpy as np
import pandas as pd

LOSS_COLUMNS = ("trial_id", "window", "step", "loss", "unfinite_losses", "loss_scale")

_KEYS = ["trial_id", "window", "step"]


def step_losses(steps: pd.DataFrame) -> pd.DataFrame:
    """A row for each step of the warm-up, plain and phases windows, with `LOSS_COLUMNS`, in the order of steps.

    steps: in the layout of steps.parquet; a column that it lacks counts as null. loss: mean over the ranks, null where
    one's is (a loss that is not finite is kept as null). unfinite_losses: ranks without one. loss_scale: the scale after
    the step, which all ranks share; null without loss scaling.
    """
    steps = steps.assign(**{name: np.nan for name in ("loss", "loss_scale") if name not in steps})
    noted = steps.loc[steps["window"].isin(["warmup", "plain", "phases"]), [*_KEYS, "loss", "loss_scale"]]
    grouped = noted.groupby(_KEYS, sort=False, observed=True)
    size, count = grouped.size(), grouped["loss"].count()
    result = pd.DataFrame(
        {
            "loss": grouped["loss"].mean().where(count == size),
            "unfinite_losses": size - count,
            "loss_scale": grouped["loss_scale"].max(),
        }
    ).reset_index()
    result = result.astype({"trial_id": "str", "window": "str"})[list(LOSS_COLUMNS)]
    return result.sort_values(["trial_id", "step"], kind="stable", ignore_index=True)
