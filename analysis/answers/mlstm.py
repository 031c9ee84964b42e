"""Answers of mlstm-scaling: linearity, interconnects, the larger model, and predictions for many GPUs."""

import math

import pandas as pd

from analysis.answers.reply import MS, Missing, Reply, highest, lowest, measured, points, repeats, share, size_of, times
from analysis.answers.threads import THREADS
from analysis.compare.scaling import WEAK
from analysis.measure.configurations import throughput_estimates
from analysis.predict.forecast import PredictionError, forecast
from analysis.predict.inputs import ReportInputs
from analysis.statistics import ratios_to_reference
from analysis.study import study_ranks
from analysis.text import SLOWDOWN_LABELS, field_value, join, number, value_label

NEAR_LINEAR = 0.95


def _rows(inputs: ReportInputs) -> pd.DataFrame:
    """Return weak-scaling rows on most ranks, the fastest interconnect first, with model and interconnect.

    strategy: " (ddp)" and the like, "" if there is only one. name: the model with it. Threads of one process are
    another question.
    """
    rows = inputs.scaling
    rows = rows[(rows["scaling"] == WEAK) & (rows["ideal"] > 1) & (rows["reference_world_size"] == 1)]
    rows = rows[rows["world_size"] == rows["world_size"].max()]
    fields = inputs.configurations.reindex(rows["configuration"])
    rows = rows.assign(**{name: fields[name].to_numpy() for name in ("model", "interconnect", "parallel")})
    rows = rows[rows["parallel"] != THREADS]
    order = rows["interconnect"].map({"auto": 0, "no_p2p": 1, "socket": 2}).fillna(0)
    strategy = " (" + rows["parallel"] + ")" if rows["parallel"].nunique() > 1 else ""
    return rows.assign(order=order, strategy=strategy, name=rows["model"] + strategy).sort_values(
        ["order", "model"], kind="stable"
    )


def linear(inputs: ReportInputs) -> Reply | Missing:
    """State whether scaling is near-linear on the fastest interconnect, and what is lost."""
    rows = _rows(inputs)
    if rows.empty:
        return Missing("no model ran on one rank and on several", "--gpus 1,2")
    rows = rows[rows["order"] == rows["order"].min()]
    least = lowest(rows, "efficiency")
    verdicts = [_verdict(row) for _, row in rows.iterrows()]
    listed = [
        f"{verdict} for {row['name']}, {measured(row, 'speed_up', 2, unit='x')}"
        for verdict, (_, row) in zip(verdicts, rows.iterrows(), strict=True)
    ]
    known = f"On {size_of(inputs, least)}: {join(listed)}.{_lost(inputs, least)}"
    if set(verdicts) == {_OPEN}:
        return Missing("the intervals are too wide", "--repeats 5", known)
    return Reply(
        f"Near-linear means an efficiency of {points(NEAR_LINEAR)} or more. {known}",
        {"efficiency": float(least["efficiency"])},
    )


_OPEN = "not resolved"


def _verdict(row: pd.Series) -> str:
    """Return whether an efficiency is near-linear: by its interval, or by its value if it has none."""
    low, high = (row[f"efficiency_{end}"] for end in ("low", "high"))
    if pd.notna(low) and low < NEAR_LINEAR <= high:
        return _OPEN
    return "yes" if row["efficiency"] >= NEAR_LINEAR else "no"


def interconnects(inputs: ReportInputs) -> Reply | Missing:
    """State the throughput over each interconnect relative to the fastest, and whether it is significantly slower."""
    rows = _rows(inputs)
    if rows.empty or rows["interconnect"].nunique() < 2:
        return Missing("only one interconnect was measured on several ranks", "--interconnect auto,no_p2p,socket")
    rates = inputs.configurations["throughput_samples_per_s"]
    rows = rows.assign(rate=rows["configuration"].map(rates).astype(float))
    texts: list[str] = []
    numbers: dict[str, float] = {}
    for name, group in rows.groupby("name", sort=False):
        best = highest(group, "rate")
        ratios = _relative(inputs, group, int(best["configuration"]))
        labels = [field_value("interconnect", name) for name in ratios["interconnect"]]
        fastest = field_value("interconnect", best["interconnect"])
        rate = f"{number(best['rate'], 0)} samples/s on {size_of(inputs, best)}"
        labelled = [(label, row) for label, (_, row) in zip(labels, ratios.iterrows(), strict=True)]
        equal = [label for label, row in labelled if row["ratio_high"] >= 1.0]  # False without an interval
        others = [f"{label} {measured(row, 'ratio', 2, unit='x')}" for label, row in labelled]
        texts.append(
            f"{name}: {fastest} reaches {rate}, not significantly more than {join(equal)}; {join(others)}"
            if equal
            else f"{name}: {fastest} is the fastest, {rate}; {join(others)}"
        )
        numbers |= {f"{name} {row['interconnect']}": row["rate"] / best["rate"] for _, row in group.iterrows()}
    slowest = lowest(rows, "efficiency")
    return Reply(f"{'. '.join(texts)}.{_lost(inputs, slowest)}", numbers, "communication")


def _relative(inputs: ReportInputs, group: pd.DataFrame, best: int) -> pd.DataFrame:
    """Return the other rows of a group with their throughput relative to that of configuration `best`, as `ratio`."""
    others = group[group["configuration"] != best]
    estimates = throughput_estimates(inputs.configurations)
    found = ratios_to_reference(estimates, pd.Series(best, index=others["configuration"].to_numpy()))
    ends = {"": "ratio", "_low": "low", "_high": "high", "_more": "more"}
    return others.assign(**{f"ratio{end}": found[name].to_numpy() for end, name in ends.items()})


