"""Answers of vgg-case-study: accuracy, the best batch, when one GPU is better, and why memory ends on one GPU first."""

from collections.abc import Hashable
from typing import Any

import pandas as pd

from analysis.answers.reply import (
    NEAR,
    SAME_POINTS,
    Missing,
    Reply,
    highest,
    lowest,
    measured,
    ms,
    preferred,
    repeats,
    share,
    size_of,
    times,
)
from analysis.compare.accuracy import difference_of
from analysis.compare.scaling import STRONG, WEAK
from analysis.predict.inputs import ReportInputs
from analysis.study import study_ranks
from analysis.tables.hardware import memory_balance
from analysis.text import GIB, configuration_label, join, number, value_label, with_interval

EPOCHS_ON_TWO = "--gpus 1,2 --epochs 5 --repeats 3"
MORE_SEEDS = "--gpus 1,2 --epochs 5 --repeats 10"


def accuracy(inputs: ReportInputs) -> Reply | Missing:
    """State whether accuracy depends on the number of ranks, at equal global batch or equal batch per rank."""
    found = inputs.accuracy
    cells = pd.DataFrame() if found is None else found.cells.dropna(subset="top1").drop_duplicates("trial_ids")
    if found is None or cells.empty:
        return Missing("they contain no training", EPOCHS_ON_TWO)
    shown = [
        f"{share(row, 'top1', 2, 'one seed')} at batch {number(row['global_batch'], 0)}"
        for _, row in cells[cells["world_size"] == cells["world_size"].min()].sort_values("global_batch").iterrows()
    ]
    fewest = value_label("world_size", int(cells["world_size"].min()), study_ranks(inputs))
    by_batch = f"Accuracy on {fewest}: {join(shown)}."
    pair = _on_one_and_several(cells)
    if pair is None:
        return Missing("all trainings ran on the same number of ranks", EPOCHS_ON_TWO, by_batch)
    held, one, several = pair
    value, low, high = (100 * part for part in difference_of(found, several, one))
    batch = {"global_batch": "global batch {}", "batch_per_gpu": "batch {} per rank"}[held].format(number(one[held], 0))
    text = (
        f"At {batch} the accuracy on {several['world_size']} ranks differs from that on {one['world_size']} by "
        f"{with_interval(value, low, high, 2, 'one seed')} points"
    )
    same = low <= 0 <= high
    if pd.isna(low) or (same and max(-low, high) > SAME_POINTS):
        return Missing("their seeds differ by too much", MORE_SEEDS, f"{text}. {by_batch}")
    why = {
        ("global_batch", True): ", within the interval: on any ranks the averaged gradient is that of the global batch",
        ("batch_per_gpu", False): ", because the global batch grows with the ranks, and an epoch has fewer updates",
    }.get((held, same), "")
    reason = "same gradient" if same and why else ""
    return Reply(f"{'No' if same else 'Yes'}. {text}{why}. {by_batch}", {"difference": value / 100}, reason)


def _on_one_and_several(cells: pd.DataFrame) -> tuple[str, pd.Series, pd.Series] | None:
    """Return the name of a batch, and trainings with it on the fewest and on the most ranks; None if there are none."""
    for held in ("global_batch", "batch_per_gpu"):
        for _, group in cells.groupby(held):
            if group["world_size"].nunique() > 1:
                ordered = group.sort_values("world_size")
                return held, ordered.iloc[0], ordered.iloc[-1]
    return None


def best_batch(inputs: ReportInputs) -> Reply | Missing:
    """State which batch has the highest throughput on one rank, and the smallest one within 5 % of it."""
    curve = inputs.batch_curve
    curve = curve[curve["relative"].notna()]
    strategies = curve["parallel"].nunique() if "parallel" in curve else 1
    curve = preferred(curve, "parallel", ("ddp", "none"))
    if curve["batch_per_gpu"].nunique() < 2:
        return Missing("fewer than two batches ran on one rank", "--batch-per-gpu 32,64,100,128")
    curve = curve[curve["series"] == curve["series"].iloc[0]]
    best = highest(curve, "relative")
    enough = curve[curve["relative"] >= 1 - NEAR].sort_values("batch_per_gpu").iloc[0]
    tried = join([number(batch, 0) for batch in curve["batch_per_gpu"].sort_values()])
    under = f"Under {curve['parallel'].iloc[0]}, batch" if strategies > 1 else "Batch"
    largest = highest(curve, "batch_per_gpu")
    falls = ""
    if largest["batch_per_gpu"] > best["batch_per_gpu"] and largest["relative"] < 1 - NEAR:
        falls = f" Larger ones are slower: {times(largest['relative'])} at {number(largest['batch_per_gpu'], 0)}."
    near = ""
    if enough["batch_per_gpu"] < largest["batch_per_gpu"]:
        least = number(enough["batch_per_gpu"], 0)
        near = f"; from {least} on the rate is within {number(100 * NEAR, 0)}\u00a0% of it"
    reason = ""
    small: dict[Hashable, Any] = inputs.configurations.loc[
        int(lowest(curve, "batch_per_gpu")["configuration"])
    ].to_dict()
    why = ""
    if small["host_bound"] is True:
        reason = "host"
        why = (
            f" At batch {number(small['batch_per_gpu'], 0)} the host needs {ms(small['step_launch_s'])} to launch a "
            f"step whose kernels take {ms(small['busy_s'])}, so small batches leave the GPU idle."
        )
    return Reply(
        f"{under} {number(best['batch_per_gpu'], 0)} is the fastest of {tried}, with "
        f"{measured(best, 'throughput_samples_per_s', 0, unit=' samples/s')}{near}.{falls}{why}",
        {"best": float(best["batch_per_gpu"]), "enough": float(enough["batch_per_gpu"])},
        reason,
    )


