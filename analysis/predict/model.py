"""What numbers of ranks that were not measured would do: a law for each series, its held-out error, and its predictions.

The law is chosen by prediction, not by fit: the largest number of ranks of each series is left out, every law is fitted
to the rest and asked about it. The series over one interconnect share the choice, for one held-out point alone says
little; so the error shown is a little kinder than that of a law named before, and intervals reach over all laws that pass
the points (`averaging`). Beside it stands the error of the naive "throughput x N", which multiplies the throughput of the
smallest number of ranks.
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
from analysis.predict.series import Links, Series, pooled, series_of
from analysis.statistics import CONFIDENCE
from analysis.study import Analysis

Fits = Mapping[str, Fit | NotIdentifiable]

CLOSE = 0.01
"""A law that passes the measured points within 1 %, or within twice their spread, fits them."""

WIDEST = 2.0
"""Twice the ranks at best double the throughput: an interval that reaches beyond this factor, either way, cannot tell
whether they bring anything, and is too wide to use."""

LAW_COLUMNS = ["series", "law", "held_out_world_size", "held_out_error", "naive_error", "residual", "reason", "chosen"]

ROW_COLUMNS = [
    "series", "law", "world_size", "nodes", "batch_per_gpu", "global_batch", "step_s", "step_s_low", "step_s_high",
    "throughput_samples_per_s", "throughput_samples_per_s_low", "throughput_samples_per_s_high", "efficiency",
    "efficiency_low", "efficiency_high", "too_wide", "measured_step_s",
]  # fmt: skip


@dataclass(frozen=True)
class LawError:
    """How far the law was off where it was asked about a point held out.

    variance: of the log of the step; at: distance of what it was seen at from the points fitted, log of the ratio of
    numbers of ranks. degrees: points held out. Further away it grows with that distance.
    """

    variance: float
    at: float
    degrees: float


@dataclass(frozen=True)
class Model:
    """A series with the law that was chosen for it.

    fits: every law fitted to all points. held_out: a row a law, with `LAW_COLUMNS`. why: the reason of the choice.
    law_error: None where nothing could be held out. run_spread: of the log of one run's step, see `run_spread`. weights: of the fitted laws, see `akaike_weights`.
    """

    number: int
    series: Series
    fits: Fits
    law: str
    why: str
    held_out: pd.DataFrame
    law_error: LawError | None
    run_spread: Spread
    weights: Mapping[str, float]

    @property
    def chosen(self) -> Fit:
        found = self.fits[self.law]
        assert isinstance(found, Fit), "only a law that was fitted is chosen"
        return found

    @property
    def held_out_error(self) -> float:
        """Of the chosen law: predicted / measured - 1; NaN where nothing could be held out."""
        return float(self.held_out.loc[self.held_out["law"] == self.law, "held_out_error"].iloc[0])

    @property
    def naive_error(self) -> float:
        return float(self.held_out["naive_error"].iloc[0])

    @property
    def beats_naive(self) -> bool | None:
        """None where nothing could be held out."""
        if np.isnan(self.held_out_error):
            return None
        return abs(self.held_out_error) < abs(self.naive_error)


def models(analysis: Analysis) -> list[Model]:
    """A model of every series that some law can be fitted to; empty where no two numbers of ranks compare."""
    return models_of(series_of(analysis), pooled_spread(analysis))


def models_of(series: Sequence[Series], common: Spread) -> list[Model]:
    """See `models`. common: spread of repeats anywhere in the study, for series without any of their own."""
    fits = _fit_all(series, common)
    tests = [_held_out(i, each, left) for (i, each), left in zip(enumerate(series), _without_largest(series, common))]
    found: list[Model] = []
    for i, each in enumerate(series):
        like = [k for k, other in enumerate(series) if _alike(other, each)]
        table = tests[i].merge(_residuals(fits[i]), on="law")
        choice = choose(fits[i], [tests[k] for k in like])
        if choice is None:
            continue
        law, why = choice
        reasons = {name: f.reason for name, f in fits[i].items() if isinstance(f, NotIdentifiable)}
        table["reason"] = [
            reasons.get(name, later) for name, later in zip(table["law"], table["untested"], strict=True)
        ]
        table["chosen"] = table["law"] == law
        error = _law_error(law, [tests[k] for k in like])
        chosen = fits[i][law]
        assert isinstance(chosen, Fit), "only a law that was fitted is chosen"
        spread = run_spread(each, chosen, [fits[k][law] for k in like], common)
        peers = [
            k for k in like if _fitted(fits[k]) == _fitted(fits[i])
        ]  # likelihoods compare over the same points only
        of_runs = [s if (s := series[k].spread()).degrees > 0 else spread for k in peers]
        weights = akaike_weights([series[k] for k in peers], [fits[k] for k in peers], of_runs)
        found.append(Model(i, each, fits[i], law, why, table.reindex(columns=LAW_COLUMNS), error, spread, weights))
    return found


def _fitted(fits: Fits) -> list[str]:
    return [name for name, found in fits.items() if isinstance(found, Fit)]


def choose(fits: Fits, tests: Sequence[pd.DataFrame]) -> tuple[str, str] | None:
    """The law for a series with these fits, and why: least mean of absolute held-out errors, on the logarithm, over all series in `tests`.

    Only laws that were tested wherever any was are compared. Where nothing could be held out: the first of `LAWS` that
    fits the points. None where no law can be fitted.
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
        over = "the held-out point" if count == 1 else f"the {count} held-out points of series like it"
        return law, f"least error on {over}"
    close = [name for name in fitted if _fits(fits[name])] or fitted
    return close[0], "nothing could be held out; first in order of preference of the laws that pass the points"


