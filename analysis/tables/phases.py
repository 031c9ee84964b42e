"""The table of the phases of a step."""

from dataclasses import replace

import pandas as pd

from analysis.read.own_code import COMMAND_COLUMN
from analysis.read.schema import PHASES
from analysis.study import Analysis
from analysis.tables.table import Column, Table, axis_columns, blocks
from analysis.text import PHASE_LABELS, decimals_for


def phases(analysis: Analysis) -> Table:
    """Tabulate the time of each phase of a step."""
    configurations = analysis.configurations
    step_s = configurations["phases_step_s"].astype(float)
    frame = configurations.assign(**{f"{name}_share": configurations[name].astype(float) / step_s for name in PHASES})
    breakdown = analysis.communication.exposed.reindex(configurations.index)
    frame = frame.assign(**{name: breakdown[name].astype(float) for name in ("hidden_s", "exposed_s", "wait_s")})
    frame["epoch_s"] = pd.Series(analysis.epoch_s, dtype=float)
    loading = (configurations["longest_load_wait_s"].astype(float) / step_s).fillna(0.0)
    frame["epoch_without_loading_s"] = frame["epoch_s"] * (1 - loading)
    of_loss = "" if configurations["loss_s"].notna().any() else " and loss"
    meanings = {
        "load_wait_s": "a rank's own wait for the next batch, mean over ranks. The bound of a step counts the longest.",
        "host_to_device_s": "copy of the batch to the device.",
        "scatter_s": "distribution of the batch to the devices of one process.",
        "replicate_s": "copy of the model to each of these devices.",
        "gather_s": "collection of their outputs on the first device.",
        "reduce_s": "reduction of gradients, not overlapped.",
        "graph_s": "the complete step after the copy, replayed as one CUDA graph.",
        "forward_s": f"forward pass{of_loss}, including the wait for slower ranks in its collectives.",
        "loss_s": "loss function.",
        "backward_s": "backward pass, including DDP's overlapped all-reduce and the wait for slower ranks.",
        "after_backward_s": "the workload's own function between backward pass and update, such as gradient clipping.",
        "optimizer_s": "update of the weights.",
        "other_s": "what a user's script does outside of these parts.",
    }
    parts = [
        Column(name, f"{label} (ms)", meanings[name], 1e3, share=f"{name}_share")
        for name, label in PHASE_LABELS.items()
    ]
    decimals = decimals_for(frame["phases_step_s"].astype(float) * 1e3, digits=4)
    axes = axis_columns(analysis)
    return Table(
        "Phases of a step",
        (
            *axes,
            Column("phases_step_s", "step (ms)", "step in this window, with instrumentation.", 1e3, decimals),
            *(replace(column, decimals=decimals) for column in parts),
            Column(
                "hidden_s",
                "hidden (ms)",
                "all-reduces overlapped with the backward pass, of the ranks that wait (communication breakdown).",
                1e3,
                decimals,
            ),
            Column(
                "exposed_s",
                "exposed (ms)",
                "all-reduces after the last local gradient, of the same ranks.",
                1e3,
                decimals,
            ),
            Column(
                "wait_s",
                "wait in all-reduces (ms)",
                "the part of both that waits for later ranks.",
                1e3,
                decimals,
            ),
            Column("epoch_s", "epoch (s)", "one pass over the data at the plain throughput.", decimals=2),
            Column(
                "epoch_without_loading_s",
                "without loading (s)",
                "the same, without the share of the longest load wait.",
                decimals=2,
            ),
            Column(
                "step_launch_s",
                "host (ms)",
                "host time to launch the step on an idle GPU; overlaps with the rest.",
                1e3,
                decimals,
            ),
            Column(
                "instruments_ratio",
                "overhead",
                "wall time per step with instrumentation / without; 1.01 is a measurement overhead of 1 %.",
                decimals=3,
            ),
        ),
        frame,
        "Median over the steps of a rank, mean over ranks, median over repeats; share of the step in brackets. The "
        "wait for a batch is the mean over steps, because slow loaders let some steps wait for long and others not at "
        "all. In each step the parts with a share add up to it; their medians do so only nearly, depending on how much "
        "steps vary. The columns after them are measured in separate windows.",
        blocks=blocks(axes),
        empty="No trial is done yet.",
    )


_FACTORY_ONLY = {
    "kernel time of each part": "it needs the parts of a step one by one",
    "energy": "its counter is read around the plain window of the project's own loop",
}
"""What no probe of a user's own loop measures, and why."""

_OTHER_SOURCES = {"tokens per step": "--tokens-per-sample N, or --workload", "samples per step": "--workload"}


def unmeasured(analysis: Analysis) -> Table:
    """Tabulate what could not be measured in a user's own script or train function, and what would measure it."""
    trials = analysis.results.trials
    own = (
        trials[trials[COMMAND_COLUMN].notna() & (trials["status"] == "done")]
        if COMMAND_COLUMN in trials
        else trials[:0]
    )
    reasons: dict[tuple[str, str], int] = {}
    for environment in own["environment"]:
        seen = [(rank.get("probe") or {}).get("nulls") or {} for rank in environment.get("ranks") or ()]
        pairs = {(name, reason) for nulls in seen for name, reason in nulls.items()}
        pairs |= set(_FACTORY_ONLY.items())
        for pair in pairs:
            reasons[pair] = reasons.get(pair, 0) + 1
    rows = [
        {
            "quantity": (label := PHASE_LABELS.get(name, name.replace("_", " "))),
            "reason": reason,
            "trials": count,
            "measured_by": _OTHER_SOURCES.get(label, "--workload"),
        }
        for (name, reason), count in sorted(reasons.items())
    ]
    columns = ["quantity", "reason", "trials", "measured_by"]
    return Table(
        "Not measured in your own code",
        (
            Column("quantity", "quantity", "what is null in these trials."),
            Column("reason", "reason", "why the probe could not measure it."),
            Column("trials", "trials", "number of trials.", decimals=0),
            Column("measured_by", "measured by", "the entry or option that would measure it."),
        ),
        pd.DataFrame(rows, columns=columns),
    )
