"""Predictions for numbers of ranks that a user asks for: with what they cost, and on an interconnect of their choice."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from analysis.compare.scaling import STRONG
from analysis.load.results import nothing_timed
from analysis.measure.hardware import training_power_w
from analysis.predict.fit import Spread
from analysis.predict.inputs import ReportInputs
from analysis.predict.laws import Link
from analysis.predict.model import ROW_COLUMNS, WIDEST, Model, pooled_spread, predict, with_throughput, without
from analysis.predict.series import Links
from analysis.study import Analysis
from analysis.text import join, value_label

_STATED = re.compile(r"([0-9.]+(?:e-?[0-9]+)?):([0-9.]+(?:e-?[0-9]+)?)")

FORECAST_COLUMNS = [
    *ROW_COLUMNS, "predicted", "interconnect", "held_out_error", "naive_error", "beats_naive", "measured_error", "cost_per_million_samples",
    "power_w_per_rank", "energy_wh_per_million_samples",
]  # fmt: skip


class PredictionError(ValueError):
    """Nothing can be predicted from a folder, or not what was asked: one line with what is needed."""

    exit_code = 2


@dataclass(frozen=True)
class Forecast:
    """Predictions: models (those asked about), rows (one a series and number of ranks, with `FORECAST_COLUMNS`; what is
    not known is NaN), and notes that say what to keep in mind."""

    models: list[Model]
    rows: pd.DataFrame
    notes: list[str]


def forecast(
    analysis: ReportInputs,
    sizes: Sequence[int],
    interconnect: str | None = None,
    price_per_gpu_hour: float | None = None,
    name: str = "these results",
) -> Forecast:
    """Every series on so many ranks each.

    interconnect: one that was measured, or LATENCY_US:BANDWIDTH_GB_S of a hop and of the bus; None: as measured. A size
    that was measured is predicted as if it had not been. name: of the folder, for messages. Raises PredictionError.
    """
    found = _asked(analysis, interconnect, name)
    link = stated_link(interconnect)
    per_node = ranks_per_node(analysis)
    common = pooled_spread(analysis)
    parts = [_rows(model, size, per_node, link, found, common) for size in sizes for model in found]
    rows = pd.concat([part for part in parts if part is not None], ignore_index=True)
    of_trial = training_power_w(analysis.measured, analysis.results.windows)
    power = {model.number: of_trial.reindex(_largest(analysis, model)).median() for model in found}
    rows["power_w_per_rank"] = rows["series"].map(power).astype(float)
    rank_hours = rows["world_size"] / rows["throughput_samples_per_s"] * 1e6 / 3600
    price = np.nan if price_per_gpu_hour is None else price_per_gpu_hour
    rows["cost_per_million_samples"] = rank_hours * price
    rows["energy_wh_per_million_samples"] = rank_hours * rows["power_w_per_rank"]
    rows = rows.sort_values(["series", "world_size"], kind="stable", ignore_index=True)[FORECAST_COLUMNS]
    return Forecast(found, rows, _notes(analysis, found, rows, link, per_node))


def stated_link(interconnect: str | None) -> Link | None:
    """The link that LATENCY_US:BANDWIDTH_GB_S states; None where the text is no such thing."""
    match = _STATED.fullmatch(interconnect or "")
    if not match:
        return None
    try:
        latency_us, bandwidth_gb_s = float(match[1]), float(match[2])
    except ValueError:
        return None
    if not (np.isfinite(latency_us) and 0 < bandwidth_gb_s < np.inf):
        return None
    return Link(latency_us / 1e6, bandwidth_gb_s * 1e9, f"stated: {latency_us:g} µs a hop, {bandwidth_gb_s:g} GB/s")


def ranks_per_node(analysis: Analysis) -> int | None:
    """How many ranks one of the nodes here holds, by its GPUs; None for ranks on CPUs, or where no node says."""
    return max((len(node.get("gpus") or ()) for node in _nodes(analysis)), default=0) or None


def cores_per_node(analysis: Analysis) -> int | None:
    """How many CPU cores the largest of the nodes here has; None where no node says."""
    return max((node.get("cpu_count") or 0 for node in _nodes(analysis)), default=0) or None


def _nodes(analysis: Analysis) -> list[dict[str, Any]]:
    found = analysis.results.trials["environment"]
    return [node for environment in found for node in (environment or {}).get("nodes") or ()]


def _largest(analysis: Analysis, model: Model) -> list[str]:
    """The trials of a series on most ranks."""
    return list(analysis.configurations.loc[model.series.points["configuration"].iloc[-1], "trial_ids"])


def _asked(analysis: ReportInputs, interconnect: str | None, name: str) -> list[Model]:
    """The models that a forecast is made of, or what is lacking."""
    if analysis.configurations.empty:
        raise PredictionError(f"{name}: nothing to predict from: {nothing_timed(analysis.results.trials)}")
    found = analysis.models
    if not found:
        sizes = sorted(analysis.configurations["world_size"].astype(int).unique())
        if len(sizes) == 1:
            why = f"every done trial ran on {sizes[0]} rank{'' if sizes[0] == 1 else 's'}"
        else:
            why = "no two done trials differ in the number of ranks alone"
        raise PredictionError(
            f"{name}: nothing to predict from: {why}; run one configuration on two numbers of ranks or more, such as "
            "--gpus 1,2,4"
        )
    if interconnect is None:
        return found
    measured = sorted({model.series.interconnect for model in found})
    if interconnect in measured:
        return [model for model in found if model.series.interconnect == interconnect]
    if stated_link(interconnect) is None:
        raise PredictionError(
            f"--interconnect {interconnect!r}: neither measured here ({', '.join(measured)}) nor LATENCY_US:BANDWIDTH_GB_S, "
            "such as 5:50"
        )
    found = [model for model in found if model.series.interconnect == "auto"] or found
    known = [model for model in found if np.isfinite(model.series.gradient_bytes)]
    if not known:
        raise PredictionError(
            f"--interconnect {interconnect}: needs the size of the gradients, which no trial of {name} recorded; run it again "
            "with --set account_steps=10"
        )
    return known


def _rows(
    model: Model, size: int, per_node: int | None, link: Link | None, all_models: Sequence[Model], common: Spread
) -> pd.DataFrame | None:
    """One series on `size` ranks, with what is known of its error."""
    series, basis = model.series, model
    measured = series.points[series.points["world_size"] == size]
    if len(measured):
        rest = {other.number: other for other in without(all_models, size, common)}
        if model.number not in rest:
            row = measured.iloc[0]
            frame = pd.DataFrame([{"series": model.number, "world_size": size, "measured_step_s": row["step_s"]}])
            frame["global_batch"] = row["batch_per_gpu"] * size
            return frame.assign(predicted=False, interconnect=series.interconnect).reindex(columns=FORECAST_COLUMNS)
        basis = rest[model.number]
    nodes = -(-size // per_node) if per_node else 1
    links = series.links
    frame = predict(basis, [size], nodes=[nodes if links.between else 1])
    frame["nodes"] = nodes
    if link is not None:
        frame = _on_stated_link(basis, frame, link, nodes)
    return frame.assign(
        predicted=True,
        interconnect=link.label if link else series.interconnect,
        measured_step_s=measured["step_s"].iloc[0] if len(measured) else np.nan,
        measured_error=frame["step_s"] / measured["step_s"].iloc[0] - 1 if len(measured) else np.nan,
        held_out_error=basis.held_out_error,
        naive_error=basis.naive_error,
        beats_naive=basis.beats_naive,
    )


def _on_stated_link(model: Model, frame: pd.DataFrame, link: Link, nodes: int) -> pd.DataFrame:
    """The predicted steps with the all-reduce of another link in place of the measured one's.

    How much of a longer all-reduce the backward pass would hide is not known from a faster one, so the ends are no overlap,
    step + (W' - W), and full overlap, max(step, W'), with W and W' the all-reduces over the measured and the stated link;
    the middle is their geometric mean. A shorter one can save W at most, and leave no less than one rank's step. The
    interval reaches from the low end's to the high end's.
    """
    series = model.series
    size = int(frame["world_size"].iloc[0])
    measured = series.links
    if nodes > 1 and measured.inside:  # the part inside a node stays
        links, as_before = Links(measured.inside, link, between_is_flat=False), -(-size // nodes)
    else:
        links, nodes, as_before = Links(link), 1, size
    old_s = series.at([as_before], links=replace(measured, between=None)).wire_s[0]
    old_s = 0.0 if np.isnan(old_s) else old_s
    new_s = series.at([size], [nodes], links).wire_s[0]
    step_s = frame["step_s"].iloc[0]
    alone_s = series.points["step_s"].iloc[0] * series.batch(size) / series.points["batch_per_gpu"].iloc[0]
    if new_s >= old_s:
        ends = max(step_s, new_s), step_s + new_s - old_s
    else:
        ends = max(min(alone_s, step_s), step_s - old_s), step_s
    middle = float(np.sqrt(ends[0] * ends[1]))
    frame = frame.assign(
        step_s_low=ends[0] * frame["step_s_low"] / frame["step_s"],
        step_s_high=ends[1] * frame["step_s_high"] / frame["step_s"],
        step_s=middle,
    )
    first = series.points.iloc[0]
    return with_throughput(frame, float(first["throughput_samples_per_s"]), int(first["world_size"]))


def _notes(
    analysis: Analysis, found: Sequence[Model], rows: pd.DataFrame, link: Link | None, per_node: int | None
) -> list[str]:
    notes = []
    predicted = rows[rows["predicted"]]
    if link:
        notes.append(
            f"Interconnect {link.label}: intervals reach from full overlap of the all-reduce with computation to none, which "
            "measurements on a faster link do not tell."
        )
    largest = int(predicted["world_size"].max()) if len(predicted) else 0
    if per_node and largest > per_node:
        nodes = [model for model in found if model.series.links.between]
        if link is None and not nodes:
            notes.append(
                f"A node here holds {per_node} GPUs, and no interconnect between nodes was measured: {largest} are predicted as if "
                "all were linked like those of one node; state the network with --interconnect LATENCY_US:BANDWIDTH_GB_S."
            )
    tested = [model for model in found if model.beats_naive is not None]
    if not tested:
        notes.append("No held-out error: that needs a third number of ranks. The interval is how far laws disagree.")
    worse = [model for model in tested if not model.beats_naive]
    if worse:
        notes.append(
            f"In {len(worse)} of {len(tested)} series the law does not beat the naive throughput x N on the held-out point "
            f"(series {join([str(model.number) for model in worse])}): its prediction says no more than that."
        )
    if predicted["power_w_per_rank"].isna().all():
        notes.append("No energy: the power of training was not measured on the most ranks.")
    else:
        notes.append("Energy: from the mean power of a GPU in training on the most ranks measured.")
    if len(predicted) and predicted["step_s_low"].isna().any():
        notes.append("No interval where nothing tells the spread of a run: no configuration has two repeats.")
    wide = predicted[predicted["too_wide"].eq(True)]
    if len(wide):
        notes.append(
            f"{len(wide)} of {len(predicted)} intervals too wide to use: beyond a factor of {WIDEST:g} either way, "
            "which is what twice the ranks bring at best."
        )
    alone = rows[~rows["predicted"]]
    if len(alone):
        shown = join([str(size) for size in sorted(alone["world_size"].unique())])
        notes.append(
            f"{shown} was measured, and leaving it out leaves one number of ranks, from which nothing can be predicted."
        )
    return notes


AHEAD = (2, 4)
"""Numbers of ranks of the report, in multiples of the largest that was measured."""


def held_batch(model: Model, ranks: tuple[str, str]) -> str:
    name = "global_batch" if model.series.scaling == STRONG else "batch_per_gpu"
    return value_label(name, round(model.series.base_batch), ranks)
