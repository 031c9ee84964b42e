"""Compare the same configurations in two results folders: before and after a change, on two machines or versions."""

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.measure.configurations import LAYOUT, trial_fields
from analysis.measure.measures import summaries
from analysis.read.environment import NONE, by_environment, fingerprint
from analysis.read.fields import Fields
from analysis.read.results import ResultsError, load_reduced, nothing_timed
from analysis.read.schema import PHASES
from analysis.statistics import log_estimates, ratios, ratios_of_ratios
from analysis.text import RankNouns, configuration_label, join, text

COMPARED_MEASURES = ("throughput_samples_per_s", "step_s", *PHASES)
"""Measures that are compared."""

SLOWER, FASTER, WITHIN_NOISE, UNKNOWN = "slower", "faster", "not significant", "no interval"

WORSE, BETTER = "scales worse", "scales better"
"""Verdicts on scaling efficiency, instead of `SLOWER` and `FASTER`."""

REGRESSION, NO_REGRESSION, UNDECIDED = "regression", "no regression", "cannot be judged"

OWN_CODE = ("workload", "script", "train_function")
"""Fields of which one is set if a user's own code is trained."""

BROKEN = ("failed", "timeout", "out_of_memory", "pruned")
"""Statuses of trials that ran without a result. Pruned ones would run out of memory."""


class NothingInCommon(ResultsError):
    """Two results folders have no configuration in common."""

    exit_code = ResultsError.exit_code


@dataclass(frozen=True)
class Failure:
    """A configuration that a has done and that failed in b. trials: number of failed ones; the first one's reason."""

    label: str
    status: str
    reason: str
    trials: int


