"""How often do the report's 95 % intervals contain the true value, and how wide are they?

    python -m benchmarks.truth.coverage

Studies with known values are generated and analysed by the product's functions. Every configuration has the same true
value, and repeats spread by 1 % (sigma). Layouts are repeats per worker group: 2+1 and 3+2 are those of studies up to
November 2026, 1+1+1 and 1x5 those of studies with one group per repeat. Configurations 0 and 1, 2 and 3, ... are the
two sides of a speed-up. No training is measured.

Cases: groups differ by 0, 1 or 3 sigma, independently per configuration; "spreads differ": the sigma of a configuration
is log-normal (0.5), and with "groups too" also its differences between groups; "shared": a group shifts all
configurations alike; "outliers": 5 % of repeats are 6 sigma slow; 1 to 36 configurations; "two kinds": half of the
configurations are host-bound and spread 5 times as much, and a speed-up has one of each; "noisy": so many of 9, 4 or 3
spread 30 times as much, and are "known" to be host-bound; "missing": 10 % of the trials; "split": a failure starts
a new group in the middle of a repeat.

Goals: 94 to 97 % in every case. With five groups of one repeat, the median interval of a speed-up is at most 0.6 times
as wide as before, that is, with 2+1 repeats and an F test (5 %) that chose between groups and repeats as the sample.
That rule only exists here. Outliers also shift the true value, so that the cases with them test robustness.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import fdtrc, stdtrit

from analysis.statistics import intervals, ratios
from analysis.two_way import Array, Components, complete, components, independent
from benchmarks.harness.common import figure, write_summary

LOW, HIGH, NARROWER = 0.94, 0.97, 0.6
SIGMA, CONFIGURATIONS = 0.01, 16
FEWER = 4
"""Unbalanced studies need restricted likelihood, one study at a time, so there are fewer by this factor."""

FIELDS = ("variance", "degrees", "shift_share", "shift_variance", "shift_degrees", "residual_degrees")


@dataclass(frozen=True)
class Case:
    """A kind of study. layout: repeats per group. Spreads are in units of sigma; `name` says what the others are."""

    name: str
    layout: tuple[int, ...]
    between: float = 0.0
    shared: float = 0.0
    spreads_differ: bool = False
    groups_too: bool = False
    outliers: float = 0.0
    configurations: int = CONFIGURATIONS
    two_kinds: bool = False
    noisy: int = 0
    are_known: bool = False
    missing: float = 0.0
    split: bool = False

    @property
    def groups(self) -> tuple[int, ...]:
        """Return the repeats per group, with the group that a failure starts, if any."""
        return (*self.layout, self.layout[-1]) if self.split else self.layout


@dataclass(frozen=True)
class Outcome:
    """Coverage per study and median width (in sigma) of the intervals of values and of speed-ups."""

    value: Array
    speed_up: Array
    value_width: float
    speed_up_width: float


LAYOUTS = {"2+1": (2, 1), "3+2": (3, 2), "1+1+1": (1, 1, 1), "1x5": (1,) * 5}


def cases() -> list[Case]:
    """Return all cases, in the order of the summary."""
    kinds = {
        "equal groups": {},
        "groups differ by 1 sigma": {"between": 1.0},
        "groups differ by 3 sigma": {"between": 3.0},
        "1 sigma, spreads differ": {"between": 1.0, "spreads_differ": True},
        "3 sigma, spreads differ, groups too": {"between": 3.0, "spreads_differ": True, "groups_too": True},
        "shared by 1 sigma": {"shared": 1.0},
        "shared by 3 sigma": {"shared": 3.0},
        "5 % outliers": {"outliers": 0.05},
    }
    result = [
        Case(f"{label} repeats, {name}", layout, **kind)  # type: ignore[arg-type]
        for label, layout in LAYOUTS.items()
        for name, kind in kinds.items()
    ]
    for label in ("1+1+1", "1x5"):
        case = Case("", LAYOUTS[label], between=1.0)
        for count in (1, 2, 3, 4, 6, 8, 12, 24, 36):
            for differ in (False, True):
                name = f"{label} repeats, {count} configurations, 1 sigma{', spreads differ' if differ else ''}"
                result.append(replace(case, name=name, configurations=count, spreads_differ=differ))
        for shared in (0.0, 3.0):
            name = f"{label} repeats, two kinds, shared by {shared:.0f} sigma"
            result.append(Case(name, LAYOUTS[label], shared=shared, two_kinds=True))
        for noisy, of, known in (
            (1, 9, True), (2, 9, True), (1, 9, False), (2, 9, False), (3, 9, False), (1, 3, False), (1, 4, False)
        ):  # fmt: skip
            name = f"{label} repeats, {noisy} of {of} noisy{', known' if known else ''}"
            result.append(Case(name, LAYOUTS[label], configurations=of, shared=1.0, noisy=noisy, are_known=known))
        for shared in (0.0, 1.0, 3.0):
            name = f"{label} repeats, shared by {shared:.0f} sigma"
            result.append(Case(f"{name}, 10 % missing", LAYOUTS[label], shared=shared, missing=0.1))
            result.append(Case(f"{name}, one group split", LAYOUTS[label], shared=shared, split=True))
    return result


def repeats(case: Case, studies: int) -> tuple[Array, Array]:
    """Return the logs of all repeats [studies, configurations, repeats], and the true log per configuration."""
    rng = np.random.default_rng([studies, *case.name.encode()])
    count, layout = case.configurations, np.array(case.groups)
    group = np.repeat(np.arange(len(layout)), layout)
    spread = np.exp(0.5 * rng.standard_normal((studies, count))) if case.spreads_differ else np.ones((studies, count))
    spread = spread * np.where(case.two_kinds & (np.arange(count) % 2 == 1), 5.0, 1.0)
    spread = spread * np.where(np.arange(count) < case.noisy, 30.0, 1.0)
    logs = rng.standard_normal((studies, count, len(group)))
    logs -= 6.0 * (rng.random(logs.shape) < case.outliers)
    logs *= spread[..., None]
    between = case.between * rng.standard_normal((studies, count, len(layout)))
    logs += (between * spread[..., None] if case.groups_too else between)[..., group]
    logs += case.shared * rng.standard_normal((studies, 1, len(layout)))[..., group]
    return SIGMA * logs, -6.0 * SIGMA * case.outliers * np.ones(count)


def group_means(case: Case, logs: Array) -> Array:
    """Return the means of the groups [studies, configurations, groups], NaN for missing trials."""
    ends = np.cumsum(case.groups)
    means = np.stack(
        [logs[..., end - size : end].mean(axis=-1) for end, size in zip(ends, case.groups, strict=True)], axis=-1
    )
    rng = np.random.default_rng([len(means), *case.name.encode(), 1])
    if case.missing:
        means[rng.random(means.shape) < case.missing] = np.nan
    if case.split:  # the first configurations ran in the last group but one, the others in the last
        is_first = np.arange(means.shape[1]) < rng.integers(1, means.shape[1], len(means))[:, None]
        means[..., -2:][np.stack([~is_first, is_first], axis=-1)] = np.nan
    return means


def estimates(means: Array, strata: Array) -> pd.DataFrame:
    """Return the columns of `statistics.log_estimates` that intervals need, one row per study and configuration.

    means: [studies, configurations, groups]. A configuration with fewer than two group means has no variance.
    """
    studies, count, groups = means.shape
    present = ~np.isnan(means)
    if present.all() and count > 1:
        parts = _columns(complete(means, strata))
    elif present.all():
        parts = _columns(independent(means, strata))
    else:
        parts = {name: np.full((studies, count), np.nan) for name in FIELDS}
        for study, values in enumerate(means):
            used = present[study].sum(axis=1) > 1
            for name, column in _columns(components(values[used], strata[used])).items():
                parts[name][study, used] = column
    frame = pd.DataFrame({name: column.ravel() for name, column in parts.items()})
    sample = present.sum(axis=-1)
    frame["log_mean"] = (np.nansum(means, axis=-1) / np.maximum(sample, 1)).ravel()
    frame["sample"] = np.where(sample > 0, sample, np.nan).ravel()
    everywhere = tuple(range(groups))
    frame["group_names"] = (
        [everywhere] * len(frame)
        if present.all()
        else [tuple(np.flatnonzero(row)) for row in present.reshape(-1, groups)]
    )
    return frame


def _columns(found: Components) -> dict[str, Array]:
    """Return the components as arrays [..., configurations]."""
    shape = found.variance.shape
    values = {name: np.asarray(getattr(found, name)) for name in FIELDS}
    return {
        name: np.broadcast_to(value if value.shape == shape else value[..., None], shape)
        for name, value in values.items()
    }


def product(case: Case, logs: Array, truth: Array) -> Outcome:
    """Return the coverage of the product's rule."""
    studies, count = len(logs), case.configurations
    strata = np.arange(count) % 2 if case.two_kinds else (np.arange(count) < case.noisy) * int(case.are_known)
    frame = estimates(group_means(case, logs), strata)
    frame["study"], frame["configuration"] = np.divmod(np.arange(len(frame)), count)
    numerator = frame["configuration"].mod(2).eq(0) & frame["configuration"].lt(count - 1)
    one = frame[numerator].reset_index(drop=True)
    other = frame[numerator.shift(fill_value=False)].reset_index(drop=True)
    of_values = intervals(frame)[["low", "high"]].map(np.log)
    of_ratios = ratios(one, other)[["low", "high"]].map(np.log)
    return _outcome(
        studies,
        (frame["study"], of_values, np.tile(truth, studies)),
        (one["study"], of_ratios, np.zeros(len(one))),
    )


