"""Answers of hpml-lab4: epoch time over the batch, scaling, communication, bandwidth, and the fifth epoch."""

import pandas as pd

from analysis.answers.reply import MS, Missing, Reply, highest, measured, ms, points, preferred, repeats, size_of, times
from analysis.compare.communication_cost import bandwidth_rows
from analysis.compare.report_epoch import report_epoch_rows
from analysis.compare.scaling import STRONG, WEAK
from analysis.predict.inputs import ReportInputs
from analysis.study import study_ranks
from analysis.text import GB, MIB, configuration_label, join, number, with_interval

SATURATED = 1.1
"""A batch uses the device fully if a sample takes at most this many times as long as at the fastest batch."""


def epoch_time(inputs: ReportInputs) -> Reply | Missing:
    """State whether an epoch takes longer or shorter as the batch grows on one rank, and why."""
    curve = inputs.batch_curve
    curve = curve[curve["sample_s"].notna()]
    curve = preferred(curve, "parallel", ("ddp", "none"))
    if curve["batch_per_gpu"].nunique() < 2:
        ended = f" (out of memory: {ends})" if (ends := _out_of_memory(inputs)) else ""
        return Missing(f"fewer than two batches ran on one rank{ended}", "--batch-per-gpu 32,128")
    curve = curve[curve["series"] == curve["series"].iloc[0]].sort_values("batch_per_gpu")
    rows = inputs.configurations.loc[curve["configuration"].astype(int)]
    first, last = rows.iloc[0], rows.iloc[-1]
    small, large = (number(row["batch_per_gpu"], 0) for row in (first, last))
    ratio = float(curve["sample_s"].iloc[-1] / curve["sample_s"].iloc[0])
    epochs = [inputs.epoch_s.get(index) for index in rows.index]
    seconds = (
        f"{number(epochs[0], 2)} s at batch {small} and {number(epochs[-1], 2)} s at {large}, {times(ratio)}"
        if epochs[0] and epochs[-1]
        else f"{times(ratio)} at batch {large} compared with {small}"
    )
    direction = "shorter" if ratio < 1 / 1.02 else "longer" if ratio > 1.02 else "neither longer nor shorter"
    text = f"It gets {direction} ({repeats(first['n'])}): an epoch on one {study_ranks(inputs)[0]} takes {seconds}"
    numbers = {"ratio": ratio}
    enough = curve[curve["sample_s"] <= SATURATED * curve["sample_s"].min()]["batch_per_gpu"].iloc[0]
    if direction != "shorter":
        return Reply(f"{text}, because time per step grows at least as fast as the batch.", numbers, "compute")
    step_ratio = float(last["step_s"]) / float(first["step_s"])
    steps = f"there are {number(last['batch_per_gpu'] / first['batch_per_gpu'], 0)} times fewer steps"
    reason = "overhead"
    because = f"{steps}, while a step takes only {number(step_ratio, 1)} times as long"
    if first["host_bound"] is True:
        reason = "host"
        because += (
            f": at batch {small} the host needs {ms(first['step_launch_s'])} to launch a step, "
            f"whatever its batch, and the GPU computes only {ms(first['busy_s'])} of it"
        )
    rest = (
        f" From batch {number(enough, 0)} on, a sample takes within 10\u00a0% of its least time, so larger batches "
        "gain little."
    )
    return Reply(f"{text}, because {because}.{rest}{_end_of_memory(inputs)}", numbers, reason)


def _end_of_memory(inputs: ReportInputs) -> str:
    if ends := _out_of_memory(inputs):
        return f" Out of memory: {ends}."
    largest = int(inputs.configurations["batch_per_gpu"].max())
    return f" No batch up to {number(largest, 0)} ran out of memory, so the end of memory was not reached."


def _out_of_memory(inputs: ReportInputs) -> str:
    """Return the batches that ran out of memory, by strategy and ranks; empty if none did."""
    trials = inputs.results.trials
    failed = trials[trials["status"] == "out_of_memory"]
    texts = []
    for _, group in failed.groupby(["parallel", "batch_per_gpu"], sort=True):
        strategy, batch = group[["parallel", "batch_per_gpu"]].iloc[0]
        sizes = sorted(group["world_size"].astype(int).unique())
        ranks = study_ranks(inputs)[int(max(sizes) > 1)]
        texts.append(f"{strategy} at batch {number(batch, 0)} on {join([str(size) for size in sizes])} {ranks}")
    return join(texts)