def predict(
    model: Model,
    sizes: Sequence[int],
    *,
    nodes: Sequence[int] | None = None,
    links: Links | None = None,
) -> pd.DataFrame:
    """The series on so many ranks: a row for each, with `ROW_COLUMNS`.

    Intervals are for the step time of a new run (95 %), see `interval`; too_wide: they reach beyond `WIDEST`. NaN where no
    spread is known. efficiency: predicted throughput over the measured one of the smallest number of ranks, times the ratio
    of their numbers.
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
    """Throughput and efficiency of predicted steps, against the measured throughput of the smallest number of ranks."""
    for end, of_step in (("", ""), ("_low", "_high"), ("_high", "_low")):
        frame[f"throughput_samples_per_s{end}"] = frame["global_batch"] / frame[f"step_s{of_step}"]
        speed_up = frame[f"throughput_samples_per_s{end}"] / reference
        frame[f"efficiency{end}"] = speed_up * reference_world_size / frame["world_size"]
    above, below = frame["step_s_high"] / frame["step_s"], frame["step_s"] / frame["step_s_low"]
    frame["too_wide"] = (above > WIDEST) | (below > WIDEST)
    return frame[ROW_COLUMNS]


def without(models_: Sequence[Model], world_size: int, common: Spread) -> list[Model]:
    """The same series as if `world_size` had not been measured; those left with two sizes or more."""
    rest = [each.series.only([size for size in each.series.sizes if size != world_size]) for each in _with(models_, 2)]
    numbers = [each.number for each in _with(models_, 2)]
    kept = [(n, each) for n, each in zip(numbers, rest, strict=True) if len(each.points) >= 2]
    found = models_of([each for _, each in kept], common)
    return [replace(model, number=kept[model.number][0]) for model in found]


def _with(models_: Sequence[Model], least: int) -> list[Model]:
    return [model for model in models_ if len(model.series.points) > least]


def _alike(a: Series, b: Series) -> bool:
    return (a.interconnect, a.scaling) == (b.interconnect, b.scaling)


def _fit_all(series: Sequence[Series], common: Spread) -> list[Fits]:
    """Every law on every series; joint ones once for each group, whose fit all its series share."""
    joint: dict[tuple[int, str, str], Fits] = {}
    for key in dict.fromkeys((each.group, each.interconnect, each.scaling) for each in series):
        members = [each for each in series if (each.group, each.interconnect, each.scaling) == key]
        joint[key] = {name: _fit(name, members, common) for name, law in LAWS.items() if law.joint}
    return [
        {
            **{name: _fit(name, [each], common) for name, law in LAWS.items() if not law.joint},
            **joint[(each.group, each.interconnect, each.scaling)],
        }
        for each in series
    ]


def _fit(name: str, series: Sequence[Series], common: Spread) -> Fit | NotIdentifiable:
    law = LAWS[name]
    if law.joint and len({batch for each in series for batch in each.measured.batch_per_gpu}) < 2:
        return NotIdentifiable(law, "not identifiable: needs a second batch size")
    parts = [each.measured for each in series]
    points = Points(
        *(np.concatenate([getattr(part, field) for part in parts]) for field in Points.__dataclass_fields__)
    )
    rows = pd.concat([each.points for each in series])
    found = fit(law, points, rows["log_step"].to_numpy(dtype=float), rows["n"].to_numpy(dtype=float), pooled(rows))
    if isinstance(found, Fit) and not found.spread.degrees > 0:
        return replace(found, spread=common, run_spread=common)
    return found


def _without_largest(series: Sequence[Series], common: Spread) -> list[Fits]:
    """`_fit_all` without the largest number of ranks of each series; nothing where fewer than two sizes would be left."""
    left = {i: each.only(each.sizes[:-1]) for i, each in enumerate(series) if len(each.points) > 2}
    fitted = dict(zip(left, _fit_all(list(left.values()), common), strict=True))
    return [fitted.get(i, {}) for i in range(len(series))]


def _held_out(number: int, series: Series, fits: Fits) -> pd.DataFrame:
    """What laws fitted without the largest number of ranks say about it; a row a law, errors NaN where one cannot."""
    last = series.points.iloc[-1]
    size = int(last["world_size"])
    rows = []
    for name in LAWS:
        row = {"series": number, "law": name, "held_out_world_size": np.nan, "held_out_error": np.nan}
        found = fits.get(name)
        rest = series.only(series.sizes[:-1]) if len(series.points) > 2 else None
        naive = np.nan
        if rest is not None:
            row["held_out_world_size"] = size
            naive = float(np.exp(_naive_log_step(series) - last["log_step"]) - 1)
            if isinstance(found, Fit):
                at = rest.at([size], [int(last["nodes"])])
                error = float(np.log(found.step_s(at)[0]) - last["log_step"])
                noise = found.run_spread.variance * (found.leverage(at)[0] + 1 / last["n"])
                row |= {"held_out_error": np.expm1(error), "noise": noise}
                row["distance"] = np.log(size / rest.sizes[-1])
            elif found is not None:
                row["untested"] = f"not tested: without {size} ranks {found.reason}"
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
            ]
        )
    )


def _naive_log_step(series: Series) -> float:
    """Log of the step on the largest number of ranks if the throughput of the smallest grew with their number."""
    first, last = series.points.iloc[0], series.points.iloc[-1]
    return float(first["log_step"] + np.log(last["batch_per_gpu"] / first["batch_per_gpu"]))


def _residuals(fits: Fits) -> pd.DataFrame:
    """Root mean square of log(measured / fitted) of each law, NaN where it was not fitted."""
    found = {
        name: float(np.sqrt(np.mean(np.square(f.residuals)))) if isinstance(f, Fit) else np.nan
        for name, f in fits.items()
    }
    return pd.DataFrame({"law": list(found), "residual": list(found.values())})


def _fits(found: Fit | NotIdentifiable) -> bool:
    if not isinstance(found, Fit):
        return False
    spread = np.sqrt(found.spread.variance) if found.misfit is False else 0.0
    return bool(np.abs(found.residuals).max() <= max(CLOSE, 2 * spread))


def _law_error(law: str, tests: Sequence[pd.DataFrame]) -> LawError | None:
    rows = pd.concat(tests)
    rows = rows[rows["law"] == law].dropna(subset="held_out_error")
    if rows.empty:
        return None
    squares = np.log1p(rows["held_out_error"]).pow(2)
    beyond_noise = max(0.0, float((squares - rows["noise"].fillna(0.0)).mean()))
    return LawError(beyond_noise, float(rows["distance"].mean()), float(len(rows)))


def interval(model: Model, points: Points) -> tuple[Array, Array]:
    """Ends of the 95 % interval of the log of a new run's step, in seconds.

    From the lower to the upper end of two: the chosen law's (its parameters' uncertainty, the spread of one run, and its own
    error, see `LawError`; degrees of freedom by Welch and Satterthwaite), and `averaged_interval` over the laws that can
    be asked there. More ranks that hold the batch per rank cannot be quicker than fewer: the low end is not below the
    least of what was measured and of what the law says for the fewest, but for the uncertainty of one run there.
    """
    middle = np.log(model.chosen.step_s(points))
    half = _half_of_chosen(model, points)
    laws = [
        (f, w)
        for name, w in model.weights.items()
        if isinstance(f := model.fits[name], Fit) and not f.law.lacks(points)
    ]
    low, high = averaged_interval([f for f, _ in laws], [w for _, w in laws], points, model.run_spread)
    low, high = np.minimum(middle - half, low), np.maximum(middle + half, high)
    if model.series.scaling == WEAK:
        fewest = model.series.measured[:1]
        quickest = min(float(np.log(model.chosen.step_s(fewest)[0])), float(model.series.log_step().min()))
        t = stdtrit(model.run_spread.degrees, 0.5 + CONFIDENCE / 2)
        least = quickest - t * np.sqrt(model.run_spread.variance * (1 + model.chosen.leverage(fewest)[0]))
        low = np.maximum(low, np.minimum(least, middle))
    return low, high


def half_width(model: Model, points: Points) -> Array:
    """Half of `interval`."""
    low, high = interval(model, points)
    return np.asarray((high - low) / 2)


def _half_of_chosen(model: Model, points: Points) -> Array:
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