def former(case: Case, logs: Array, truth: Array) -> Outcome:
    """Return the coverage of the rule up to November 2026: an F test chose the sample; sides were independent."""
    groups = len(case.layout)
    n = logs.shape[-1]
    means, sizes = group_means(case, logs), np.array(case.layout)
    within = ((logs - np.repeat(means, sizes, axis=-1)) ** 2).sum(axis=-1)
    between = (sizes * (means - logs.mean(axis=-1, keepdims=True)) ** 2).sum(axis=-1)
    differ = np.zeros(within.shape, dtype=bool)
    if n > groups > 1:
        differ = fdtrc(groups - 1, n - groups, between / (groups - 1) / (within / (n - groups))) < 0.05
    center = np.where(differ, means.mean(axis=-1), logs.mean(axis=-1))
    variance = np.where(differ, means.var(axis=-1, ddof=1) / groups, logs.var(axis=-1, ddof=1) / n)
    degrees = np.where(differ, groups - 1.0, n - 1.0)
    last = case.configurations // 2 * 2
    a, b = slice(0, last, 2), slice(1, last, 2)
    total = variance[:, a] + variance[:, b]
    welch = total**2 / (variance[:, a] ** 2 / degrees[:, a] + variance[:, b] ** 2 / degrees[:, b])
    parts = []
    for middle, spread, freedom, true in (
        (center, variance, degrees, np.broadcast_to(truth, center.shape)),
        (center[:, a] - center[:, b], total, welch, np.zeros(total.shape)),
    ):
        half = stdtrit(freedom, 0.975) * np.sqrt(spread)
        ends = pd.DataFrame({"low": (middle - half).ravel(), "high": (middle + half).ravel()})
        parts.append((np.repeat(np.arange(len(middle)), middle.shape[1]), ends, true.ravel()))
    return _outcome(len(logs), *parts)


