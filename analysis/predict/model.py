"""Predict numbers of ranks that were not measured: laws for each series, weighted, with their held-out error.

All laws are fitted to a series, and its prediction is their average on the logarithm, weighted by `akaike_weights`. The
error is nested: the largest number of ranks is held out, the laws are fitted and weighted without it, and their average
is compared with its measurement. The baseline is the naive "throughput x N": the throughput of the smallest number of
ranks, multiplied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from analysis.compare.scaling import WEAK
from analysis.predict.fit import UNKNOWN, Fit, NotIdentifiable, Spread, fit
from analysis.predict.intervals import LAW_ERROR, akaike_weights, averaged_interval, run_spread
from analysis.predict.laws import LAWS, Array, Points
from analysis.predict.series import Interconnects, ScalingSeries, run_spreads, series_of
from analysis.statistics import CONFIDENCE
from analysis.study import Analysis

Fits = Mapping[str, Fit | NotIdentifiable]
Spreads = Mapping[bool, Spread]

NO_REPEATS: Spreads = {False: UNKNOWN, True: UNKNOWN}

WIDEST = 2.0
"""Twice the ranks at best double the throughput. An interval that exceeds this factor in either direction cannot tell
whether more ranks help, and is not resolved.
"""

LAW_COLUMNS = ["series", "law", "weight", "held_out_world_size", "held_out_error", "residual", "reason"]

ROW_COLUMNS = [
    "series", "world_size", "nodes", "batch_per_gpu", "global_batch", "step_s", "step_s_low", "step_s_high",
    "throughput_samples_per_s", "throughput_samples_per_s_low", "throughput_samples_per_s_high", "efficiency",
    "efficiency_low", "efficiency_high", "not_resolved", "measured_step_s",
]  # fmt: skip


@dataclass(frozen=True)
class HeldOut:
    """Prediction of the largest number of ranks without it.

    errors: predicted / measured - 1 of each law. error: of their average. naive_error: of throughput x N. noise:
    variance of log(predicted / measured) due to the spread of runs. distance: log(N / largest remaining number of
    ranks). reasons: of laws that could not be fitted.
    """

    world_size: int
    errors: Mapping[str, float]
    error: float
    naive_error: float
    noise: float
    distance: float
    reasons: Mapping[str, str]


@dataclass(frozen=True)
class ScalingModel:
    """A series with its laws.

    fits: every law, fitted to all points. weights: of the fitted ones, see `akaike_weights`. held_out: None for fewer
    than three numbers of ranks. run_spread: of the log step of one run. law_error: variance of the log step at twice
    the measured number of ranks because no law is exact.
    """

    number: int
    series: ScalingSeries
    fits: Fits
    weights: Mapping[str, float]
    held_out: HeldOut | None
    run_spread: Spread
    law_error: float

    @property
    def law(self) -> str:
        """Return the law with the largest weight."""
        return max(self.weights, key=lambda name: self.weights[name])

    @property
    def chosen(self) -> Fit:
        """Return the fit of the law with the largest weight."""
        law_fit = self.fits[self.law]
        assert isinstance(law_fit, Fit), "only fitted laws have a weight"
        return law_fit

    @property
    def held_out_error(self) -> float:
        """Return predicted / measured - 1 of the held-out point; NaN if nothing could be held out."""
        return self.held_out.error if self.held_out else float("nan")

    @property
    def naive_error(self) -> float:
        return self.held_out.naive_error if self.held_out else float("nan")

    @property
    def beats_naive(self) -> bool | None:
        """Return True if the laws are more accurate than the naive baseline; None if nothing could be held out."""
        return abs(self.held_out.error) < abs(self.held_out.naive_error) if self.held_out else None

    def laws_at(self, points: Points) -> tuple[list[Fit], list[float]]:
        """Return the laws that are defined at these points, and their weights, which add up to 1.

        If the points lie on several nodes and all measured ones on one, only laws that know the interconnect count.
        """
        assert points.nodes is not None
        is_new_link = points.nodes.max() > 1 and self.series.points["nodes"].max() == 1
        defined = [
            (law_fit, weight)
            for name, weight in self.weights.items()
            if isinstance(law_fit := self.fits[name], Fit) and not law_fit.law.missing_input(points)
            if law_fit.law.knows_link or not is_new_link
        ]
        total = sum(weight for _, weight in defined)
        return [law_fit for law_fit, _ in defined], [weight / total for _, weight in defined]

    def knows_network(self, size: int, nodes: int) -> bool:
        """Return True if some law predicts `size` ranks over several nodes from measurements over several nodes."""
        return self.series.knows_network and bool(self.laws_at(self.series.at([size], [nodes]))[0])

    def log_step(self, points: Points) -> Array:
        """Return the predicted log step: the average over laws, of shape (points,)."""
        laws, weights = self.laws_at(points)
        return np.asarray(np.array(weights) @ np.log([law_fit.step_s(points) for law_fit in laws]))

    def law_table(self) -> pd.DataFrame:
        """Return one row per law with `LAW_COLUMNS`; residual: root mean square of log(measured / fitted)."""
        rows = []
        for name, law_fit in self.fits.items():
            row: dict[str, object] = {"series": self.number, "law": name, "weight": self.weights.get(name, 0.0)}
            if isinstance(law_fit, Fit):
                row["residual"] = float(np.sqrt(np.mean(np.square(law_fit.residuals))))
            else:
                row["reason"] = law_fit.reason
            if self.held_out:
                size = self.held_out.world_size
                row |= {"held_out_world_size": size, "held_out_error": self.held_out.errors.get(name, np.nan)}
                if name in self.held_out.reasons and "reason" not in row:
                    row["reason"] = f"not tested: without {size} ranks {self.held_out.reasons[name]}"
            rows.append(row)
        return pd.DataFrame(rows).reindex(columns=LAW_COLUMNS)


def models(analysis: Analysis) -> list[ScalingModel]:
    """Return a model of every series that some law fits.

    Empty if no two configurations differ only in the number of ranks.
    """
    return models_of(series_of(analysis), run_spreads(analysis))


def models_of(series: Sequence[ScalingSeries], repeats: Spreads = NO_REPEATS) -> list[ScalingModel]:
    """Return a model of each series, see `models`. repeats: see `series.run_spreads`."""
    result: list[ScalingModel] = []
    for i, one_series in enumerate(series):
        spread = run_spread(repeats[one_series.spreads_with_host], one_series.spreads_with_host)
        fits = {name: _fit(name, one_series, spread) for name in LAWS}
        weights = akaike_weights(one_series, fits, spread)
        if weights:
            held_out = _held_out(one_series, spread)
            result.append(ScalingModel(i, one_series, fits, weights, held_out, spread, LAW_ERROR.variance))
    return [replace(model, law_error=_law_error([m for m in result if _alike(m, model)])) for model in result]


def predict(
    model: ScalingModel,
    sizes: Sequence[int],
    *,
    nodes: Sequence[int] | None = None,
    links: Interconnects | None = None,
) -> pd.DataFrame:
    """Predict the series on these numbers of ranks: one row each, with `ROW_COLUMNS`.

    Intervals are for the step time of a new run (95 %), see `interval`; NaN and not_resolved if they exceed `WIDEST`.
    efficiency: predicted throughput over the measured one of the smallest number of ranks, divided by the ratio of
    ranks.
    """
    points = model.series.at(sizes, nodes, links)
    low, high = interval(model, points)
    first = model.series.points.iloc[0]
    measured = model.series.points.set_index("world_size")["step_s"]
    frame = pd.DataFrame(
        {
            "series": model.number,
            "world_size": sizes,
            "nodes": nodes if nodes is not None else 1,
            "batch_per_gpu": points.batch_per_gpu,
            "global_batch": [model.series.global_batch(size) for size in sizes],
            "step_s": np.exp(model.log_step(points)),
            "step_s_low": np.exp(low),
            "step_s_high": np.exp(high),
            "measured_step_s": [measured.get(size, np.nan) for size in sizes],
        }
    )
    return with_throughput(frame, float(first["throughput_samples_per_s"]), int(first["world_size"]))


def with_throughput(frame: pd.DataFrame, reference: float, reference_world_size: int) -> pd.DataFrame:
    """Add throughput and efficiency to predicted steps, and drop intervals that are not resolved.

    reference: measured throughput of the smallest number of ranks, in samples/s.
    """
    above, below = frame["step_s_high"] / frame["step_s"], frame["step_s"] / frame["step_s_low"]
    frame["not_resolved"] = (above > WIDEST) | (below > WIDEST)
    for end in ("_low", "_high"):
        frame[f"step_s{end}"] = frame[f"step_s{end}"].mask(frame["not_resolved"])
    for end, of_step in (("", ""), ("_low", "_high"), ("_high", "_low")):
        frame[f"throughput_samples_per_s{end}"] = frame["global_batch"] / frame[f"step_s{of_step}"]
        speed_up = frame[f"throughput_samples_per_s{end}"] / reference
        frame[f"efficiency{end}"] = speed_up * reference_world_size / frame["world_size"]
    return frame[ROW_COLUMNS]


def without(models_: Sequence[ScalingModel], world_size: int, repeats: Spreads) -> list[ScalingModel]:
    """Refit the series as if `world_size` had not been measured.

    Series with fewer than two remaining sizes are dropped.
    """
    remaining: list[tuple[int, ScalingSeries]] = []
    for model in models_:
        if len(model.series.points) > 2:
            series = model.series.only([size for size in model.series.sizes if size != world_size])
            remaining.append((model.number, series))
    remaining = [(number, series) for number, series in remaining if len(series.points) >= 2]
    refitted = models_of([series for _, series in remaining], repeats)
    return [replace(model, number=remaining[model.number][0]) for model in refitted]


def interval(model: ScalingModel, points: Points) -> tuple[Array, Array]:
    """Return the ends of the 95 % interval of the log step of a new run, each of shape (points,).

    See `averaged_interval`. The error of the laws grows with the logarithmic distance from the measured numbers of
    ranks. In weak scaling, more ranks cannot be faster than fewer. The lower end is therefore at least the smallest
    measured or fitted step, minus the uncertainty of one run there.
    """
    laws, weights = model.laws_at(points)
    sizes = np.array(model.series.sizes)
    doublings = np.abs(np.log2(points.world_size[:, None] / sizes)).min(axis=1)
    low, high = averaged_interval(laws, weights, points, model.run_spread, model.law_error * doublings**2)
    if model.series.scaling == WEAK:
        fewest = model.series.measured[:1]
        fastest = min(float(model.log_step(fewest)[0]), float(model.series.log_step().min()))
        t = stdtrit(model.run_spread.degrees, 0.5 + CONFIDENCE / 2)
        least = fastest - t * np.sqrt(model.run_spread.variance * (1 + model.chosen.leverage(fewest)[0]))
        low = np.maximum(low, np.minimum(least, model.log_step(points)))
    return low, high


def half_width(model: ScalingModel, points: Points) -> Array:
    """Return half of the width of `interval`."""
    low, high = interval(model, points)
    return np.asarray((high - low) / 2)


def _fit(name: str, series: ScalingSeries, spread: Spread) -> Fit | NotIdentifiable:
    return fit(LAWS[name], series.measured, series.log_step(), series.points["n"].to_numpy(dtype=float), spread)


def _held_out(series: ScalingSeries, spread: Spread) -> HeldOut | None:
    """Predict the largest number of ranks from the others; None if fewer than two others remain."""
    if len(series.points) < 3:
        return None
    rest, last = series.only(series.sizes[:-1]), series.points.iloc[-1]
    size = int(last["world_size"])
    fits = {name: _fit(name, rest, spread) for name in LAWS}
    model = ScalingModel(0, rest, fits, akaike_weights(rest, fits, spread), None, spread, 0.0)
    at = rest.at([size], [int(last["nodes"])])
    laws, weights = model.laws_at(at)
    if not laws:
        return None
    errors = {
        name: float(law_fit.step_s(at)[0] / np.exp(last["log_step"]) - 1)
        for name, law_fit in fits.items()
        if isinstance(law_fit, Fit) and not law_fit.law.missing_input(at)
    }
    leverage = float(np.dot(weights, [law_fit.leverage(at)[0] for law_fit in laws]))
    return HeldOut(
        size,
        errors,
        float(np.exp(model.log_step(at)[0] - last["log_step"]) - 1),
        float(np.exp(_naive_log_step(series) - last["log_step"]) - 1),
        spread.variance * (leverage + 1 / float(last["n"])),
        float(np.log(size / rest.sizes[-1])),
        {name: f.reason for name, f in fits.items() if isinstance(f, NotIdentifiable)},
    )


def _naive_log_step(series: ScalingSeries) -> float:
    """Return the log step on the largest number of ranks if throughput grew in proportion to the ranks."""
    first, last = series.sizes[0], series.sizes[-1]
    return float(series.log_step()[0] + np.log(series.batch(last) / series.batch(first)))


def _alike(a: ScalingModel, b: ScalingModel) -> bool:
    keys = [(m.series.interconnect, m.series.scaling, m.series.host_bound) for m in (a, b)]
    return keys[0] == keys[1]


def _law_error(alike: Sequence[ScalingModel]) -> float:
    """Return the variance of the log step at twice the ranks that the laws of these series miss.

    It is that of other studies, `LAW_ERROR`, updated by the held-out errors beyond what runs spread.
    """
    tests = [model.held_out for model in alike if model.held_out]
    excess = sum((np.log1p(test.error) ** 2 - test.noise) * (np.log(2) / test.distance) ** 2 for test in tests)
    return float((LAW_ERROR.degrees * LAW_ERROR.variance + max(0.0, excess)) / (LAW_ERROR.degrees + len(tests)))
