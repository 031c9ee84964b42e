"""Answers of forum-phases: where the time of a batch goes, and what pinned memory and asynchronous copies change."""

import pandas as pd

from analysis.answers.reply import (
    MS,
    Missing,
    Reply,
    highest,
    lowest,
    measured,
    ms,
    pairs,
    points,
    preferred,
    repeats,
    size_of,
    span,
    times,
)
from analysis.compare.scaling import STRONG, WEAK
from analysis.measure.configurations import rows_with
from analysis.measure.measures import cost_of_waiting_s
from analysis.predict.inputs import ReportInputs
from analysis.read.schema import PHASES
from analysis.study import study_ranks
from analysis.text import PHASE_LABELS, configuration_label, number

_PINNED = {"pin_memory": True, "non_blocking": True}
_PAGEABLE = {"pin_memory": False, "non_blocking": False}
_UNPINNED_ASYNC = {"pin_memory": False, "non_blocking": True}
_BLOCKING = {"pin_memory": True, "non_blocking": False}
_UNPINNED = (
    (_UNPINNED_ASYNC, _PINNED, ""),
    (_PAGEABLE, _BLOCKING, ", both with blocking copies"),
    (_PAGEABLE, _PINNED, " and with blocking copies in place of asynchronous ones"),
)
"""Pairs of settings that show what unpinned memory does, the clearest first, and how a sentence qualifies them."""
_ON_GPUS = "CPU ranks copy no batch to a device"

SMALL_GAIN = 1.05
"""An interval of a gain that holds 1 and this is too wide to show that nothing is gained."""

LEAST_FALL = 0.02
"""Relative fall of a processing time below which it counts as unchanged."""


def parts(inputs: ReportInputs) -> Reply | Missing:
    """State load wait, transfer and processing at the smallest and the largest batch, on fewest and on most ranks.

    Of several models, it is about the one that leads the card.
    """
    rows = inputs.configurations
    rows = rows[rows["phases_step_s"].notna()]
    if rows.empty:
        return Missing("no step was divided into phases")
    rows = preferred(_pinned(rows), "parallel", ("ddp", "none"))
    ahead = [inputs.configurations["model"].get(each.configuration) for each in inputs.headlines]
    rows = preferred(rows, "model", [*ahead, rows["model"].iloc[0]])
    texts, numbers = [], {}
    for size in dict.fromkeys((rows["world_size"].min(), rows["world_size"].max())):
        at_size = rows[rows["world_size"] == size]
        batches = at_size.sort_values("batch_per_gpu", kind="stable")
        for row in (batches.iloc[0], batches.iloc[-1])[: min(2, len(batches))]:
            load, copy, work = _divided(row)
            copied = "none" if pd.isna(row["host_to_device_s"]) else ms(copy)
            texts.append(
                f"{_label(inputs, row, ('world_size', 'batch_per_gpu'))}: loading {ms(load)}, transfer {copied}, "
                f"processing {ms(work)} ({points(work / (load + copy + work))} of the step)"
            )
            numbers = {"load_s": load, "transfer_s": copy, "processing_s": work}
    first = rows.iloc[0]
    slowest_rank = " of the rank that waits longest" if rows["world_size"].max() > 1 else ""
    return Reply(
        f"With {first['parallel']} and {first['model']}, per step: {'; '.join(texts)}. "
        f"Loading is the wait for a batch{slowest_rank}, not the work of the loaders ({repeats(first['n'])}).",
        numbers,
    )


