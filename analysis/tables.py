"""The study's own tables: throughput, scaling, phases of a step, and trials without a result."""

from dataclasses import replace

import pandas as pd

from analysis.columns import GIB, N_COLUMN, PHASE_LABELS, axis_columns, blocks, characters_per_s
from analysis.formatting import decimals_for
from analysis.scaling import STRONG, WEAK
from analysis.schema import PHASES
from analysis.study import Analysis, study_ranks
from analysis.table import Column, Table


def throughput(analysis: Analysis) -> Table:
    """Throughput and step time of every configuration."""
    found = analysis.configurations
    labels = analysis.scaling.groupby("configuration")["scaling"].agg(" + ".join)
    frame = found.assign(
        series=labels.reindex(found.index).astype(object), characters_per_s=characters_per_s(found, analysis.fields)
    )
    axes = axis_columns(analysis)
    return Table(
        "Throughput and step time",
        (
            *axes,
            Column("global_batch", "global batch", "samples that all ranks take in one step.", decimals=0),
            Column(
                "throughput_samples_per_s",
                "throughput (samples/s)",
                "samples of all ranks / wall time of the slowest, in a window without instruments; median of the repeats "
                "[95 % interval].",
                interval=True,
            ),
            Column(
                "characters_per_s",
                "characters/s",
                "samples/s x bytes of a sample, of models that read text as bytes.",
                decimals=0,
                optional=True,
            ),
            Column(
                "step_s", "step time (ms)", "wall time of the slowest rank / steps, same window.", 1e3, interval=True
            ),
            Column(
                "peak_memory_bytes",
                "peak memory (GiB)",
                "largest of all ranks; 1 GiB = 2³⁰ bytes.",
                1 / GIB,
                2,
                optional=True,
            ),
            N_COLUMN,
            Column(
                "series",
                "scaling",
                "weak: the batch per rank was held while ranks were added; strong: the global batch was; neither: nothing "
                "comparable was measured with another number of ranks.",
            ),
        ),
        frame,
        blocks=blocks(axes),
        empty="No trial is done yet.",
    )


def weak_scaling(analysis: Analysis) -> Table:
    """Speed-up and efficiency with the batch per rank held."""
    one = study_ranks(analysis)[0]
    return _scaling_table(
        analysis,
        WEAK,
        f"Weak scaling: batch per {one} held",
        axis_columns(analysis),
        f"No two configurations differ only in the number of {study_ranks(analysis)[1]}.",
    )


def strong_scaling(analysis: Analysis) -> Table:
    """Speed-up and efficiency with the global batch held."""
    columns = axis_columns(analysis, last=("world_size", "batch_per_gpu"))
    return _scaling_table(
        analysis,
        STRONG,
        "Strong scaling: global batch held",
        [Column("global_batch", "global batch", "samples that all ranks take in one step.", decimals=0), *columns],
        f"No two configurations share a global batch on different numbers of {study_ranks(analysis)[1]}.",
    )


def _scaling_table(analysis: Analysis, label: str, title: str, axes: list[Column], empty: str) -> Table:
    rows = analysis.scaling[analysis.scaling["scaling"] == label]
    shown = [column.name for column in axes if column.name != "world_size"]
    found = analysis.configurations
    frame = rows.join(found[[*shown, "throughput_samples_per_s", "trial_ids"]], on="configuration")
    frame["efficiency_percent"] = 100 * frame["efficiency"]
    for end in ("low", "high"):
        frame[f"efficiency_percent_{end}"] = 100 * frame[f"efficiency_{end}"]
    references = sorted(set(frame["reference_world_size"].dropna().astype(int)))
    against = f"N₀ = {', '.join(map(str, references))}" if references else ""
    return Table(
        title,
        (
            *axes,
            Column("throughput_samples_per_s", "throughput (samples/s)", "median of the repeats."),
            Column(
                "speed_up",
                "speed-up",
                f"throughput / throughput of the reference, the smallest number of ranks in its series ({against}) "
                "[95 % interval, Welch's t on logarithms].",
                decimals=2,
                interval=True,
            ),
            Column(
                "ideal", "ideal", "number of ranks / that of the reference.", decimals=_ideal_decimals(frame["ideal"])
            ),
            Column(
                "efficiency_percent",
                "efficiency (%)",
                "speed-up / ideal; the reference is 100 by definition.",
                1,
                1,
                True,
            ),
            N_COLUMN,
        ),
        frame,
        blocks=("series",),
        empty=empty,
    )


def _ideal_decimals(ideal: pd.Series) -> int:
    return 0 if (ideal.dropna() % 1 == 0).all() else 2


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


def failures(analysis: Analysis) -> Table:
    """Every trial without a result, and why."""
    trials = analysis.results.trials
    frame = trials[trials["status"] != "done"].copy()
    order = {name: i for i, name in enumerate(("failed", "timeout", "out_of_memory", "pruned", "infeasible"))}
    frame = frame.sort_values("status", key=lambda s: s.map(order).fillna(len(order)), kind="stable")
    frame["status"] = frame["status"].str.replace("_", " ")
    frame["log"] = [
        f"trials/{row.trial_id}/{row.log}" if isinstance(row.log, str) else None for row in frame.itertuples()
    ]
    return Table(
        "Trials without a result",
        (
            Column("trial_id", "trial", "its folder below trials/ in the results."),
            Column(
                "status",
                "status",
                "failed: an exception, or a rank that died; timeout: no answer for too long; pruned: not tried, for a smaller batch "
                "ran out of memory; infeasible: not tried, for it cannot be run here.",
            ),
            Column("reason", "reason", "the error in one line, or what stood in the way."),
            Column("log", "log", "path in the results folder.", optional=True),
        ),
        frame,
        blocks=("status",),
        empty="Every trial has a result.",
    )