@dataclass(frozen=True)
class Comparison:
    """Comparison of the configurations of two folders, a and b.

    rows: one row per configuration that both have done, the largest loss of throughput first, those without an interval
    last: `label`, n_a, n_b (repeats), the fields in `axes`, `verdict`, and for each of `COMPARED_MEASURES` (seconds,
    samples/s) NAME_a, NAME_b (see `statistics.log_estimates`), NAME_ratio = b / a with NAME_low, NAME_high (95 %) and
    NAME_more, see `statistics.ratios` of different studies; NaN if unknown. verdict: "not significant" if the interval
    of throughput contains 1, else "slower" or "faster"; "no interval" if one side has a single repeat. axes: fields
    that vary among these rows. failed: configurations done in a that failed in b, if not a trial of them failed in a
    too, or none is done in b. only_a, only_b: labels of other configurations that only one folder has done. assumed:
    one line per field that only one folder has. environments: differences between the environments as name, a, b.
    left_out: one line per folder with trials in further environments.
    scaling: one row per common configuration that ran on fewer ranks too, everything else equal: `label`, world_size,
    reference_world_size (the fewest), rate_ratio (throughput on the fewest ranks, b / a), efficiency_a, efficiency_b
    (throughput on N ranks / that on the fewest, per rank), and efficiency_ratio = b / a with efficiency_low,
    efficiency_high and efficiency_more, as in `statistics.ratios_of_ratios`; `verdict` on it. The largest loss comes
    first, as in `rows`.
    """

    rows: pd.DataFrame
    axes: tuple[str, ...]
    failed: tuple[Failure, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    assumed: tuple[str, ...]
    environments: tuple[tuple[str, str, str], ...]
    left_out: tuple[str, ...]
    scaling: pd.DataFrame

    @property
    def judged(self) -> int:
        """Return the number of rows with an interval, and therefore a verdict."""
        return int((self.rows["verdict"] != UNKNOWN).sum())

    def judgements(self, threshold: float, *, of_scaling: bool = False) -> pd.DataFrame:
        """Judge a loss of throughput above `threshold`, a share such as 0.05; indexed like `rows`.

        of_scaling: judge a loss of scaling efficiency instead; indexed like `scaling`.

        Columns: judgement: `REGRESSION` if the complete 95 % interval is below 1 - threshold, so that a true loss equal
        to the threshold, or none at all, is one in at most one of forty rows. `NO_REGRESSION` if it is above.
        `UNDECIDED` if it contains 1 - threshold, `UNKNOWN` without an interval. detectable: the smallest loss that
        would be a regression with an interval of this width, NaN without one. is_suspected: not judged, and the
        estimate is below 1 - threshold.
        """
        rows, name = (self.scaling, "efficiency") if of_scaling else (self.rows, COMPARED_MEASURES[0])
        ratio, low, high = (rows[f"{name}_{end}"].astype(float) for end in ("ratio", "low", "high"))
        limit = 1 - threshold
        judgement = pd.Series(UNDECIDED, index=rows.index, dtype=object)
        judgement = judgement.mask(high < limit, REGRESSION).mask(low >= limit, NO_REGRESSION).mask(low.isna(), UNKNOWN)
        return pd.DataFrame(
            {
                "judgement": judgement,
                "detectable": 1 - limit * (low / high) ** 0.5,
                "is_suspected": judgement.isin([UNDECIDED, UNKNOWN]) & (ratio < limit),
            }
        )

    def regressions(self, threshold: float) -> pd.DataFrame:
        """Return the rows with a loss of throughput above `threshold`, see `judgements`."""
        return self.rows[self.judgements(threshold)["judgement"] == REGRESSION]


def compare(before: str | os.PathLike[str], after: str | os.PathLike[str], ignored: Collection[str] = ()) -> Comparison:
    """Compare two results folders; trials match if all fields except the repeat, and those in `ignored`, are equal.

    Fields that have no effect in a trial are ignored too.

    A field that only one folder has takes, in the other, the default that the first folder's study.json states. Fields
    of kind machine, which describe where a trial ran, may differ if each folder has a single value. In a folder with
    several environments, the one with most done trials counts.

    Raises ResultsError if a folder cannot be read, `before` has no done trial, `after` has neither a done nor a failed
    one, or a field without a stated default is missing in one of them, or if no configuration is common.
    """
    sides = [_trials(directory) for directory in (before, after)]
    frames = [frame for frame, _, _ in sides]
    if not (frames[0]["status"] == "done").any():
        raise ResultsError(f"{before}: nothing to compare: {nothing_timed(frames[0])}")
    assumed = _add_defaults(frames, [declared for _, declared, _ in sides], (before, after))
    frames = [_with_effect(frame, [declared for _, declared, _ in sides]) for frame in frames]
    machine = {name for _, declared, _ in sides for name in declared.of_kind("machine")}
    fields = [name for name in trial_fields(frames[0]) if name != "repeat" and name not in ignored]
    apart = [name for name in fields if name in machine and all(f[name].nunique() == 1 for f in frames)]
    keys = [name for name in fields if name not in apart]
    both = pd.concat([frame.assign(side=side) for frame, side in zip(frames, "ab", strict=True)], ignore_index=True)
    both["configuration"] = both.groupby(keys, dropna=False, sort=False).ngroup()
    found = both.groupby("configuration").first()
    done, broken = (
        {side: both.loc[(both["side"] == side) & members, "configuration"] for side in "ab"}
        for members in (both["status"] == "done", both["status"] != "done")
    )
    common = sorted({*done["a"]} & {*done["b"]})
    failed = {
        index for index in {*done["a"]} & {*broken["b"]} if index not in {*broken["a"]} or index not in {*done["b"]}
    }
    if not common and not failed:
        raise NothingInCommon(f"{before} and {after} have no configuration in common{_why(frames, keys)}")
    axes = tuple(name for name in keys if found.loc[common, name].nunique(dropna=False) > 1)
    varying = tuple(name for name in keys if found[name].nunique(dropna=False) > 1)
    ranks = RankNouns.of(found["device"], {**sides[0][1].labels, **sides[1][1].labels})

    def labels(indices: Iterable[int]) -> tuple[str, ...]:
        rows = found.loc[sorted(indices)].iterrows()
        return tuple(configuration_label(row, varying, ranks) or "all trials" for _, row in rows)

    rows = _ratios(both[both["status"] == "done"], common).join(found[list(axes)])
    rows.insert(0, "label", [configuration_label(found.loc[i], axes, ranks) or "all trials" for i in rows.index])
    scaling = _scaling(both[both["status"] == "done"], found.loc[common], [name for name in keys if name not in LAYOUT])
    scaling.insert(0, "label", [configuration_label(found.loc[i], axes, ranks) or "all trials" for i in scaling.index])
    of_b = both[(both["side"] == "b") & (both["status"] != "done")].groupby("configuration")
    failures = of_b[["status", "reason"]].first().assign(trials=of_b.size()).fillna({"reason": ""})
    done_frames = [frame[frame["status"] == "done"] for frame in frames]
    return Comparison(
        _in_order(rows, "throughput_samples_per_s_ratio"),
        axes,
        tuple(
            Failure(label, str(row["status"]), str(row["reason"]), int(row["trials"]))
            for label, (_, row) in zip(labels(failed), failures.loc[sorted(failed)].iterrows(), strict=True)
        ),
        labels({*done["a"]} - {*done["b"]} - failed),
        labels({*done["b"]} - {*done["a"]}),
        assumed,
        _unlike(
            [
                *_environment(done_frames),
                *((name, _values(frames[0][name]), _values(frames[1][name])) for name in apart),
            ]
        ),
        tuple(line for _, _, line in sides if line),
        _in_order(scaling, "efficiency_ratio"),
    )


def _trials(directory: str | os.PathLike[str]) -> tuple[pd.DataFrame, Fields, str]:
    """Return one row per done trial with throughput, or broken trial, the declared fields, and a line on environments.

    The line reports trials of other environments; it is empty if there are none.
    """
    results, *others = by_environment(load_reduced(directory))
    rows = summaries(results.trials, results.windows).dropna(subset="throughput_samples_per_s")
    broken = results.trials[results.trials["status"].isin(BROKEN)]
    if rows.empty and broken.empty:
        raise ResultsError(f"{directory}: nothing to compare: {nothing_timed(results.trials)}")
    count = sum(len(other.trials) for other in others)
    line = f"{directory}: {count} trial{'' if count == 1 else 's'} in other environments excluded." if count else ""
    return pd.concat([rows, broken], ignore_index=True) if len(broken) else rows, results.fields, line


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


def _with_effect(frame: pd.DataFrame, declared: Sequence[Fields]) -> pd.DataFrame:
    """Return the trials without values that have no effect, such as the length of texts for a model of images.

    declared: the fields of both folders. A value counts only if both let it have an effect. A user's own code may read
    any of them.
    """
    names = trial_fields(frame)
    trials = frame[names].astype(object).where(frame[names].notna(), None).to_dict("records")
    own_code = [any(trial.get(name) for name in OWN_CODE) for trial in trials]
    effects = [
        {*names} if own else set.intersection(*({*fields.with_effect(names, trial)} for fields in declared))
        for trial, own in zip(trials, own_code, strict=True)
    ]
    masks = {name: pd.Series([name in effect for effect in effects], index=frame.index) for name in names}
    return frame.assign(**{name: frame[name].where(mask) for name, mask in masks.items() if not mask.all()})


def _ratios(rows: pd.DataFrame, common: Sequence[int]) -> pd.DataFrame:
    """Return `Comparison.rows` without labels and fields, indexed by the configurations in `common`.

    rows: all done trials of both sides, with measures, side and configuration. All configurations of a side count
    towards the variance of its repeats.
    """
    index = pd.Index(common, name="configuration", dtype=int)
    columns: dict[str, pd.Series] = {}
    for name in COMPARED_MEASURES:
        values = rows[name].astype(float)
        usable = rows.assign(**{name: values.where(values > 0)})  # a phase that is not there may be written as 0 s
        a, b = (
            log_estimates(part, "configuration", name, stratum="host_bound").reindex(index)
            for part in (usable[usable["side"] == side] for side in "ab")
        )
        ratio = ratios(b, a, same_study=False)
        columns |= {f"{name}_a": a["value"], f"{name}_b": b["value"]}
        columns |= {f"{name}_{end}": ratio[end] for end in ("ratio", "low", "high", "more")}
        if name == COMPARED_MEASURES[0]:
            verdict = pd.Series([_verdict(row) for _, row in ratio.iterrows()], index=index, dtype=object)
            columns |= {"n_a": a["n"], "n_b": b["n"], "verdict": verdict}
    return pd.DataFrame(columns)


def _scaling(rows: pd.DataFrame, configurations: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Return `Comparison.scaling` without labels, indexed by configuration.

    rows: all done trials of both sides. configurations: fields of those in common; equal `keys` are one series.
    """
    ordered = configurations.sort_values(list(LAYOUT), kind="stable")
    fewest = ordered.index.to_series().groupby([ordered[name] for name in keys], dropna=False).transform("first")
    world_size = configurations["world_size"].astype(int)
    fewest = fewest[world_size.loc[fewest.index] > world_size.loc[fewest].to_numpy()]
    a, b = (
        log_estimates(part, "configuration", COMPARED_MEASURES[0], stratum="host_bound")
        for part in (rows[rows["side"] == side] for side in "ab")
    )
    reference_a, reference_b = (side.loc[fewest].set_axis(fewest.index) for side in (a, b))
    a, b = a.loc[fewest.index], b.loc[fewest.index]
    sizes, reference_sizes = world_size.loc[fewest.index], world_size.loc[fewest].set_axis(fewest.index)
    share = reference_sizes / sizes
    ratio = ratios_of_ratios((b, reference_b), (a, reference_a)).add_prefix("efficiency_")
    return pd.DataFrame(
        {
            "world_size": sizes,
            "reference_world_size": reference_sizes,
            "rate_ratio": reference_b["value"] / reference_a["value"],
            "efficiency_a": a["value"] / reference_a["value"] * share,
            "efficiency_b": b["value"] / reference_b["value"] * share,
            "verdict": pd.Series(
                [_verdict(row, "efficiency_", WORSE, BETTER) for _, row in ratio.iterrows()], ratio.index, dtype=object
            ),
        }
    ).join(ratio)


def _verdict(ratio: pd.Series, of: str = "", loss: str = SLOWER, gain: str = FASTER) -> str:
    """Return the verdict on a ratio, of which the columns start with `of`."""
    if pd.isna(ratio[f"{of}low"]):
        return UNKNOWN
    return loss if ratio[f"{of}high"] < 1 else gain if ratio[f"{of}low"] > 1 else WITHIN_NOISE


def _in_order(rows: pd.DataFrame, ratio: str) -> pd.DataFrame:
    """Return the rows, the largest loss first, and those without an interval last."""
    order = rows["verdict"].eq(UNKNOWN).to_frame("last").assign(ratio=rows[ratio])
    return rows.loc[order.sort_values(["last", "ratio"], kind="stable").index].reset_index(drop=True)


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
