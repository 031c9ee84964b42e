"""Compare the same configurations in two results folders: before and after a change, on two machines or versions."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.measure.configurations import trial_fields
from analysis.measure.measures import summaries
from analysis.read.environment import NONE, by_environment, fingerprint
from analysis.read.fields import Fields
from analysis.read.results import ResultsError, load_reduced, nothing_timed
from analysis.read.schema import PHASES
from analysis.statistics import log_estimates, ratios
from analysis.text import configuration_label, join, rank_noun, text

COMPARED_MEASURES = ("throughput_samples_per_s", "step_s", *PHASES)
"""Measures that are compared."""

SLOWER, FASTER, WITHIN_NOISE, UNKNOWN = "slower", "faster", "within noise", "no interval"


@dataclass(frozen=True)
class Comparison:
    """Comparison of the configurations that two folders, a and b, both measured.

    rows: one row per configuration, the largest loss of throughput first, those without an interval last: `label`, n_a,
    n_b (repeats), the fields in `axes`, `verdict`, and for each of `COMPARED_MEASURES` (seconds, samples/s) NAME_a,
    NAME_b (medians over repeats), NAME_ratio = b / a with NAME_low and NAME_high (95 %, `statistics.ratios`); NaN if
    unknown. verdict: "within noise" if the interval of throughput contains 1, else "slower" or "faster"; "no interval"
    if one side has a single repeat. axes: fields that vary among these rows. only_a, only_b: labels of configurations
    that only one folder has done. assumed: one line per field that only one folder has. environments: differences
    between the environments as name, a, b. left_out: one line per folder with trials in further environments.
    """

    rows: pd.DataFrame
    axes: tuple[str, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    assumed: tuple[str, ...]
    environments: tuple[tuple[str, str, str], ...]
    left_out: tuple[str, ...]

    @property
    def judged(self) -> int:
        """Return the number of rows with an interval, and therefore a verdict."""
        return int((self.rows["verdict"] != UNKNOWN).sum())

    def regressions(self, threshold: float) -> pd.DataFrame:
        """Return the rows with a significant loss of throughput above `threshold`, a share such as 0.05.

        Significant means that the complete 95 % interval is below 1 - threshold. A true loss equal to the threshold, or
        none at all, therefore fails a build in at most one of forty rows. If the point estimate were beyond the
        threshold and the interval only had to exclude 1, it would fail in every second row. Other rows are not proven
        unchanged: more repeats narrow the interval.
        """
        return self.rows[self.rows["throughput_samples_per_s_high"] < 1 - threshold]


def compare(before: str | os.PathLike[str], after: str | os.PathLike[str]) -> Comparison:
    """Compare two results folders; trials match if all fields except the repeat are equal.

    A field that only one folder has takes, in the other, the default that the first folder's study.json states. Fields
    of kind machine, which describe where a trial ran, may differ if each folder has a single value. In a folder with
    several environments, the one with most done trials counts.

    Raises ResultsError if a folder cannot be read, has no done trial, or has a field without a stated default that the
    other lacks, or if no configuration is common.
    """
    sides = [_measured(directory) for directory in (before, after)]
    frames = [frame for frame, _, _ in sides]
    assumed = _add_defaults(frames, [declared for _, declared, _ in sides], (before, after))
    machine = {name for _, declared, _ in sides for name in declared.of_kind("machine")}
    fields = [name for name in trial_fields(frames[0]) if name != "repeat"]
    apart = [name for name in fields if name in machine and all(f[name].nunique() == 1 for f in frames)]
    keys = [name for name in fields if name not in apart]
    both = pd.concat([frame.assign(side=side) for frame, side in zip(frames, "ab", strict=True)], ignore_index=True)
    both["configuration"] = both.groupby(keys, dropna=False, sort=False).ngroup()
    found = both.groupby("configuration").first()
    sides_of = both.groupby("configuration")["side"].agg(set)
    common = sides_of.index[sides_of.map(len) == 2]
    if common.empty:
        raise ResultsError(f"{before} and {after} have no configuration in common{_why(frames, keys)}")
    axes = tuple(name for name in keys if found.loc[common, name].nunique(dropna=False) > 1)
    varying = tuple(name for name in keys if found[name].nunique(dropna=False) > 1)
    ranks = rank_noun(found["device"])

    def only(side: str) -> tuple[str, ...]:
        alone = found[sides_of.map(lambda seen: seen == {side})]
        return tuple(configuration_label(row, varying, ranks) for _, row in alone.iterrows())

    shared = both[both["configuration"].isin(common)]
    rows = _ratios(shared).join(found[list(axes)])
    rows.insert(0, "label", [configuration_label(found.loc[i], axes, ranks) or "all trials" for i in rows.index])
    order = rows["verdict"].eq(UNKNOWN).to_frame("last").assign(ratio=rows["throughput_samples_per_s_ratio"])
    return Comparison(
        rows.loc[order.sort_values(["last", "ratio"], kind="stable").index].reset_index(drop=True),
        axes,
        only("a"),
        only("b"),
        assumed,
        _unlike(
            [*_environment(frames), *((name, _values(frames[0][name]), _values(frames[1][name])) for name in apart)]
        ),
        tuple(line for _, _, line in sides if line),
    )


def _measured(directory: str | os.PathLike[str]) -> tuple[pd.DataFrame, Fields, str]:
    """Return one row per done trial, the declared fields, and a line on other environments.

    The line is empty if there are none.
    """
    results, *others = by_environment(load_reduced(directory))
    rows = summaries(results.trials, results.windows).dropna(subset="throughput_samples_per_s")
    if rows.empty:
        raise ResultsError(f"{directory}: nothing to compare: {nothing_timed(results.trials)}")
    count = sum(len(other.trials) for other in others)
    line = f"{directory}: {count} trial{'' if count == 1 else 's'} in other environments excluded." if count else ""
    return rows, results.fields, line


def _add_defaults(frames: list[pd.DataFrame], declared: Sequence[Fields], folders: tuple[Any, Any]) -> tuple[str, ...]:
    """Give each frame, in place, the fields that only the other has, with their default; return one line per field.

    Raises ResultsError if study.json gives no default.
    """
    lines = []
    known = [trial_fields(frame) for frame in frames]
    for own, other, side in ((0, 1, "A"), (1, 0, "B")):
        missing = [name for name in known[other] if name not in known[own]]
        if unknown := sorted(name for name in missing if name not in declared[other].facts):
            raise ResultsError(
                f"{folders[own]} lacks the fields {', '.join(unknown)}, which {folders[other]} has; "
                "run both with one version of this program"
            )
        for name in missing:
            value = declared[other][name].default
            frames[own] = frames[own].assign(**{name: value})
            lines.append(f"{side} has no field {name}; assumed for its trials: its default, {value!r}.")
    return tuple(lines)


def _ratios(rows: pd.DataFrame) -> pd.DataFrame:
    """Return `Comparison.rows` without labels and fields, indexed by configuration.

    rows: with measures, side and configuration.
    """
    columns: dict[str, pd.Series] = {}
    for name in COMPARED_MEASURES:
        values = rows[name].astype(float)
        usable = rows.assign(**{name: values.where(values > 0)})  # a phase that is not there may be written as 0 s
        index = pd.Index(sorted(rows["configuration"].unique()), name="configuration")
        a, b = (
            log_estimates(part, "configuration", name).reindex(index)
            for part in (usable[usable["side"] == side] for side in "ab")
        )
        ratio = ratios(b, a, same_study=False)
        columns |= {f"{name}_a": a["value"], f"{name}_b": b["value"]}
        columns |= {f"{name}_{end}": ratio[end] for end in ("ratio", "low", "high")}
        if name == COMPARED_MEASURES[0]:
            columns |= {"n_a": a["n"], "n_b": b["n"], "verdict": ratio.apply(_verdict, axis=1)}
    return pd.DataFrame(columns)


def _verdict(ratio: pd.Series) -> str:
    if pd.isna(ratio["low"]):
        return UNKNOWN
    return SLOWER if ratio["high"] < 1 else FASTER if ratio["low"] > 1 else WITHIN_NOISE


def _environment(frames: list[pd.DataFrame]) -> list[tuple[str, str, str]]:
    """Return the environments of both sides by name. A name has several values if trials set it themselves."""
    seen: list[dict[str, list[str]]] = [{}, {}]
    for frame, values in zip(frames, seen, strict=True):
        for _, trial in frame.iterrows():
            for name, value in fingerprint(trial).items():
                if value not in values.setdefault(name, []):
                    values[name].append(value)
    names = dict.fromkeys([*seen[0], *seen[1]])
    shown = [[join(sorted(values.get(name, [NONE])), "or") for name in names] for values in seen]
    return list(zip(names, *shown, strict=True))


def _unlike(values: list[tuple[str, str, str]]) -> tuple[tuple[str, str, str], ...]:
    return tuple(row for row in values if row[1] != row[2])


def _values(column: pd.Series) -> str:
    return ", ".join(text(value) for value in sorted(column.dropna().unique())) or NONE


def _why(frames: list[pd.DataFrame], keys: list[str]) -> str:
    """Return the fields for which the two share no value, as the end of a message."""
    apart = [name for name in keys if not set(frames[0][name].dropna()) & set(frames[1][name].dropna())]
    values = [(name, _values(frames[0][name]), _values(frames[1][name])) for name in apart]
    differences = [
        f"{name} is {a} in the first and {b} in the second" for name, a, b in values if (a, b) != (NONE, NONE)
    ]
    return (
        f": {'; '.join(differences)}"
        if differences
        else ": they share values of each field, but no combination of them"
    )
