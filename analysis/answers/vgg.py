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
WORKLOAD = ("model", "dataset", "precision", "image_size")
EQUAL = 0.01
"""Relative difference of two peaks of memory that counts as none."""


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
    """State which batch has the highest throughput on one rank, and the smallest one within 5 % of it.

    Batches of one strategy are compared, DDP if it ran. A faster batch of another strategy is stated too.
    """
    curves = inputs.batch_curve
    curves = curves[curves["relative"].notna()]
    curve = preferred(curves, "parallel", ("ddp", "none"))
    if curve["batch_per_gpu"].nunique() < 2:
        return Missing("fewer than two batches ran on one rank", "--batch-per-gpu 32,64,100,128")
    curve = curve[curve["series"] == curve["series"].iloc[0]]
    best = highest(curve, "relative")
    enough = curve[curve["relative"] >= 1 - NEAR].sort_values("batch_per_gpu").iloc[0]
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
        f"Under {best['parallel']}, batch {number(best['batch_per_gpu'], 0)} is the fastest of {_batches(curve)}, with "
        f"{measured(best, 'throughput_samples_per_s', 0, unit=' samples/s')}{near}.{falls}{_faster(curves, best)}{why}",
        {"best": float(best["batch_per_gpu"]), "enough": float(enough["batch_per_gpu"])},
        reason,
    )


def _batches(rows: pd.DataFrame) -> str:
    return join([number(batch, 0) for batch in sorted(set(rows["batch_per_gpu"]))])


def _faster(curves: pd.DataFrame, best: pd.Series) -> str:
    """Return a sentence per other strategy with a batch of the same workload that is faster than `best`."""
    same = (curves[list(WORKLOAD)] == best[list(WORKLOAD)]).all(axis=1)
    text = ""
    for name, rows in curves[same & (curves["parallel"] != best["parallel"])].groupby("parallel"):
        other = highest(rows, "throughput_samples_per_s")
        ratio = other["throughput_samples_per_s"] / best["throughput_samples_per_s"]
        if ratio > 1:
            only = rows["batch_per_gpu"].nunique() == 1
            tried = "the only batch measured" if only else f"the fastest of {_batches(rows)}"
            rate = measured(other, "throughput_samples_per_s", 0, unit=" samples/s")
            batch = f"batch {number(other['batch_per_gpu'], 0)}"
            text += f" Under {name}, {batch}, {tried}, reaches {rate}, {times(ratio)} of that."
    return text


def one_is_better(inputs: ReportInputs) -> Reply | Missing:
    """State at which batches several ranks are slower than one, with either kind of scaling, and why."""
    rows = inputs.scaling[inputs.scaling["scaling"].isin([WEAK, STRONG])]
    rows = rows[(rows["ideal"] > 1) & (rows["reference_world_size"] == 1)]
    if rows.empty:
        return Missing("no batch ran on one rank and on several", "--gpus 1,2")
    one, several = study_ranks(inputs)
    slower = rows[rows["speed_up"] < 1]
    worst = lowest(rows, "speed_up")
    large, small = (inputs.configurations.loc[worst[name]] for name in ("configuration", "reference"))
    label = configuration_label(large, ("batch_per_gpu", "parallel"), study_ranks(inputs))
    numbers = {"worst": float(worst["speed_up"]), "count": float(len(slower))}
    shared = f"; {number(large['global_batch'], 0)} in all on either" if worst["scaling"] == STRONG else ""
    shown = (
        f"{size_of(inputs, worst)} reach {measured(worst, 'speed_up', 2, unit='x')} of the throughput of one {one} "
        f"({label}{shared})"
    )
    others = rows[~rows["configuration"].isin(slower["configuration"])]
    sizes = join([str(size) for size in sorted(set(others["world_size"]))])
    tried = f"batches per {one} measured on {sizes} {several}: {_by_strategy(inputs, others)}"
    if slower.empty:
        return Reply(f"At none of the {tried}. At worst {shown}.", numbers)
    launch = float(large["step_launch_s"]) - float(small["step_launch_s"])
    growth = float(large["step_s"]) - float(small["step_s"])
    is_host = large["host_bound"] is True and launch > 0.5 * growth
    why = (
        f", because launching a step takes {ms(large['step_launch_s'])} in place of {ms(small['step_launch_s'])}, "
        f"more than the {ms(small['busy_s'])} that the GPU computes for such a batch"
        if is_host
        else f", because the step takes {ms(growth)} longer"
    )
    faster = f" At none of the other {tried}." if len(others) else ""
    return Reply(
        f"At these batches per {one}: {_by_strategy(inputs, slower)}. At worst {shown}{why}.{faster}",
        numbers,
        "host" if is_host else "step",
    )