def scaling_kind(inputs: ReportInputs) -> Reply | Missing:
    """State the kind of scaling with its speed-ups, and the data point of the other kind from the same trials."""
    weak, strong = (_speed_ups(inputs, kind) for kind in (WEAK, STRONG))
    if weak.empty:
        return Missing("no batch ran on one rank and on several", "--gpus 1,2")
    best = weak.sort_values(["parallel", "world_size"], kind="stable").drop_duplicates("parallel", keep="last")
    listed = [f"{row['parallel']} {_speed_up(inputs, row)}" for _, row in best.iterrows()]
    text = (
        "It is weak scaling: the batch per rank stays constant, so the global batch grows with the number of ranks. "
        f"Speed-up at the largest batch: {join(listed)}."
    )
    numbers = {"weak": float(best["speed_up"].iloc[-1])}
    if strong.empty:
        gap = (
            " Strong scaling needs one global batch on two numbers of ranks, and no pair of these batches gives one; "
            "`--batch-per-gpu 64,128 --gpus 1,2` would."
        )
        return Reply(text + gap, numbers)
    row = highest(strong, "world_size")
    numbers["strong"] = float(row["speed_up"])
    batch = int(inputs.configurations.loc[row["configuration"], "global_batch"])
    return Reply(
        f"{text} Strong scaling from the same trials, with global batch {number(batch, 0)}: "
        f"{row['parallel']} {_speed_up(inputs, row)}.",
        numbers,
    )


def _speed_ups(inputs: ReportInputs, kind: str) -> pd.DataFrame:
    rows = inputs.scaling
    rows = rows[(rows["scaling"] == kind) & (rows["ideal"] > 1) & (rows["reference_world_size"] == 1)]
    fields = inputs.configurations.loc[rows["configuration"], ["parallel", "batch_per_gpu"]]
    rows = rows.assign(parallel=fields["parallel"].to_numpy(), batch_per_gpu=fields["batch_per_gpu"].to_numpy())
    return rows.sort_values(["batch_per_gpu", "world_size"], kind="stable")


def _speed_up(inputs: ReportInputs, row: pd.Series) -> str:
    batch = number(row["batch_per_gpu"], 0)
    return f"{measured(row, 'speed_up', 2, unit='x')} on {size_of(inputs, row)} (batch {batch} per rank)"


def separated(inputs: ReportInputs) -> Reply | Missing:
    """State how compute and communication were separated, and their times."""
    rows = inputs.communication.exposed
    if rows.empty:
        return Missing("no communication was measured on several ranks", "--gpus 1,2 --set parallel=ddp")
    shown, numbers = [], {}
    for index in (rows.index[0], rows.index[-1])[: min(2, len(rows))]:
        row, configuration = rows.loc[index], inputs.configurations.loc[index]
        if pd.notna(row["exposed_s_low"]):
            row = pd.Series({**row, "exposed_s_low": max(0.0, row["exposed_s_low"])})  # a duration
        exposed = float(row["exposed_s"])
        epoch = inputs.epoch_s.get(index)
        steps = epoch / float(configuration["step_s"]) if epoch else None
        of_epoch = (
            f", {number(MS * exposed * steps, 0)} ms of an epoch of {number(epoch, 2)} s"
            if steps and steps >= 1
            else ""
        )
        shorter = measured(row, "difference_s", 2, MS, " ms")
        is_clear = pd.isna(row["difference_s_low"]) or row["difference_s_low"] > 0
        shown.append(
            f"{_layout(inputs, configuration)}: compute {ms(float(configuration['step_s']) - exposed)}, exposed "
            f"communication {measured(row, 'exposed_s', 2, MS, ' ms')}{of_epoch}; without all-reduces the step is "
            + (f"{shorter} shorter" if is_clear else f"not significantly shorter, by {shorter}")
        )
        numbers = {"exposed_s": exposed, "difference_s": float(row["difference_s"])}
    return Reply(
        "By a hook that times each bucket's all-reduce: what runs after the last gradient is exposed communication, "
        "and the rest of the step is compute. A step without all-reduces (no_sync, interleaved on the same ranks) is "
        "shorter by that and more: it also lacks host work for each bucket, and compute that all-reduces slow down. "
        f"{'; '.join(shown)}.",
        numbers,
    )


def bandwidth(inputs: ReportInputs) -> Reply | Missing:
    """Fill in both bandwidth formulas with S, N and t for the largest batch on most ranks."""
    rows = bandwidth_rows(inputs.configurations, inputs.communication).dropna(subset=["wire_s"])
    if rows.empty:
        return Missing("no all-reduce was timed", "--gpus 1,2 --set parallel=ddp")
    row = rows[rows["world_size"] == rows["world_size"].max()].iloc[-1]
    size, ranks, seconds = float(row["gradient_bytes"]), int(row["world_size"]), float(row["wire_s"])
    algorithm, bus = size / seconds / GB, float(row["wire_bus_bytes_per_s"]) / GB
    use = row["utilisation"]
    of_limit = f", {points(use)} of what the same all-reduces reach alone on these ranks" if pd.notna(use) else ""
    of_limit += " (they reach this limit)" if of_limit and use > 1 else ""
    s_mb, t_ms = number(size / 1e6, 2), number(MS * seconds, 3)
    return Reply(
        f"{_layout(inputs, inputs.configurations.loc[row.name])} ({repeats(row['n'])}): algorithm bandwidth S / t = "
        f"{s_mb} MB / {t_ms} ms = {number(algorithm, 1)} GB/s; bus bandwidth S / t · 2(N-1)/N = "
        f"{s_mb} MB / {t_ms} ms · 2·{ranks - 1}/{ranks} = {number(bus, 1)} GB/s{of_limit}. S is the gradients "
        f"({number(size / MIB, 1)} MiB in {number(row['buckets'], 0)} buckets), N the ranks and t the transfer time of "
        "all buckets.",
        {"bytes": size, "ranks": ranks, "seconds": seconds, "bus_bytes_per_s": bus * GB},
    )