def _outcome(studies: int, *parts: tuple[Any, pd.DataFrame, Array]) -> Outcome:
    """Return the coverage per study and the median width; parts: study, logs of the ends, and true log of each row."""
    shares, widths = [], []
    for study, ends, true in parts:
        known = ends["low"].notna().to_numpy()
        inside = ((ends["low"] <= true) & (true <= ends["high"])).to_numpy()[known]
        by_study = pd.Series(inside).groupby(np.asarray(study)[known]).mean()
        shares.append(by_study.to_numpy(dtype=float))
        widths.append(float((ends["high"] - ends["low"]).median()) / SIGMA if known.any() else np.nan)
    return Outcome(shares[0], shares[1], widths[0], widths[1])


def _coverage(name: str, shares: Array, judged: bool = True) -> dict[str, Any]:
    value, error = float(shares.mean()), float(shares.std(ddof=1) / len(shares) ** 0.5)
    interval = (value - 1.96 * error, min(1.0, value + 1.96 * error))
    goal = f"{LOW} to {HIGH}" if judged else "none"
    return figure(name, value, interval, "share", goal, LOW <= value <= HIGH if judged else None)


def run(studies: int, chosen: Sequence[Case]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the figures and samples of these cases."""
    figures, samples, widths = [], [], {}
    rules: dict[str, Callable[[Case, Array, Array], Outcome]] = {"product": product, "former rule": former}
    for case in chosen:
        count = studies // FEWER if case.missing or case.split else studies
        logs, truth = repeats(case, count)
        for rule, covered in rules.items():
            if rule != "product" and (case.configurations != CONFIGURATIONS or case.missing or case.split):
                continue
            outcome = covered(case, logs, truth)
            ours = rule == "product"
            start = "coverage of" if ours else f"{rule}: coverage of"
            figures.append(_coverage(f"{start} throughput, {case.name}", outcome.value, ours))
            if len(outcome.speed_up):
                figures.append(_coverage(f"{start} speed-up, {case.name}", outcome.speed_up, ours))
            widths[rule, case.name] = outcome
            samples.append(
                {"rule": rule, "case": case.name, "studies": count, "throughput_width_sigma": outcome.value_width}
                | {"throughput_coverage": float(outcome.value.mean()), "speed_up_width_sigma": outcome.speed_up_width}
                | {"speed_up_coverage": float(outcome.speed_up.mean()) if len(outcome.speed_up) else None}
            )
    for (rule, name), outcome in widths.items():
        if rule != "product" or ("former rule", name) not in widths:
            continue
        before = widths["former rule", name]
        figures.append(_width(f"width of speed-up / that of the former rule, {name}", outcome, before))
        figures.append(_width(f"width of throughput / that of the former rule, {name}", outcome, before, "value_width"))
        in_groups = widths.get(("former rule", name.replace("1x5", "2+1")))
        if name.startswith("1x5") and in_groups is not None:
            kind = name.partition(", ")[2]
            figures.append(
                _width(f"width of speed-up, 1x5 / that of the former rule, 2+1, {kind}", outcome, in_groups, goal=True)
            )
    return figures, samples


def _width(
    name: str, outcome: Outcome, before: Outcome, width: str = "speed_up_width", goal: bool = False
) -> dict[str, Any]:
    value = getattr(outcome, width) / getattr(before, width)
    return figure(
        name, value, None, "ratio", f"at most {NARROWER}" if goal else "none", value <= NARROWER if goal else None
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=4_000, help="studies per case")
    parser.add_argument("--name", default="coverage", help="folder under benchmarks/results")
    options = parser.parse_args()
    write_summary(options.name, *run(options.studies, cases()))


if __name__ == "__main__":
    main()
