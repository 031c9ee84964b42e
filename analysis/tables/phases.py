"""The table of phases of a step."""

from dataclasses import replace

import pandas as pd

from analysis.load.schema import PHASES
from analysis.study import Analysis
from analysis.tables.table import Column, Table, axis_columns, blocks
from analysis.text import PHASE_LABELS, decimals_for


def phases(analysis: Analysis) -> Table:
    """Where the time of a step goes."""
    found = analysis.configurations
    step_s = found["phases_step_s"].astype(float)
    frame = found.assign(**{f"{name}_share": found[name].astype(float) / step_s for name in PHASES})
    account = analysis.communication.exposed.reindex(found.index)
    frame = frame.assign(**{name: account[name].astype(float) for name in ("hidden_s", "exposed_s", "wait_s")})
    frame["epoch_s"] = pd.Series(analysis.epoch_s, dtype=float)
    frame["epoch_without_loading_s"] = frame["epoch_s"] * (1 - frame["load_wait_s_share"].fillna(0.0))
    meanings = {
        "load_wait_s": "the step waits for its batch.",
        "host_to_device_s": "copy of the batch to the device.",
        "scatter_s": "the batch is dealt out to the devices of one process.",
        "replicate_s": "the model is copied to each of these devices.",
        "gather_s": "outputs of these devices are brought to the first.",
        "reduce_s": "gradients are reduced, with nothing beside it.",
        "graph_s": "the whole step after the copy, replayed as one CUDA graph.",
        "forward_s": "forward pass." if found["loss_s"].notna().any() else "forward pass and loss.",
        "loss_s": "loss function.",
        "backward_s": "backward pass, with DDP's all-reduce that overlaps it and the wait for slower ranks.",
        "optimizer_s": "update of the weights.",
    }
    parts = [
        Column(name, f"{label} (ms)", meanings[name], 1e3, share=f"{name}_share", optional=True)
        for name, label in PHASE_LABELS.items()
    ]
    decimals = decimals_for(frame["phases_step_s"].astype(float) * 1e3, digits=4)
    axes = axis_columns(analysis)
    return Table(
        "Phases of a step",
        (
            *axes,
            Column("phases_step_s", "step (ms)", "the step in this window, which carries instruments.", 1e3, decimals),
            *(replace(column, decimals=decimals) for column in parts),
            Column("hidden_s", "hidden (ms)", "all-reduces beside the backward pass, from the account of the all-reduces.", 1e3, decimals, optional=True),
            Column("exposed_s", "exposed (ms)", "all-reduces after the last local gradient, same account.", 1e3, decimals, optional=True),
            Column("wait_s", "wait (ms)", "the part of both that waits for later ranks.", 1e3, decimals, optional=True),
            Column("epoch_s", "epoch (s)", "one pass over the data, at the throughput without instruments.", decimals=2, optional=True),
            Column("epoch_without_loading_s", "without loading (s)", "the same, less the share of a step that waits for its batch.", decimals=2, optional=True),
            Column("step_launch_s", "host (ms)", "what the host needs to issue the step onto an idle GPU; it runs beside the rest.", 1e3, decimals, optional=True),
            Column(
                "instruments_ratio",
                "instruments",
                "wall time a step with instruments / without; 1.01 means that they cost 1 %.",
                decimals=3,
            ),
        ),
        frame,
        "Median over the steps of a rank, mean over ranks, median over repeats; in brackets the share of the step. In each "
        "single step the parts with a share add up to it; their medians do so only nearly, the less so the more steps differ. The "
        "columns after them are measured in windows of their own.",
        blocks=blocks(axes),
        empty="No trial is done yet.",
    )  # fmt: skip
