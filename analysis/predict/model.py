"""Predict numbers of ranks that were not measured: a law for each series, its held-out error, and its predictions.

The law is chosen by prediction, not by fit. The largest number of ranks of each series is held out, every law is fitted
to the rest, and its prediction is compared with the measurement. All series over one interconnect share the choice,
because a single held-out point says little. The reported error is therefore slightly optimistic compared with a law
chosen in advance; intervals cover all laws that fit the points (`predict.intervals`). The baseline is the naive
"throughput x N": the throughput of the smallest number of ranks, multiplied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from analysis.compare.scaling import WEAK
from analysis.predict.fit import Fit, NotIdentifiable, Spread, fit
from analysis.predict.intervals import akaike_weights, averaged_interval, pooled_spread, run_spread
from analysis.predict.laws import LAWS, Array, Points
from analysis.predict.series import Interconnects, ScalingSeries, pooled, series_of
from analysis.statistics import CONFIDENCE
from analysis.study import Analysis

Fits = Mapping[str, Fit | NotIdentifiable]

CLOSE_FIT = 0.01
"""A law fits the measured points if its residuals are within 1 %, or within twice their spread."""

WIDEST = 2.0
"""Twice the ranks at best double the throughput. An interval that exceeds this factor in either direction cannot tell
whether more ranks help, and is too wide to use.
"""

LAW_COLUMNS = ["series", "law", "held_out_world_size", "held_out_error", "naive_error", "residual", "reason", "chosen"]

ROW_COLUMNS = [
    "series", "law", "world_size", "nodes", "batch_per_gpu", "global_batch", "step_s", "step_s_low", "step_s_high",
    "throughput_samples_per_s", "throughput_samples_per_s_low", "throughput_samples_per_s_high", "efficiency",
    "efficiency_low", "efficiency_high", "too_wide", "measured_step_s",
]  # fmt: skip


@dataclass(frozen=True)
class LawError:
    """Error of the law at held-out points.

    variance: of the log step. at: mean distance of the held-out points from the fitted ones, as the log of the ratio of
    ranks; the error grows with this distance. degrees: number of held-out points.
    """

    variance: float
    at: float
    degrees: float


@dataclass(frozen=True)
class ScalingModel:
    """A series with the law chosen for it.

    fits: every law fitted to all points. held_out: one row per law, with `LAW_COLUMNS`. why: reason of the choice.
    law_error: None if nothing could be held out. run_spread: of the log step of one run, see `intervals.run_spread`.
    weights: of the fitted laws, see `akaike_weights`.
    """

    number: int
    series: ScalingSeries
    fits: Fits
    law: str
    why: str
    held_out: pd.DataFrame
    law_error: LawError | None
    run_spread: Spread
    weights: Mapping[str, float]

    @property
    def chosen(self) -> Fit:
        law_fit = self.fits[self.law]
        assert isinstance(law_fit, Fit), "only a law that was fitted is chosen"
        return law_fit

    @property
    def held_out_error(self) -> float:
        """Return predicted / measured - 1 of the chosen law; NaN if nothing could be held out."""
        return float(self.held_out.loc[self.held_out["law"] == self.law, "held_out_error"].iloc[0])

    @property
    def naive_error(self) -> float:
        return float(self.held_out["naive_error"].iloc[0])

    @property
    def beats_naive(self) -> bool | None:
        """Return True if the law is more accurate than the naive baseline; None if nothing could be held out."""
        if np.isnan(self.held_out_error):
            return None
        return abs(self.held_out_error) < abs(self.naive_error)


def models(analysis: Analysis) -> list[ScalingModel]:
    """Return a model of every series that some law fits.

    Empty if no two configurations differ only in the number of ranks.
    """
    return models_of(series_of(analysis), pooled_spread(analysis))


def models_of(series: Sequence[ScalingSeries], common: Spread) -> list[ScalingModel]:
    """Return a model of one_series series, see `models`. common: spread used for series without repeats."""
    fits = _fit_all(series, common)
    tests = [
        _held_out(i, one_series, reduced_fits)
        for i, (one_series, reduced_fits) in enumerate(zip(series, _without_largest(series, common), strict=True))
    ]
    result: list[ScalingModel] = []
    for i, one_series in enumerate(series):
        similar = [k for k, other in enumerate(series) if _alike(other, one_series)]
        table = tests[i].merge(_residuals(fits[i]), on="law")
        choice = choose(fits[i], [tests[k] for k in similar])
        if choice is None:
            continue
        law, why = choice
        reasons = {name: f.reason for name, f in fits[i].items() if isinstance(f, NotIdentifiable)}
        table["reason"] = [
            reasons.get(name, later) for name, later in zip(table["law"], table["untested"], strict=True)
        ]
        table["chosen"] = table["law"] == law
        error = _law_error(law, [tests[k] for k in similar])
        chosen = fits[i][law]
        assert isinstance(chosen, Fit), "only a law that was fitted is chosen"
        spread = run_spread(one_series, chosen, [fits[k][law] for k in similar], common)
        # Likelihoods are comparable only over the same points.
        peers = [k for k in similar if _fitted(fits[k]) == _fitted(fits[i])]
        spreads = [s if (s := series[k].spread()).degrees > 0 else spread for k in peers]
        weights = akaike_weights([series[k] for k in peers], [fits[k] for k in peers], spreads)
        result.append(
            ScalingModel(i, one_series, fits[i], law, why, table.reindex(columns=LAW_COLUMNS), error, spread, weights)
        )
    return result


def _fitted(fits: Fits) -> list[str]:
    return [name for name, law_fit in fits.items() if isinstance(law_fit, Fit)]


def choose(fits: Fits, tests: Sequence[pd.DataFrame]) -> tuple[str, str] | None:
    """Return the law for a series with these fits, and the reason; None if no law could be fitted.

    The law has the smallest mean absolute held-out error (log scale) over all series in `tests`. Only laws tested at
    the most points are compared. If nothing could be held out, it is the first of `LAWS` that fits the points.
    """
    fitted = _fitted(fits)
    if not fitted:
        return None
    errors = pd.concat(tests).dropna(subset="held_out_error")
    errors = errors[errors["law"].isin(fitted)]
    if len(errors):
        sizes = np.log1p(errors["held_out_error"]).abs().groupby(errors["law"]).agg(["mean", "size"])
        compared = sizes[sizes["size"] == sizes["size"].max()]["mean"]
        order = [name for name in fitted if name in compared.index]
        law = min(order, key=lambda name: float(compared[name]))
        count = int(sizes["size"].max())
        points = "the held-out point" if count == 1 else f"the {count} held-out points of similar series"
        return law, f"smallest error on {points}"
    close = [name for name in fitted if _is_close(fits[name])] or fitted
    return close[0], "nothing could be held out; first law in order of preference that fits the points"


def predict(
    model: ScalingModel,
    sizes: Sequence[int],
    *,
    nodes: Sequence[int] | None = None,
    links: Interconnects | None = None,
) -> pd.DataFrame:
    """Predict the series on these numbers of ranks: one row each, with `ROW_COLUMNS`.

    Intervals are for the step time of a new run (95 %), see `interval`; NaN if no spread is known. too_wide: they
    exceed `WIDEST`. efficiency: predicted throughput over the measured one of the smallest number of ranks, divided by
    the ratio of ranks.
    """
    points = model.series.at(sizes, nodes, links)
    low, high = interval(model, points)
    first = model.series.points.iloc[0]
    measured = model.series.points.set_index("world_size")["step_s"]
    frame = pd.DataFrame(
        {
            "series": model.number,
            "law": model.law,
            "world_size": sizes,
            "nodes": nodes if nodes is not None else 1,
            "batch_per_gpu": points.batch_per_gpu,
            "global_batch": points.batch_per_gpu * points.world_size,
            "step_s": model.chosen.step_s(points),
            "step_s_low": np.exp(low),
            "step_s_high": np.exp(high),
            "measured_step_s": [measured.get(size, np.nan) for size in sizes],
        }
    )
    return with_throughput(frame, float(first["throughput_samples_per_s"]), int(first["world_size"]))


def with_throughput(frame: pd.DataFrame, reference: float, reference_world_size: int) -> pd.DataFrame:
    """Add throughput and efficiency to predicted steps.

    reference: measured throughput of the smallest number of ranks, in samples/s.
    """
    for end, of_step in (("", ""), ("_low", "_high"), ("_high", "_low")):
        frame[f"throughput_samples_per_s{end}"] = frame["global_batch"] / frame[f"step_s{of_step}"]
        speed_up = frame[f"throughput_samples_per_s{end}"] / reference
        frame[f"efficiency{end}"] = speed_up * reference_world_size / frame["world_size"]
    above, below = frame["step_s_high"] / frame["step_s"], frame["step_s"] / frame["step_s_low"]
    frame["too_wide"] = (above > WIDEST) | (below > WIDEST)
    return frame[ROW_COLUMNS]


def without(models_: Sequence[ScalingModel], world_size: int, common: Spread) -> list[ScalingModel]:
    """Refit the series as if `world_size` had not been measured.

    Series with fewer than two remaining sizes are dropped.
    """
    remaining: list[tuple[int, ScalingSeries]] = []
    for model in models_:
        if len(model.series.points) > 2:
            series = model.series.only([size for size in model.series.sizes if size != world_size])
            remaining.append((model.number, series))
    remaining = [(number, series) for number, series in remaining if len(series.points) >= 2]
    refitted = models_of([series for _, series in remaining], common)
    return [replace(model, number=remaining[model.number][0]) for model in refitted]


def _alike(a: ScalingSeries, b: ScalingSeries) -> bool:
    return (a.interconnect, a.scaling) == (b.interconnect, b.scaling)


def _fit_all(series: Sequence[ScalingSeries], common: Spread) -> list[Fits]:
    """Fit every law to every series. ScalingSeries of one group share the fit of a joint law."""
    joint: dict[tuple[int, str, str], Fits] = {}
    for key in dict.fromkeys((one_series.group, one_series.interconnect, one_series.scaling) for one_series in series):
        members = [
            one_series
            for one_series in series
            if (one_series.group, one_series.interconnect, one_series.scaling) == key
        ]
        joint[key] = {name: _fit(name, members, common) for name, law in LAWS.items() if law.joint}
    return [
        {
            **{name: _fit(name, [one_series], common) for name, law in LAWS.items() if not law.joint},
            **joint[(one_series.group, one_series.interconnect, one_series.scaling)],
        }
        for one_series in series
    ]


def _fit(name: str, series: Sequence[ScalingSeries], common: Spread) -> Fit | NotIdentifiable:
    law = LAWS[name]
    if law.joint and len({batch for one_series in series for batch in one_series.measured.batch_per_gpu}) < 2:
        return NotIdentifiable(law, "not identifiable: needs a second batch size")
    parts = [one_series.measured for one_series in series]
    points = Points(
        *(np.concatenate([getattr(part, field) for part in parts]) for field in Points.__dataclass_fields__)
    )
    rows = pd.concat([one_series.points for one_series in series])
    result = fit(law, points, rows["log_step"].to_numpy(dtype=float), rows["n"].to_numpy(dtype=float), pooled(rows))
    if isinstance(result, Fit) and not result.spread.degrees > 0:
        return replace(result, spread=common, run_spread=common)
    return result


def _without_largest(series: Sequence[ScalingSeries], common: Spread) -> list[Fits]:
    """Fit all laws without the largest number of ranks of one_series series.

    Empty for series with fewer than two remaining sizes.
    """
    reduced = {
        i: one_series.only(one_series.sizes[:-1]) for i, one_series in enumerate(series) if len(one_series.points) > 2
    }
    fitted = dict(zip(reduced, _fit_all(list(reduced.values()), common), strict=True))
    return [fitted.get(i, {}) for i in range(len(series))]


def _held_out(number: int, series: ScalingSeries, fits: Fits) -> pd.DataFrame:
    """Compare the laws fitted without the largest number of ranks with its measurement.

    One row per law; errors are NaN if a law could not be tested.
    """
    last = series.points.iloc[-1]
    size = int(last["world_size"])
    rows = []
    for name in LAWS:
        row = {"series": number, "law": name, "held_out_world_size": np.nan, "held_out_error": np.nan}
        law_fit = fits.get(name)
        rest = series.only(series.sizes[:-1]) if len(series.points) > 2 else None
        naive = np.nan
        if rest is not None:
            row["held_out_world_size"] = size
            naive = float(np.exp(_naive_log_step(series) - last["log_step"]) - 1)
            if isinstance(law_fit, Fit):
                at = rest.at([size], [int(last["nodes"])])
                error = float(np.log(law_fit.step_s(at)[0]) - last["log_step"])
                noise = law_fit.run_spread.variance * (law_fit.leverage(at)[0] + 1 / last["n"])
                row |= {"held_out_error": np.expm1(error), "noise": noise}
                row["distance"] = np.log(size / rest.sizes[-1])
            elif law_fit is not None:
                row["untested"] = f"not tested: without {size} ranks {law_fit.reason}"
        rows.append(row | {"naive_error": naive})
    return (
        pd.DataFrame(rows, dtype=object)
        .infer_objects()
        .reindex(
            columns=[
                "series",
                "law",
                "held_out_world_size",
                "held_out_error",
                "naive_error",
                "noise",
                "distance",
                "untested",
            ]  # fmt: skip
        )
    )


def _naive_log_step(series: ScalingSeries) -> float:
    """Return the log step on the largest number of ranks if throughput grew in proportion to the ranks."""
    first, last = series.points.iloc[0], series.points.iloc[-1]
    return float(first["log_step"] + np.log(last["batch_per_gpu"] / first["batch_per_gpu"]))


def _residuals(fits: Fits) -> pd.DataFrame:
    """Return the root mean square of log(measured / fitted) of each law; NaN if it was not fitted."""
    rms = {
        name: float(np.sqrt(np.mean(np.square(f.residuals)))) if isinstance(f, Fit) else np.nan
        for name, f in fits.items()
    }
    return pd.DataFrame({"law": list(rms), "residual": list(rms.values())})


def _is_close(law_fit: Fit | NotIdentifiable) -> bool:
    if not isinstance(law_fit, Fit):
        return False
    spread = np.sqrt(law_fit.spread.variance) if law_fit.lack_of_fit is False else 0.0
    return bool(np.abs(law_fit.residuals).max() <= max(CLOSE_FIT, 2 * spread))


def _law_error(law: str, tests: Sequence[pd.DataFrame]) -> LawError | None:
    rows = pd.concat(tests)
    rows = rows[rows["law"] == law].dropna(subset="held_out_error")
    if rows.empty:
        return None
    squares = np.log1p(rows["held_out_error"]).pow(2)
    beyond_noise = max(0.0, float((squares - rows["noise"].fillna(0.0)).mean()))
    return LawError(beyond_noise, float(rows["distance"].mean()), float(len(rows)))


def interval(model: ScalingModel, points: Points) -> tuple[Array, Array]:
    """Return the ends of the 95 % interval of the log step of a new run, each of shape (points,).

    It covers two intervals. The first is that of the chosen law: uncertainty of its parameters, spread of one run, and
    its held-out error, see `LawError` (degrees of freedom by Welch and Satterthwaite). The second is
    `averaged_interval` over the laws defined at these points. In weak scaling, more ranks cannot be faster than fewer.
    The lower end is therefore at least the smallest measured or fitted step, minus the uncertainty of one run there.
    """
    middle = np.log(model.chosen.step_s(points))
    half = _half_of_chosen(model, points)
    laws = [
        (f, w)
        for name, w in model.weights.items()
        if isinstance(f := model.fits[name], Fit) and not f.law.missing_input(points)
    ]
    low, high = averaged_interval([f for f, _ in laws], [w for _, w in laws], points, model.run_spread)
    low, high = np.minimum(middle - half, low), np.maximum(middle + half, high)
    if model.series.scaling == WEAK:
        fewest = model.series.measured[:1]
        fastest = min(float(np.log(model.chosen.step_s(fewest)[0])), float(model.series.log_step().min()))
        t = stdtrit(model.run_spread.degrees, 0.5 + CONFIDENCE / 2)
        least = fastest - t * np.sqrt(model.run_spread.variance * (1 + model.chosen.leverage(fewest)[0]))
        low = np.maximum(low, np.minimum(least, middle))
    return low, high


def half_width(model: ScalingModel, points: Points) -> Array:
    """Return half of the width of `interval`."""
    low, high = interval(model, points)
    return np.asarray((high - low) / 2)


def _half_of_chosen(model: ScalingModel, points: Points) -> Array:
    noise = model.run_spread.variance * (1 + model.chosen.leverage(points))
    law, law_degrees = np.zeros(len(noise)), np.inf
    if model.law_error is not None:
        sizes = np.array(model.series.sizes)
        distance = np.abs(np.log(points.world_size[:, None] / sizes)).min(axis=1)
        law = model.law_error.variance * (distance / model.law_error.at) ** 2
        law_degrees = model.law_error.degrees
    total = noise + law
    with np.errstate(divide="ignore", invalid="ignore"):
        degrees = total**2 / (noise**2 / model.run_spread.degrees + law**2 / law_degrees)
        t = stdtrit(np.where(total > 0, degrees, 1.0), 0.5 + CONFIDENCE / 2)
    return np.asarray(t * np.sqrt(total))
