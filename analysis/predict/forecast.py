"""Predict numbers of ranks that the user asks for, with costs, and on an interconnect of their choice."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from analysis.compare.scaling import STRONG
from analysis.measure.hardware import training_power_w
from analysis.predict.inputs import ReportInputs
from analysis.predict.laws import Link
from analysis.predict.model import ROW_COLUMNS, WIDEST, ScalingModel, Spreads, predict, with_throughput, without
from analysis.predict.series import Interconnects, ScalingSeries, run_spreads
from analysis.read.results import nothing_timed
from analysis.study import Analysis, study_ranks
from analysis.text import join, sizes_to_measure, value_label

_STATED = re.compile(r"([0-9.]+(?:e-?[0-9]+)?):([0-9.]+(?:e-?[0-9]+)?)")

HOST_BOUND, LOADING_BOUND = "host-bound", "loading-bound"
NO_SCALING, MEASURED = "scaling not resolved", "measured"
NETWORK, NOT_RESOLVED = "network not measured", "not resolved"
"""Caveats of a row. Those of the first line: no prediction. Those of the second line: no interval."""

FORECAST_COLUMNS = [
    *ROW_COLUMNS, "caveat", "interconnect", "held_out_error", "naive_error", "beats_naive", "measured_error",
    "cost_per_million_samples", "power_w_per_rank", "energy_wh_per_million_samples",
]  # fmt: skip


class PredictionError(ValueError):
    """Nothing can be predicted from a folder, or the request is invalid: one line that says what is needed."""

    exit_code = 2


@dataclass(frozen=True)
class Forecast:
    """Predictions for the requested numbers of ranks.

    models: those of the request. rows: one row per series and number of ranks, with `FORECAST_COLUMNS`; NaN if unknown.
    notes: what the caveats of the rows mean, and what to do. details: further notes.
    """

    models: list[ScalingModel]
    rows: pd.DataFrame
    notes: list[str]
    details: list[str]


def forecast(
    analysis: ReportInputs,
    sizes: Sequence[int],
    interconnect: str | None = None,
    price_per_gpu_hour: float | None = None,
    name: str = "these results",
) -> Forecast:
    """Predict every series on each of `sizes` ranks.

    interconnect: a measured one, or LATENCY_US:BANDWIDTH_GB_S (latency per hop, bus bandwidth); None: as measured.
    name: of the folder, for messages. A measured size is predicted as if it had not been measured. Raises
    PredictionError.
    """
    models = _requested_models(analysis, interconnect, name)
    link = stated_link(interconnect)
    per_node = ranks_per_node(analysis)
    repeats = run_spreads(analysis)
    reasons = {model.number: reason_against(analysis, model.series) for model in models}
    rows = pd.concat(
        [
            _row(model, size, per_node, link, models, repeats, reasons[model.number])
            for size in sizes
            for model in models
        ],
        ignore_index=True,
    )
    trial_power_w = training_power_w(analysis.measured, analysis.results.windows)
    power = {model.number: trial_power_w.reindex(_largest(analysis, model)).median() for model in models}
    rows["power_w_per_rank"] = rows["series"].map(power).astype(float)
    rank_hours = rows["world_size"] / rows["throughput_samples_per_s"] * 1e6 / 3600
    price = np.nan if price_per_gpu_hour is None else price_per_gpu_hour
    rows["cost_per_million_samples"] = rank_hours * price
    rows["energy_wh_per_million_samples"] = rank_hours * rows["power_w_per_rank"]
    rows = rows.sort_values(["series", "world_size"], kind="stable", ignore_index=True)[FORECAST_COLUMNS]
    notes = _notes(rows, link, per_node, study_ranks(analysis))
    return Forecast(models, rows, notes, _details(models, rows))


def stated_link(interconnect: str | None) -> Link | None:
    """Return the link given as LATENCY_US:BANDWIDTH_GB_S; None if the text has another form."""
    match = _STATED.fullmatch(interconnect or "")
    if not match:
        return None
    try:
        latency_us, bandwidth_gb_s = float(match[1]), float(match[2])
    except ValueError:
        return None
    if not (np.isfinite(latency_us) and 0 < bandwidth_gb_s < np.inf):
        return None
    return Link(latency_us / 1e6, bandwidth_gb_s * 1e9, f"stated: {latency_us:g} µs per hop, {bandwidth_gb_s:g} GB/s")


def ranks_per_node(analysis: Analysis) -> int | None:
    """Return the largest number of GPUs per node, for CPU ranks that of cores; None if no node reports them.

    More CPU ranks than cores share a core, and no law says how.
    """
    on_gpus = study_ranks(analysis)[0] == "GPU"
    counts = (len(node.get("gpus") or ()) if on_gpus else node.get("cpu_count") or 0 for node in _nodes(analysis))
    return max(counts, default=0) or None


def _nodes(analysis: Analysis) -> list[dict[str, Any]]:
    environments = analysis.results.trials["environment"]
    return [node for environment in environments for node in (environment or {}).get("nodes") or ()]


def _largest(analysis: Analysis, model: ScalingModel) -> list[str]:
    """Return the trials of a series on most ranks."""
    return list(analysis.configurations.loc[model.series.points["configuration"].iloc[-1], "trial_ids"])


def _requested_models(analysis: ReportInputs, interconnect: str | None, name: str) -> list[ScalingModel]:
    """Return the models for a forecast. Raises PredictionError if there are none."""
    if analysis.configurations.empty:
        raise PredictionError(f"{name}: nothing to predict from: {nothing_timed(analysis.results.trials)}")
    models = analysis.models
    if not models:
        sizes = sorted(analysis.configurations["world_size"].astype(int).unique())
        if len(sizes) == 1:
            reason = f"every done trial ran on {sizes[0]} rank{'' if sizes[0] == 1 else 's'}"
        else:
            reason = "no two done trials differ only in the number of ranks"
        raise PredictionError(
            f"{name}: nothing to predict from: {reason}; run one configuration on at least two numbers of ranks, "
            f"such as --gpus {sizes_to_measure(max(sizes))}"
        )
    if interconnect is None:
        return models
    measured = sorted({model.series.interconnect for model in models})
    if interconnect in measured:
        return [model for model in models if model.series.interconnect == interconnect]
    if stated_link(interconnect) is None:
        raise PredictionError(
            f"--interconnect must be a measured one ({', '.join(measured)}) or LATENCY_US:BANDWIDTH_GB_S such as 5:50, "
            f"got {interconnect!r}"
        )
    models = [model for model in models if model.series.interconnect == "auto"] or models
    with_gradients = [model for model in models if np.isfinite(model.series.gradient_bytes)]
    if not with_gradients:
        raise PredictionError(
            f"--interconnect {interconnect}: requires the size of the gradients, which no trial of {name} recorded; "
            "rerun the study with --set communication_steps=10"
        )
    return with_gradients


def is_resolved(analysis: Analysis, series: ScalingSeries) -> bool:
    """Return False if the measured efficiency on the most ranks of a series is too uncertain to be shown."""
    largest = (analysis.scaling["configuration"] == series.points["configuration"].iloc[-1]) & (
        analysis.scaling["scaling"] == series.scaling
    )
    return not (analysis.scaling.loc[largest, "efficiency_more"] > 0).any()


def reason_against(analysis: Analysis, series: ScalingSeries) -> str | None:
    """Return the caveat of a series that is not predicted, or None."""
    if series.host_bound:
        return HOST_BOUND
    bounds = analysis.regions["bound"].reindex(series.points.loc[series.is_small, "configuration"])
    if (bounds == "load").any():
        return LOADING_BOUND
    return None if is_resolved(analysis, series) else NO_SCALING


def _row(
    model: ScalingModel,
    size: int,
    per_node: int | None,
    link: Link | None,
    all_models: Sequence[ScalingModel],
    repeats: Spreads,
    reason: str | None,
) -> pd.DataFrame:
    """Return the prediction of one series on `size` ranks as one row, with its known errors.

    reason: why there is none, a caveat.
    """
    series, basis = model.series, model
    measured = series.points[series.points["world_size"] == size]
    measured_step_s = float(measured["step_s"].iloc[0]) if len(measured) else np.nan
    nodes = series.nodes_of(size, per_node)
    if len(measured):
        refitted = {other.number: other for other in without(all_models, size, repeats)}
        basis = refitted.get(model.number, model)
    if reason or (len(measured) and basis is model):
        batch = series.batch(size)
        row: dict[str, Any] = {"series": model.number, "world_size": size, "nodes": nodes}
        row |= {"measured_step_s": measured_step_s}
        row |= {"batch_per_gpu": batch, "global_batch": series.global_batch(size), "interconnect": series.interconnect}
        frame = pd.DataFrame([row | {"caveat": reason or MEASURED}])
        return frame.reindex(columns=FORECAST_COLUMNS).astype({"not_resolved": object})
    knows_network = basis.knows_network(size, nodes)
    frame = predict(basis, [size], nodes=[nodes if knows_network else 1])
    frame["nodes"] = nodes
    if link is not None:
        frame = _on_stated_link(basis, frame, link, nodes)
    is_beyond = nodes > 1 and not knows_network and link is None
    if is_beyond:
        of_interval = [name for name in ROW_COLUMNS if name.endswith(("_low", "_high"))]
        frame = frame.assign(**dict.fromkeys(of_interval, np.nan), not_resolved=False)
    return frame.assign(
        caveat=NETWORK if is_beyond else NOT_RESOLVED if frame["step_s_low"].isna().iloc[0] else None,
        interconnect=link.label if link else series.interconnect,
        measured_step_s=measured_step_s,
        measured_error=frame["step_s"] / measured_step_s - 1,
        held_out_error=basis.held_out_error,
        naive_error=basis.naive_error,
        beats_naive=basis.beats_naive,
    )


def _on_stated_link(model: ScalingModel, frame: pd.DataFrame, link: Link, nodes: int) -> pd.DataFrame:
    """Replace the all-reduce over the measured link by one over a stated link.

    A fast link does not show how much of a longer all-reduce the backward pass would hide. With W and W' the
    all-reduces over the measured and the stated link, the upper end assumes no overlap, step + (W' - W), and the lower
    end full overlap, max(step, W'). The prediction is their geometric mean. A shorter all-reduce saves at most W, and
    the step is at least that of one rank. The interval extends from the low end of the lower case to the high end of
    the upper case.
    """
    series = model.series
    size = int(frame["world_size"].iloc[0])
    measured = series.links
    if nodes > 1 and measured.inside:  # the part inside a node stays
        links, measured_group = Interconnects(measured.inside, link, between_is_flat=False), -(-size // nodes)
    else:
        links, nodes, measured_group = Interconnects(link), 1, size
    old_s = series.at([measured_group], links=replace(measured, between=None)).wire_s[0]
    old_s = 0.0 if np.isnan(old_s) else old_s
    new_s = series.at([size], [nodes], links).wire_s[0]
    step_s = frame["step_s"].iloc[0]
    alone_s = series.points["step_s"].iloc[0] * series.batch(size) / series.batch(series.sizes[0])
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


def _notes(rows: pd.DataFrame, link: Link | None, per_node: int | None, ranks: tuple[str, str]) -> list[str]:
    """Return what each caveat in the rows means, and what to do about it."""
    counts = rows["caveat"].value_counts()
    meanings = {
        HOST_BOUND: f"no prediction, because the host bounds the step on 1 or 2 {ranks[1]}. The step then says more "
        "about the host than about scaling. Fix: a larger batch, or a compiled or captured step.",
        LOADING_BOUND: f"no prediction, because loading bounds the step on 1 or 2 {ranks[1]}. More {ranks[1]} share "
        "the CPUs and the storage of a node. Fix: more --loader-workers, another --storage, or decoded data.",
        NO_SCALING: "no prediction, because the measured scaling is uncertain by more than a factor of 2. Fix: more "
        "repeats.",
        NETWORK: f"predicted as if all ranks were in one node, without an interval. The nodes hold {per_node} "
        f"{ranks[1]}, and no network between them was measured. Fix: --interconnect LATENCY_US:BANDWIDTH_GB_S.",
        NOT_RESOLVED: f"the interval exceeds a factor of {WIDEST:g} in either direction, the largest possible gain "
        "from twice the ranks.",
        MEASURED: "no prediction, because only one other number of ranks remains without this measured one.",
    }
    notes = [f"{caveat}: {meaning}" for caveat, meaning in meanings.items() if caveat in counts]
    if link:
        notes.append(
            f"Interconnect {link.label}: intervals range from full overlap of the all-reduce with computation to none. "
            "The actual overlap is unknown, because it was measured on another link."
        )
    return notes


def _details(models: Sequence[ScalingModel], rows: pd.DataFrame) -> list[str]:
    details = []
    tested = [model for model in models if model.beats_naive is not None]
    if not tested:
        details.append(
            "No held-out error: it requires a third number of ranks. The interval shows how far the laws disagree."
        )
    worse = [model for model in tested if not model.beats_naive]
    if worse:
        details.append(
            f"In {len(worse)} of {len(tested)} series the laws do not beat the naive throughput x N on the held-out "
            f"point (series {join([str(model.number) for model in worse])}), so their prediction adds nothing."
        )
    if rows["power_w_per_rank"].isna().all():
        details.append("No energy: power was not measured on the largest number of ranks.")
    else:
        details.append("Energy: from the mean power per GPU on the largest measured number of ranks.")
    return details


FORECAST_FACTORS = (2, 4)
"""Numbers of ranks in the report, as multiples of the largest measured one."""


def held_batch(model: ScalingModel, ranks: tuple[str, str]) -> str:
    """Return the label of the batch that the series holds constant."""
    name = "global_batch" if model.series.scaling == STRONG else "batch_per_gpu"
    return value_label(name, round(model.series.base_batch), ranks)