def larger_model(inputs: ReportInputs) -> Reply | Missing:
    """State whether the larger model scales better on each interconnect, and why."""
    rows = _rows(inputs)
    sizes = _gradient_bytes(inputs)
    rows = rows.assign(bytes=rows["configuration"].map(sizes)).dropna(subset="bytes")
    if rows["model"].nunique() < 2:
        return Missing("only one model ran on several ranks", "--model mlstm4096,mlstm8192")
    texts, numbers = [], {}
    for (interconnect, strategy), group in rows.groupby(["interconnect", "strategy"], sort=False):
        small, large = lowest(group, "bytes"), highest(group, "bytes")
        if small["model"] == large["model"]:
            continue
        difference = float(large["efficiency"] - small["efficiency"])
        steps = inputs.configurations["step_s"]
        compute = float(steps[large["reference"]]) / float(steps[small["reference"]])
        sent = float(large["bytes"] / small["bytes"])
        verdict = "better" if difference > 0 else "worse"
        half_widths = [math.log(row["efficiency_high"] / row["efficiency_low"]) / 2 for row in (large, small)]
        if not abs(math.log(large["efficiency"] / small["efficiency"])) > math.hypot(*half_widths):  # or unknown
            verdict = f"{verdict}, but not significantly"
        growth = [_growth_text(_growth(inputs, row)) for row in (large, small)]
        texts.append(
            f"{field_value('interconnect', interconnect)}{strategy}: {verdict}, {points(large['efficiency'])} against "
            f"{points(small['efficiency'])}; it computes {times(compute)} as long for {times(sent)} the "
            f"gradients, and its step {growth[0]}, the other's {growth[1]}"
        )
        numbers[f"{interconnect}{strategy}"] = difference
    if not texts:
        return Missing("no interconnect has both models", "--model mlstm4096,mlstm8192")
    return Reply(
        f"{'; '.join(texts)} ({repeats(rows['n'].min())}). More gradients hide behind more compute only if the "
        "interconnect keeps up.",
        numbers,
        "compute per byte",
    )


def predicted(inputs: ReportInputs) -> Reply | Missing:
    """State the predicted efficiency on the number of ranks that the study asks for, as a prediction."""
    goal = inputs.record.predict_to
    if goal is None:
        return Missing("the study names no number of ranks to predict")
    try:
        forecasts = forecast(inputs, [goal]).rows
    except PredictionError as error:
        return Missing(str(error), "--gpus 1,2")
    rows = forecasts.dropna(subset="efficiency")
    if rows.empty:
        return Missing("the host bounds every series, which says nothing about more ranks", "--batch-per-gpu 512")
    fields = {model.number: model.series.fields for model in inputs.models}
    texts, numbers = [], {}
    several = len({fields[number].get("parallel") for number in rows["series"]}) > 1
    for _, row in rows.iterrows():
        series = fields[row["series"]]
        strategy = f" ({series.get('parallel')})" if several else ""
        name = f"{series.get('model')}{strategy} over {series.get('interconnect') or 'auto'}"
        texts.append(f"{name} {share(row, 'efficiency', 1, 'no interval')}")
        numbers[name] = float(row["efficiency"])
    caveats = "; ".join(dict.fromkeys(text for text in rows["caveat"].dropna() if text))
    without = forecasts[forecasts["efficiency"].isna()]
    reasons = dict.fromkeys(f"{fields[row['series']].get('model')} ({row['caveat']})" for _, row in without.iterrows())
    refused = f" Not predicted: {join(list(reasons))}." if reasons else ""
    return Reply(
        f"Predicted, not measured: the efficiency on {value_label('world_size', goal, study_ranks(inputs))} is "
        f"{'; '.join(texts)}.{f' Caveat: {caveats}.' if caveats else ''}{refused} The figure of predictions shows the "
        "measured points and the predictions up to there.",
        numbers,
        "predicted",
    )


def _gradient_bytes(inputs: ReportInputs) -> pd.Series:
    exposed = inputs.communication.exposed
    return exposed["gradient_bytes"].astype(float) if len(exposed) else pd.Series(dtype=float)


def _growth(inputs: ReportInputs, row: pd.Series) -> float:
    steps = inputs.configurations["step_s"]
    return float(steps[row["configuration"]]) - float(steps[row["reference"]])


def _growth_text(growth_s: float) -> str:
    return f"{'grows' if growth_s >= 0 else 'shrinks'} by {number(MS * abs(growth_s), 1)} ms"


def _lost(inputs: ReportInputs, row: pd.Series) -> str:
    """Return the largest measured cause of a slowdown."""
    step = f" The step of {row['name']} over {field_value('interconnect', row['interconnect'])}"
    if row["efficiency_low"] <= 1.0 <= row["efficiency_high"]:  # False without an interval
        return f"{step} {_growth_text(_growth(inputs, row))}, which is not significant."
    causes = inputs.communication.slowdown
    causes = causes[causes["configuration"] == row["configuration"]] if len(causes) else causes
    if causes.empty:
        return ""
    cause = causes.iloc[0]
    parts = cause[list(SLOWDOWN_LABELS)].astype(float)
    queueing_s = float(parts.pop("queueing_s"))
    parts["transfer_s"] += queueing_s  # a bucket queues for the transfer of earlier ones
    name = str(parts.idxmax())
    if parts[name] <= 0:
        return ""
    most = "most of it" if name == "remainder_s" else "most by"
    label = SLOWDOWN_LABELS[name] + (" with queueing" if name == "transfer_s" and queueing_s > 0 else "")
    if parts[name] > cause["growth_s"]:
        most = "less than the cost of"
    grows = _growth_text(float(cause["growth_s"]))
    return f"{step} {grows}, {most} {label} ({number(MS * parts[name], 1)} ms)."
