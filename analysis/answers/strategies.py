"""Answers of averaging: what other ways to average gradients cost, and what DataParallel gains with more GPUs."""

from collections.abc import Mapping

import pandas as pd

from analysis.answers.reply import Missing, Reply, measured, ms, pairs, size_of, where
from analysis.compare.scaling import STRONG
from analysis.predict.inputs import ReportInputs
from analysis.text import join, number

_Fields = Mapping[str, object]
_WAYS: Mapping[str, tuple[str, _Fields, _Fields]] = {
    "delayed": ("one all-reduce after the backward pass", {"parallel": "ddp_delayed"}, {"parallel": "ddp"}),
    "sync_batch_norm": (
        "DDP with synchronised batch normalisation",
        {"parallel": "ddp", "sync_batch_norm": True},
        {"parallel": "ddp", "sync_batch_norm": False},
    ),
    "dp": ("DataParallel", {"parallel": "dp"}, {"parallel": "ddp"}),
}
"""How a sentence calls each way, its fields, and those of DDP."""


def ways(inputs: ReportInputs) -> Reply | Missing:
    """State the throughput of each way to average gradients relative to DDP, on the most ranks."""
    rows = inputs.configurations
    rows = rows[(rows["world_size"] > 1) & (rows["world_size"] == rows["world_size"].max())]
    on_most = {"configuration": tuple(rows.index)}
    found = {key: where(pairs(inputs, fields, ddp), on_most) for key, (_, fields, ddp) in _WAYS.items()}
    ratios = {key: part.iloc[0] for key, part in found.items() if len(part)}
    if not ratios:
        return Missing("no other way ran next to DDP on several ranks", "--gpus 1,2")
    first = rows.loc[next(iter(ratios.values()))["configuration"]]
    texts = [f"{_WAYS[key][0]} {measured(row, 'ratio', 2, unit='x')}" for key, row in ratios.items()]
    return Reply(
        f"Throughput on {size_of(inputs, first)} at a global batch of {_global_batch(first)}, relative to DDP: "
        f"{join(texts)}.",
        {key: float(row["ratio"]) for key, row in ratios.items()},
    )


def held(inputs: ReportInputs) -> Reply | Missing:
    """State what DataParallel gains with more ranks at a fixed global batch, and whether the host limits it."""
    rows = inputs.scaling
    rows = rows[(rows["scaling"] == STRONG) & (rows["ideal"] > 1) & (rows["reference_world_size"] == 1)]
    if len(rows):
        rows = rows[rows["configuration"].map(inputs.configurations["parallel"]) == "dp"].sort_values("world_size")
    if rows.empty:
        return Missing(
            "DataParallel did not run with a fixed global batch on one GPU and more",
            "--case DataParallel --gpus 1,2",
        )
    texts = [f"{size_of(inputs, row)} reach {measured(row, 'speed_up', 2, unit='x')}" for _, row in rows.iterrows()]
    most = inputs.configurations.loc[rows["configuration"].iloc[-1]]
    is_host = most["host_bound"] is True
    why = ""
    if is_host:
        why = (
            f" On {size_of(inputs, most)} the host limits it, because one process launches the work of all: launching "
            f"takes {ms(most['step_launch_s'])}, a step {ms(most['step_s'])}."
        )
    return Reply(
        f"At a global batch of {_global_batch(most)}, {join(texts)} of the throughput of one.{why}",
        {f"speed_up_{int(row['world_size'])}": float(row["speed_up"]) for _, row in rows.iterrows()},
        "host" if is_host else "",
    )


def _global_batch(row: pd.Series) -> str:
    return number(int(row["world_size"]) * int(row["batch_per_gpu"]), 0)