def per_rank(inputs: ReportInputs) -> Reply | Missing:
    """State how the processing time per rank changes with more ranks, why, and when it cannot fall."""
    rank, _ = study_ranks(inputs)
    weak, strong = (_processing_pairs(inputs, kind) for kind in (WEAK, STRONG))
    if weak.empty and strong.empty:
        return Missing("no configuration ran on one rank and on several")
    texts, numbers, reason = [], {}, ""
    if len(strong):
        best = lowest(strong, "ratio")
        row = inputs.configurations.loc[best["configuration"]]
        texts.append(
            f"It falls if the global batch is divided: at global batch {number(row['global_batch'], 0)} from "
            f"{ms(best['before'])} on 1 {rank} to {ms(best['after'])} on {size_of(inputs, row)} "
            f"({times(best['ratio'])}), because each {rank} processes {number(row['batch_per_gpu'], 0)} samples."
        )
        numbers["strong_ratio"] = float(best["ratio"])
    if len(weak):
        by_strategy = weak.groupby("parallel", sort=True)["ratio"]
        listed = "; ".join(f"{name} {span(ratios, unit='x')}" for name, ratios in by_strategy)
        texts.append(
            f"It cannot fall if each {rank} keeps its batch, for its work is the same: "
            f"{size_of(inputs, inputs.configurations.loc[weak['configuration'].iloc[-1]])} take {listed} the time of 1."
        )
        worst = highest(weak, "ratio")
        numbers["weak_ratio"] = float(worst["ratio"])
        why, reason = _why_longer(inputs, worst)
        texts.append(why)
        fallen = weak[weak["ratio"] < 1 - LEAST_FALL]
        if len(fallen):
            texts.append(_why_shorter(inputs, lowest(fallen, "ratio"), len(fallen), len(weak)))
    return Reply(" ".join(text for text in texts if text), numbers, reason)


def non_blocking(inputs: ReportInputs) -> Reply | Missing:
    """State what asynchronous copies change without pinned memory."""
    if (inputs.configurations["device"] == "cpu").all():
        return Missing(_ON_GPUS, "--set pin_memory=false --set non_blocking=true,false")
    found = pairs(inputs, _UNPINNED_ASYNC, _PAGEABLE)
    if found.empty:
        rows = rows_with(inputs.configurations, _PAGEABLE).dropna(subset="host_transfer_s")
        known = ""
        if len(rows):
            share = rows["host_transfer_s"].astype(float) / rows["host_to_device_s"].astype(float)
            known = (
                f"A blocking copy from pageable memory keeps the host in the call for {span(share)} times as long as "
                "the GPU copies."
            )
        return Missing(
            "pageable memory ran only with blocking copies", "--set pin_memory=false --set non_blocking=true,false",
            known,
        )  # fmt: skip
    rows = inputs.configurations
    row = found.assign(step=found["configuration"].map(rows["host_to_device_s"])).sort_values("step").iloc[-1]
    there, before = rows.loc[row["configuration"]], rows.loc[row["reference"]]
    low, high = row["ratio_low"], row["ratio_high"]
    is_open = pd.notna(low) and low <= 1 < SMALL_GAIN < high
    verdict = "Training gains" if low > 1 else "No gain is resolved" if is_open else "Nothing is gained"
    return Reply(
        f"{verdict}: with unpinned memory, non_blocking copies make training {span(found['ratio'], unit='x')} "
        f"as fast as blocking ones, {measured(row, 'ratio', 2, unit='x')} at {_label(inputs, there)}. "
        f"The call keeps the host for {ms(there['host_transfer_s'])} in place of {ms(before['host_transfer_s'])}, "
        "because CUDA first copies pageable memory into a pinned buffer.",
        {"ratio": float(row["ratio"]), "host_transfer_s": float(there["host_transfer_s"])},
        "pageable",
    )


