"""One epoch of the trainings, chosen by the study: the largest batch against the reference batch."""

import numpy as np
import pandas as pd

from analysis.compare.accuracy import Accuracy
from analysis.statistics import mean_interval, welch_difference

EPOCH_COLUMNS = [
    "remedy", "global_batch", "made_of", "n", "trial_ids",
    *(f"{name}{end}" for name in ("epoch_loss", "epoch_loss_difference", "epoch_top1", "epoch_top1_difference")
      for end in ("", "_low", "_high")),
]  # fmt: skip


def report_epoch_rows(found: Accuracy, epoch: int) -> pd.DataFrame:
    """The plain reference and every cell with the largest batch per rank on the most ranks, at one epoch.

    Columns: those of a cell, and epoch_loss and epoch_top1 (means over seeds) with their differences to the plain
    reference, each with `_low` and `_high`. Empty if no training reached it.
    """
    at = found.epochs[found.epochs["epoch"] == epoch].set_index("trial_id")
    shown = found.cells
    reference = shown[shown["is_reference"] & (shown["remedy"] == found.plain)]
    above = shown[~shown["is_reference"] & (shown["global_batch"] > shown["reference_batch"])]
    above = above[above["world_size"] == above["world_size"].max()]
    above = above[above["batch_per_gpu"] == above["batch_per_gpu"].max()]
    above = above[above["accumulation_steps"] == above["accumulation_steps"].min()]
    if reference.empty or above.empty:
        return pd.DataFrame(columns=EPOCH_COLUMNS)
    base = at.reindex(list(reference["trial_ids"].iloc[0]))
    rows = []
    for i, cell in (
        pd.concat([reference.iloc[:1], above.sort_values("remedy_number", kind="stable")]).reset_index().iterrows()
    ):
        own = at.reindex(list(cell["trial_ids"]))
        row = {name: cell[name] for name in ("remedy", "global_batch", "made_of", "trial_ids")}
        for name, column, most in (("epoch_loss", "train_loss", np.inf), ("epoch_top1", "train_top1", 1.0)):
            values = own[column].dropna()
            row |= {name: values.mean(), "n": len(values)}
            row[f"{name}_low"], row[f"{name}_high"] = mean_interval(values, least=0, most=most)
            nothing = (np.nan,) * 3
            difference = welch_difference(values, base[column].dropna(), most) if i else nothing
            row |= dict(zip([f"{name}_difference{end}" for end in ("", "_low", "_high")], difference, strict=True))
        rows.append(row)
    frame = pd.DataFrame(rows)
    return frame[frame["n"] > 0].reindex(columns=EPOCH_COLUMNS)
