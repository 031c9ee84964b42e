"""Compare the largest batch with the reference batch at one epoch, which the study selects."""

import numpy as np
import pandas as pd

from analysis.compare.accuracy import Accuracy
from analysis.statistics import mean_interval, welch_difference

EPOCH_COLUMNS = [
    "recipe", "global_batch", "made_of", "n", "trial_ids",
    *(f"{name}{end}" for name in ("epoch_loss", "epoch_loss_difference", "epoch_top1", "epoch_top1_difference")
      for end in ("", "_low", "_high")),
]  # fmt: skip


def report_epoch_rows(accuracy: Accuracy, epoch: int) -> pd.DataFrame:
    """Return the plain reference and every cell with the largest batch per rank on most ranks, at one epoch.

    Columns: those of a cell, and epoch_loss and epoch_top1 (means over seeds) with their differences to the plain
    reference, each with `_low` and `_high`. Empty if no training reached the epoch.
    """
    at_epoch = accuracy.epochs[accuracy.epochs["epoch"] == epoch].set_index("trial_id")
    cells = accuracy.cells
    reference = cells[cells["is_reference"] & (cells["recipe"] == accuracy.plain)]
    largest = cells[~cells["is_reference"] & (cells["global_batch"] > cells["reference_batch"])]
    largest = largest[largest["world_size"] == largest["world_size"].max()]
    largest = largest[largest["batch_per_gpu"] == largest["batch_per_gpu"].max()]
    largest = largest[largest["accumulation_steps"] == largest["accumulation_steps"].min()]
    if reference.empty or largest.empty:
        return pd.DataFrame(columns=EPOCH_COLUMNS)
    base = at_epoch.reindex(list(reference["trial_ids"].iloc[0]))
    rows = []
    compared = pd.concat([reference.iloc[:1], largest.sort_values("recipe_number", kind="stable")])
    for i, (_, cell) in enumerate(compared.iterrows()):
        cell_epochs = at_epoch.reindex(list(cell["trial_ids"]))
        row = {name: cell[name] for name in ("recipe", "global_batch", "made_of", "trial_ids")}
        for name, column, limit in (("epoch_loss", "train_loss", np.inf), ("epoch_top1", "train_top1", 1.0)):
            values = cell_epochs[column].dropna()
            row |= {name: values.mean(), "n": len(values)}
            row[f"{name}_low"], row[f"{name}_high"] = mean_interval(values, least=0, most=limit)
            no_difference = (np.nan,) * 3
            difference = welch_difference(values, base[column].dropna(), limit) if i else no_difference
            row |= dict(zip([f"{name}_difference{end}" for end in ("", "_low", "_high")], difference, strict=True))
        rows.append(row)
    frame = pd.DataFrame(rows)
    return frame[frame["n"] > 0].reindex(columns=EPOCH_COLUMNS)