def hidden(inputs: ReportInputs) -> Reply | Missing:
    """State where the transfer hides, and what waiting for it (`torch.cuda.synchronize`) reveals."""
    rows = inputs.configurations
    rows = rows[rows["synced_step_s"].notna() & rows["host_to_device_s"].notna()]
    if rows.empty:
        return Missing(_ON_GPUS if (inputs.configurations["device"] == "cpu").all() else "no step waited for its copy")
    rows = _pinned(rows)
    rows = rows.assign(cost_s=cost_of_waiting_s(rows))
    single = preferred(preferred(rows, "world_size", (1,)), "parallel", ("ddp", "none"))
    row = highest(single, "host_to_device_s")
    moved = float(row["synced_host_transfer_s"]) - float(row["host_transfer_s"])
    waited_s = float(row["cost_s"])
    return Reply(
        f"The transfer hides behind the host: at {_label(inputs, row)} the call returns after "
        f"{ms(row['host_transfer_s'], 2)}, while the GPU copies for {ms(row['host_to_device_s'], 2)} and the host "
        f"launches the forward pass. With a synchronisation after the copy, the host waits {ms(moved, 2)} longer in "
        f"that call, for the copy and for all work before it, and the step takes {number(MS * waited_s, 2)} ms "
        f"longer. Over all configurations a synchronisation costs {span(rows['cost_s'], 2, MS, ' ms')} per step. "
        "Without it, a clock of the host counts the transfer as processing.",
        {"transfer_s": float(row["host_to_device_s"]), "cost_s": waited_s},
        "asynchronous",
    )


def pageable(inputs: ReportInputs) -> Reply | Missing:
    """State what unpinned memory does to loading, transfer and step."""
    if (inputs.configurations["device"] == "cpu").all():
        return Missing(_ON_GPUS)
    compared = [(pairs(inputs, here, other), copies) for here, other, copies in _UNPINNED]
    found, copies = next(((rows, copies) for rows, copies in compared if len(rows)), (None, ""))
    if found is None:
        return Missing("no configuration ran with and without pinned memory", "--set pin_memory=true,false")
    rows = inputs.configurations
    found["copy"] = found["configuration"].map(rows["host_to_device_s"]).astype(float)
    row = highest(found, "copy")
    there, pinned = rows.loc[row["configuration"]], rows.loc[row["reference"]]
    waits = found["configuration"].map(rows["load_wait_s"]).astype(float) - found["reference"].map(
        rows["load_wait_s"]
    ).astype(float)
    waited = float(waits.abs().max())
    kept_up = waited < LEAST_WAIT_S
    saved = "the loaders' thread that pins batches is saved, and the copy in the step pays for it"
    if kept_up:
        loading = f"The loaders kept up in both cases, so these results show no change of loading: {saved}"
    else:
        loading = f"The wait for a batch changes by {span(waits, 2, MS, ' ms')} per step"
        loading += f": {saved}" if waits.max() < 0 else ", which is no clear change of loading"
    return Reply(
        f"Training is {span(found['ratio'], unit='x')} as fast without pinned memory{copies}; at "
        f"{_label(inputs, there)} "
        f"{measured(row, 'ratio', 2, unit='x')}. The copy there takes {ms(row['copy'])} in place of "
        f"{ms(pinned['host_to_device_s'])}, because the host copies pageable memory into a pinned buffer first. "
        f"{loading}.",
        {"ratio": float(row["ratio"]), "transfer_s": float(row["copy"]), "wait_change_s": float(waits.median())},
        "pageable",
    )


LEAST_WAIT_S = 0.5e-3
"""Wait for a batch below which the loaders count as fast enough."""


