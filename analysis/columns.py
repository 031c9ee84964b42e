"""What tables share: units, names of phases and ranks, and columns for the fields that vary and the number of repeats."""

import pandas as pd

from analysis.fields import Fields
from analysis.formatting import field_label
from analysis.study import Analysis, study_ranks
from analysis.table import Column

GIB, MIB = 2**30, 2**20
GB = 1e9

PHASE_LABELS = {
    "load_wait_s": "load wait",
    "host_to_device_s": "host to device",
    "scatter_s": "scatter",
    "replicate_s": "replicate",
    "forward_s": "forward",
    "gather_s": "gather",
    "loss_s": "loss",
    "backward_s": "backward",
    "reduce_s": "reduce",
    "graph_s": "CUDA graph",
    "optimizer_s": "optimizer",
}

N_COLUMN = Column("n", "n", "repeats: separate runs of the same configuration; one repeat has no interval.", decimals=0)


def axis_columns(
    analysis: Analysis, last: tuple[str, ...] = ("world_size",), without: tuple[str, ...] = ()
) -> list[Column]:
    """A column for each field that varies, those in `last` at the end; the number of ranks always."""
    ranks = study_ranks(analysis)
    first = [name for name in analysis.axes if name not in (*last, *without)]
    return [
        Column(name, field_label(name, ranks), decimals=_exact(analysis.configurations, name))
        for name in (*first, *last)
    ]


def characters_per_s(found: pd.DataFrame, fields: Fields) -> pd.Series:
    """Bytes of text that all ranks take a second, of models that read bytes; NaN for others. found: see `configurations`."""
    if not {"model", "sequence_length"} <= {*found.columns}:
        return pd.Series(float("nan"), index=found.index)
    of_text = found["model"].isin(fields.text_models)
    return (found["throughput_samples_per_s"] * found["sequence_length"].astype(float)).where(of_text)


def _exact(frame: pd.DataFrame, name: str) -> int | None:
    return 0 if name in frame and pd.api.types.is_integer_dtype(frame[name]) else None


def blocks(axes: list[Column]) -> tuple[str, ...]:
    """A new block of rows wherever anything but the number of ranks changes."""
    return tuple(column.name for column in axes if column.name != "world_size")