def _by_strategy(inputs: ReportInputs, rows: pd.DataFrame) -> str:
    """Return the batches of some rows of `scaling`, as in `12 and 32 under ddp, and 512 under dp`."""
    groups = inputs.configurations.loc[rows["configuration"].unique()].groupby("parallel")
    return ", and ".join(f"{_batches(group)} under {name}" for name, group in groups)


def memory(inputs: ReportInputs) -> Reply | Missing:
    """State how unevenly memory is used under DataParallel, next to one rank, and which batch ends it."""
    balance = memory_balance(inputs).frame
    rows = balance[balance["parallel"] == "dp"] if "parallel" in balance else balance.iloc[:0]
    if rows.empty:
        return Missing(
            "no DataParallel step on several GPUs recorded memory per GPU", "--set parallel=dp --gpus 2", _end(inputs)
        )
    rows = rows.assign(ratio=rows["first_bytes"] / rows["others_bytes"], alone_bytes=_alone_bytes(inputs, rows))
    row = highest(rows, "ratio")
    last = rows.sort_values("batch_per_gpu").iloc[-1]
    constant = ""
    if last["batch_per_gpu"] > row["batch_per_gpu"]:
        constant = (
            f" The difference does not grow with the batch as activations do: it is {_difference(row)} GiB at batch "
            f"{number(row['batch_per_gpu'], 0)} and {_difference(last)} GiB at {number(last['batch_per_gpu'], 0)}, "
            f"where the ratio is {number(last['ratio'], 2)}."
        )
    to_one = float((rows["first_bytes"] / rows["alone_bytes"]).max())
    than_one = ""
    if to_one > 1 + EQUAL:
        than_one = (
            f" and before that of one GPU alone, of whose peak it needs up to {times(to_one)} at equal batch per GPU"
        )
    elif not pd.isna(to_one):
        peak = number(row["alone_bytes"] / GIB, 1)
        than_one = f", but no earlier than on one GPU alone, which peaks at {peak} GiB with the same batch per GPU"
    ends = f" So its memory ends before the others'{than_one}." if row["ratio"] > 1 + EQUAL else ""
    numbers = {"ratio": row["ratio"], "ratio_at_largest": last["ratio"], "ratio_to_one": to_one}
    return Reply(
        "Under DataParallel the first GPU gathers all outputs, reduces all gradients and holds the optimizer's state: "
        f"at batch {number(row['batch_per_gpu'], 0)} per GPU it peaks at {number(row['first_bytes'] / GIB, 1)} GiB, "
        f"{number(row['ratio'], 2)} times the others' ({repeats(row['n'])}).{constant}{ends} {_end(inputs)}".rstrip(),
        {name: float(value) for name, value in numbers.items() if not pd.isna(value)},
        "gather",
    )


def _alone_bytes(inputs: ReportInputs, rows: pd.DataFrame) -> pd.Series:
    """Return the peak memory of one rank with the same workload, strategy and batch per rank; null if not measured."""
    fields = [*WORKLOAD, "parallel", "batch_per_gpu"]
    single = inputs.configurations[inputs.configurations["world_size"] == 1]
    peaks = single.groupby(fields)["peak_memory_bytes"].max()
    keys = inputs.configurations.loc[rows["configuration"], fields]
    return pd.Series(peaks.reindex(pd.MultiIndex.from_frame(keys)).to_numpy(dtype=float), index=rows.index)


def _difference(row: pd.Series) -> str:
    return number((row["first_bytes"] - row["others_bytes"]) / GIB, 2)


def _end(inputs: ReportInputs) -> str:
    """Return a sentence with the smallest batch that ran out of memory, per number of ranks; DataParallel if it ran."""
    trials = inputs.results.trials
    ended = preferred(trials[trials["status"] == "out_of_memory"], "parallel", ("dp",))
    ranks = study_ranks(inputs)
    smallest = ended.groupby("world_size", as_index=False)["batch_per_gpu"].min()
    batches = [
        f"{number(row['batch_per_gpu'], 0)} on {value_label('world_size', int(row['world_size']), ranks)}"
        for _, row in smallest.iterrows()
    ]
    return f"The smallest batch per GPU that ran out of memory is {join(batches)}." if batches else ""
