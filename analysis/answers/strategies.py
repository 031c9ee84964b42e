"""Answers about parallel strategies: other ways to average gradients, and what sharding costs and makes possible."""

from collections.abc import Mapping

import pandas as pd

from analysis.answers.reply import Missing, Reply, highest, measured, ms, pairs, size_of, times
from analysis.compare.scaling import STRONG
from analysis.measure.configurations import rows_with
from analysis.predict.inputs import ReportInputs
from analysis.read.schema import TOO_LARGE
from analysis.text import GIB, join, number

_Fields = Mapping[str, object]
_WAYS: Mapping[str, tuple[str, _Fields, _Fields]] = {
    "delayed": ("one all-reduce after the backward pass", {"parallel": "ddp_delayed"}, {"parallel": "ddp"}),
    "horovod": ("Horovod", {"parallel": "horovod"}, {"parallel": "ddp"}),
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
    rows = _on_most(inputs)
    on_most = {"configuration": tuple(rows.index)}
    found = {key: rows_with(pairs(inputs, fields, ddp), on_most) for key, (_, fields, ddp) in _WAYS.items()}
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
        is_all = most["step_launch_s"] >= most["step_s"]  # in its own window
        why = (
            f" On {size_of(inputs, most)} the host limits it, because one process launches the work of all: launching "
            f"takes {'all' if is_all else ms(most['step_launch_s'])} of a step of {ms(most['step_s'])}."
        )
    return Reply(
        f"At a global batch of {_global_batch(most)}, {join(texts)} of the throughput of one.{why}",
        {f"speed_up_{int(row['world_size'])}": float(row["speed_up"]) for _, row in rows.iterrows()},
        "host" if is_host else "",
    )


def _global_batch(row: pd.Series) -> str:
    return number(int(row["world_size"]) * int(row["batch_per_gpu"]), 0)


_SHARDED = {"zero1": "ZeRO-1", "hsdp": "HSDP", "fsdp2": "FSDP2"}


def sharding(inputs: ReportInputs) -> Reply | Missing:
    """State throughput and peak memory of each sharded strategy, relative to DDP, for the largest common model."""
    rows = _on_most(inputs)
    found = {}
    for name in _SHARDED:
        both = rows_with(pairs(inputs, {"parallel": name}, {"parallel": "ddp"}), {"configuration": tuple(rows.index)})
        if len(both):
            peaks = both["reference"].map(rows["peak_memory_bytes"]).astype(float)
            found[name] = both.iloc[int(peaks.fillna(0.0).to_numpy().argmax())]
    if not found:
        return Missing("no sharded strategy ran next to DDP on several ranks")
    numbers, texts = {}, []
    for name, pair in found.items():
        ours, ddp = (rows.loc[[pair[side]]].iloc[0] for side in ("configuration", "reference"))
        parts = [f"throughput {measured(pair, 'ratio', 2, unit='x')}"]
        numbers[f"{name}_throughput"] = float(pair["ratio"])
        if pd.notna(ours["peak_memory_bytes"]) and pd.notna(ddp["peak_memory_bytes"]):
            numbers[f"{name}_memory"] = float(ours["peak_memory_bytes"] / ddp["peak_memory_bytes"])
            parts.append(f"peak memory {times(numbers[f'{name}_memory'])}")
        parts += ["bound by the host"] if ours["host_bound"] is True else []
        texts.append(f"{_SHARDED[name]}: {', '.join(parts)}")
    first = rows.loc[[next(iter(found.values()))["reference"]]].iloc[0]
    peak = f", {_gib(first)} per GPU" if pd.notna(first["peak_memory_bytes"]) else ""
    return Reply(
        f"Relative to DDP on {size_of(inputs, first)} ({first['model']}, batch {int(first['batch_per_gpu'])} per rank"
        f"{peak}): {'; '.join(texts)}.",
        numbers,
    )


def largest_model(inputs: ReportInputs) -> Reply | Missing:
    """State the model with most peak memory that each strategy trains, and those that exceed its memory."""
    rows, trials = _on_most(inputs), inputs.results.trials
    rows = rows[rows["peak_memory_bytes"].notna()]
    too_large = trials[trials["status"].isin(TOO_LARGE) & (trials["world_size"] == rows["world_size"].max())]
    if rows.empty or too_large.empty:
        return Missing("no model exceeded the memory", "--model llama_1b,llama_8b")
    numbers, texts = {}, []
    for name, label in ({"ddp": "DDP"} | _SHARDED).items():
        of_strategy = rows[rows["parallel"] == name]
        if of_strategy.empty:
            continue
        largest = highest(of_strategy, "peak_memory_bytes")
        numbers[f"{name}_gib"] = float(largest["peak_memory_bytes"]) / GIB
        beyond = list(dict.fromkeys(too_large.loc[too_large["parallel"] == name, "model"]))
        failed = f"; out of memory: {join(beyond)}" if beyond else ""
        texts.append(f"{label}: {largest['model']}, {_gib(largest)}{failed}")
    return Reply(
        f"The largest model that fits on {size_of(inputs, rows.iloc[0])}, with its peak memory per GPU. "
        f"{'. '.join(texts)}.",
        numbers,
    )


def _on_most(inputs: ReportInputs) -> pd.DataFrame:
    """Return the configurations on the most ranks, if they are several."""
    rows = inputs.configurations
    return rows[(rows["world_size"] > 1) & (rows["world_size"] == rows["world_size"].max())]


def _gib(row: pd.Series) -> str:
    return f"{number(float(row['peak_memory_bytes']) / GIB, 1)} GiB"
