"""Answers of averaging: what other ways to average gradients cost, and what DataParallel gains with more GPUs."""

from collections.abc import Mapping

from analysis.answers.reply import Missing, Reply, measured, ms, pairs
from analysis.compare.scaling import STRONG
from analysis.predict.inputs import ReportInputs
from analysis.study import study_ranks
from analysis.text import join, number, value_label

_Fields = Mapping[str, object]
WAYS: Mapping[str, tuple[str, _Fields, _Fields]] = {
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
    most = int(inputs.configurations["world_size"].max()) if len(inputs.configurations) else 1
    texts, numbers, batches = [], {}, set()
    for key, (name, fields, ddp) in WAYS.items():
        found = pairs(inputs, fields, ddp)
        sizes = inputs.configurations[["world_size", "batch_per_gpu"]].reindex(found["configuration"])
        found = found[(sizes["world_size"] == most).to_numpy()]
        if most > 1 and len(found):
            row = found.iloc[0]
            texts.append(f"{name} {measured(row, 'ratio', 2, unit='x')}")
            numbers[key] = float(row["ratio"])
            batches.add(most * int(sizes["batch_per_gpu"].loc[row["configuration"]]))
    if not texts:
        return Missing("no other way ran next to DDP on several ranks", "--gpus 1,2")
    ranks = value_label("world_size", most, study_ranks(inputs))
    held = f" at a global batch of {number(batches.pop(), 0)}" if len(batches) == 1 else ""
    return Reply(f"Throughput on {ranks}{held}, relative to DDP: {join(texts)}.", numbers)


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
    nouns = study_ranks(inputs)
    texts = [
        f"{value_label('world_size', int(row['world_size']), nouns)} reach {measured(row, 'speed_up', 2, unit='x')}"
        for _, row in rows.iterrows()
    ]
    most = inputs.configurations.loc[rows["configuration"].iloc[-1]]
    is_host = most["host_bound"] is True
    why = ""
    if is_host:
        why = (
            f" On {value_label('world_size', int(most['world_size']), nouns)} the host limits it, because one process "
            f"launches the work of all: launching takes {ms(most['step_launch_s'])}, a step {ms(most['step_s'])}."
        )
    batch = number(int(most["world_size"]) * int(most["batch_per_gpu"]), 0)
    return Reply(
        f"At a global batch of {batch}, {join(texts)} of the throughput of one.{why}",
        {f"speed_up_{int(row['world_size'])}": float(row["speed_up"]) for _, row in rows.iterrows()},
        "host" if is_host else "",
    )