def one_is_better(inputs: ReportInputs) -> Reply | Missing:
    """State at which batches several ranks are slower than one, with either kind of scaling, and why."""
    rows = inputs.scaling[inputs.scaling["scaling"].isin([WEAK, STRONG])]
    rows = rows[(rows["ideal"] > 1) & (rows["reference_world_size"] == 1)]
    if rows.empty:
        return Missing("no batch ran on one rank and on several", "--gpus 1,2")
    rank = study_ranks(inputs)[0]
    slower = rows[rows["speed_up"] < 1]
    worst = lowest(rows, "speed_up")
    large, small = (inputs.configurations.loc[worst[name]] for name in ("configuration", "reference"))
    label = configuration_label(large, ("batch_per_gpu", "parallel"), study_ranks(inputs))
    numbers = {"worst": float(worst["speed_up"]), "count": float(len(slower))}
    shared = f"; {number(large['global_batch'], 0)} in all on either" if worst["scaling"] == STRONG else ""
    shown = f"{measured(worst, 'speed_up', 2, unit='x')} of one {rank} on {size_of(inputs, worst)} ({label}{shared})"
    if slower.empty:
        return Reply(f"Never in these results: the least is {shown}.", numbers)
    batches = ", ".join(
        f"{name} at {join([str(batch) for batch in sorted(set(group))])}"
        for name, group in inputs.configurations.loc[slower["configuration"]].groupby("parallel")["batch_per_gpu"]
    )
    launch = float(large["step_launch_s"]) - float(small["step_launch_s"])
    growth = float(large["step_s"]) - float(small["step_s"])
    is_host = large["host_bound"] is True and launch > 0.5 * growth
    why = (
        f", because launching a step takes {ms(large['step_launch_s'])} in place of {ms(small['step_launch_s'])}, "
        f"more than the {ms(small['busy_s'])} that the GPU computes for such a batch"
        if is_host
        else f", because the step takes {ms(growth)} longer"
    )
    return Reply(f"With {batches} per {rank}: {shown}{why}.", numbers, "host" if is_host else "step")


def memory(inputs: ReportInputs) -> Reply | Missing:
    """State how unevenly memory is used under DataParallel, and which batch ends it."""
    balance = memory_balance(inputs).frame
    trials = inputs.results.trials
    ended = trials[trials["status"] == "out_of_memory"]
    end = f" Batch {int(ended['batch_per_gpu'].min())} runs out of memory." if len(ended) else ""
    rows = balance[balance["parallel"] == "dp"] if "parallel" in balance else balance.iloc[:0]
    if rows.empty:
        return Missing(
            "no DataParallel step on several GPUs recorded memory per GPU", "--set parallel=dp --gpus 2", end.strip()
        )
    rows = rows.assign(ratio=rows["first_bytes"] / rows["others_bytes"])
    row = highest(rows, "ratio")
    last = rows.sort_values("batch_per_gpu").iloc[-1]
    constant = ""
    if last["batch_per_gpu"] > row["batch_per_gpu"]:
        constant = (
            " The extra part does not grow with the batch as activations do: at batch "
            f"{number(last['batch_per_gpu'], 0)} the ratio is {number(last['ratio'], 2)}."
        )
    return Reply(
        f"Under DataParallel the first GPU gathers all outputs and reduces all gradients: at batch "
        f"{number(row['batch_per_gpu'], 0)} it peaks at {number(row['first_bytes'] / GIB, 1)} GiB, "
        f"{number(row['ratio'], 2)} times the others' ({repeats(row['n'])}), so its memory ends first.{constant}{end}",
        {"ratio": float(row["ratio"]), "ratio_at_largest": float(last["ratio"])},
        "gather",
    )