def _pinned(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with pinned memory and asynchronous copies, all rows if there are none."""
    found = rows_with(rows, _PINNED)
    return found if len(found) else rows


def _divided(row: pd.Series) -> tuple[float, float, float]:
    """Return load wait (of the rank that waits longest), transfer and all the rest of a step, in seconds.

    transfer is 0 if there is none.
    """
    load = float(row["longest_load_wait_s"])
    copy = 0.0 if pd.isna(row["host_to_device_s"]) else float(row["host_to_device_s"])
    return load, copy, max(0.0, float(row["phases_step_s"]) - load - copy)


def _processing_pairs(inputs: ReportInputs, kind: str) -> pd.DataFrame:
    """Return processing on most ranks and on one, in seconds: configuration, reference, before, after, ratio."""
    rows, configurations = inputs.scaling, inputs.configurations
    rows = rows[(rows["scaling"] == kind) & (rows["ideal"] > 1) & (rows["reference_world_size"] == 1)]
    rows = rows[rows["world_size"] == rows["world_size"].max()]
    result = pd.DataFrame({"configuration": rows["configuration"], "reference": rows["reference"]}).astype(int)
    timed = configurations[configurations["phases_step_s"].notna()]
    result = result[result["configuration"].isin(timed.index) & result["reference"].isin(timed.index)]
    work = {index: _divided(row)[2] for index, row in timed.iterrows()}
    result["before"], result["after"] = result["reference"].map(work), result["configuration"].map(work)
    result["ratio"] = result["after"] / result["before"]
    result["parallel"] = result["configuration"].map(configurations.get("parallel", pd.Series(dtype=object)))
    return result.reset_index(drop=True)


def _why_longer(inputs: ReportInputs, pair: pd.Series) -> tuple[str, str]:
    """Return a sentence on the largest growth of processing, and its reason: "host" or the phase that grows most."""
    large, small = (inputs.configurations.loc[pair[name]] for name in ("configuration", "reference"))
    if pair["ratio"] < 1 + LEAST_FALL:
        return "", ""
    start = (
        f"It grows most, {times(pair['ratio'])}, for {_label(inputs, large)}: from {ms(pair['before'])} to "
        f"{ms(pair['after'])}"
    )
    launch = float(large["step_launch_s"]) - float(small["step_launch_s"])
    if launch > 0.5 * (pair["after"] - pair["before"]):
        process = "one process launches the work of all GPUs" if large.get("parallel") == "dp" else "the host is slower"
        waiting = ", and the GPUs wait for it" if large["host_bound"] is True else ""
        return (
            f"{start}, because {process}: launching a step takes {ms(large['step_launch_s'])} in place of "
            f"{ms(small['step_launch_s'])}{waiting}.",
            "host",
        )
    phases = [name for name in PHASES if name not in ("load_wait_s", "host_to_device_s")]
    longer = large[phases].fillna(0.0).astype(float) - small[phases].fillna(0.0).astype(float)
    name = str(longer.idxmax())
    return f"{start}; the phase that grows most is {PHASE_LABELS[name]}, by {ms(longer[name])}.", name.removesuffix(
        "_s"
    )


def _why_shorter(inputs: ReportInputs, pair: pd.Series, count: int, total: int) -> str:
    """Explain a processing time that fell with the same batch per rank: by its reference, if that is slow."""
    large, small = (inputs.configurations.loc[pair[name]] for name in ("configuration", "reference"))
    start = (
        f"In {count} of {total} pairs it fell nevertheless, most at {_label(inputs, large)}: from {ms(pair['before'])} "
        f"to {ms(pair['after'])}"
    )
    rows = inputs.configurations
    alike = rows[(rows["world_size"] == 1) & (rows["parallel"] != small.get("parallel"))]
    for name in inputs.axes:
        if name != "parallel":
            alike = alike[alike[name] == small[name]]
    if alike.empty:
        return f"{start}; the slow one is the reference, for the work per GPU is the same."
    other = alike.iloc[0]
    work = _divided(other)[2]
    if work < pair["before"] * (1 - LEAST_FALL):
        return f"{start}. Its reference was slow: the same work takes {ms(work)} with {other['parallel']} on one rank."
    return f"{start}. Its reference is not slower than {other['parallel']} ({ms(work)}), so the cause is not measured."


def _label(inputs: ReportInputs, row: pd.Series, names: tuple[str, ...] = ()) -> str:
    hidden_names = {"pin_memory", "non_blocking"}
    fields = names or tuple(name for name in inputs.axes if name not in hidden_names)
    return configuration_label(row, fields, study_ranks(inputs))