def _layout(inputs: ReportInputs, row: pd.Series) -> str:
    return configuration_label(row, ("world_size", "batch_per_gpu", "parallel"), study_ranks(inputs))


_NO_TRAININGS = "they contain no training of five epochs"


def _epoch_rows(inputs: ReportInputs) -> pd.DataFrame:
    accuracy, epoch = inputs.accuracy, inputs.record.report_epoch
    return pd.DataFrame() if accuracy is None or epoch is None else report_epoch_rows(accuracy, epoch)


def fifth_epoch(inputs: ReportInputs) -> Reply | Missing:
    """Compare loss and accuracy of the study's epoch between the largest batch on all ranks and the reference."""
    rows, accuracy = _epoch_rows(inputs), inputs.accuracy
    if len(rows) < 2 or accuracy is None:
        return Missing(_NO_TRAININGS, command="python -m study.scaling run fifth-epoch")
    plain = rows[rows["recipe"] == accuracy.plain]
    if len(plain) < 2:
        return Missing("the largest batch was not trained without a recipe")
    small, large = plain.iloc[0], plain.iloc[-1]
    lost = measured(large, "epoch_top1_difference", 1, 100, " points")
    worse = large["epoch_top1_difference"] < 0
    why = (
        f", because an epoch has {number(large['global_batch'] / small['global_batch'], 0)} times fewer updates at the "
        "same learning rate"
        if worse
        else ""
    )
    return Reply(
        f"In epoch {inputs.record.report_epoch}, batch {number(small['global_batch'], 0)} has a mean training loss of "
        f"{_loss(small)} and a training accuracy of {_top1(small)}; batch {number(large['global_batch'], 0)} "
        f"({large['made_of']}) "
        f"has {_loss(large)} and {_top1(large)}. Training accuracy differs by {lost}{why}.",
        {"small_top1": float(small["epoch_top1"]), "large_top1": float(large["epoch_top1"])},
        "updates" if worse else "",
    )


def recipes(inputs: ReportInputs) -> Reply | Missing:
    """State what each recipe changes at the largest batch, at the study's epoch."""
    rows, accuracy = _epoch_rows(inputs), inputs.accuracy
    if rows.empty or accuracy is None:
        return Missing(_NO_TRAININGS, command="python -m study.scaling run fifth-epoch")
    largest = rows[rows["global_batch"] == rows["global_batch"].max()]
    plain, others = largest[largest["recipe"] == accuracy.plain], largest[largest["recipe"] != accuracy.plain]
    if plain.empty or others.empty:
        return Missing("no recipe was trained at the largest batch")
    base = float(plain["epoch_top1"].iloc[0])
    cells = accuracy.cells[accuracy.cells["trial_ids"].isin(largest["trial_ids"])].set_index("recipe")
    held_out = {str(name): f"{points(value)} held-out" for name, value in cells["top1"].items()}
    listed = [
        f"{row['recipe']} reaches {_top1(row)} ({number(100 * (row['epoch_top1'] - base), 1)} points; "
        f"{held_out[row['recipe']]})"
        for _, row in others.iterrows()
    ]
    best = highest(others, "epoch_top1")
    helps = float(best["epoch_top1_low"]) > float(plain["epoch_top1_high"].iloc[0])
    verdict = (
        f"{best['recipe']} raises training accuracy"
        if helps
        else "None of the recipes has a significantly higher training accuracy"
    )
    return Reply(
        f"{verdict}. At batch {number(best['global_batch'], 0)} plain training has a training accuracy of "
        f"{_top1(plain.iloc[0])} ({held_out[accuracy.plain]} after the last epoch); {'; '.join(listed)}.",
        {"plain_top1": base, "best_top1": float(best["epoch_top1"])}
        | {f"{name}_held_out_top1": float(value) for name, value in cells["top1"].items()},
    )


def _loss(row: pd.Series) -> str:
    return with_interval(row["epoch_loss"], row["epoch_loss_low"], row["epoch_loss_high"], 3, repeats(row["n"]))


def _top1(row: pd.Series) -> str:
    return measured(row, "epoch_top1", 1, 100, "\u00a0%")
