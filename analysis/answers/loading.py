"""Answers about loading: how many workers and CPU cores are enough, and what storage, order and page cache cost."""

from collections.abc import Mapping

import pandas as pd

from analysis.answers.reply import NEAR, Missing, Reply, highest, measured, pairs, repeats, span, times
from analysis.checks.pause import PAUSED
from analysis.measure.configurations import rows_with, throughput_estimates
from analysis.predict.inputs import ReportInputs
from analysis.statistics import ratios_to_reference
from analysis.study import study_ranks
from analysis.text import join, number, value_label


def workers(inputs: ReportInputs) -> Reply | Missing:
    """State which loader workers and CPU cores per rank train fastest, and from which number on more of them cost.

    Too many are those that are significantly slower, or whose throughput differs so much between repeats that its
    interval is not resolved.
    """
    rows = inputs.configurations
    if rows.empty or rows["loader_workers"].nunique() < 2:
        return Missing("fewer than two numbers of loader workers ran", "--loader-workers 2,8,32")
    unsteady = rows["throughput_samples_per_s_more"].astype(float) > 0
    best = highest(rows if unsteady.all() else rows[~unsteady], "throughput_samples_per_s")
    rows = rows_with(
        rows, {name: best[name] for name in inputs.axes if name not in ("loader_workers", "cpus_per_rank")}
    )
    ratios = ratios_to_reference(throughput_estimates(rows), pd.Series(best.name, index=rows.index))
    rows = rows.assign(**{f"relative{end}": ratios[name] for end, name in (("", "ratio"), ("_high", "high"))})
    alike = rows[rows["cpus_per_rank"] == best["cpus_per_rank"]].sort_values("loader_workers")
    steady = alike if unsteady.all() else alike[~unsteady[alike.index]]
    enough = alike[alike["relative"] >= 1 - NEAR].iloc[0]
    fewer = alike.loc[list(dict.fromkeys((enough.name, alike.index[0])))]
    fewer = fewer[fewer["loader_workers"] < best["loader_workers"]]
    other_cores = rows[(rows["loader_workers"] == best["loader_workers"]) & (rows.index != best.name)]

    def label(field: str, row: pd.Series) -> str:
        return value_label(field, int(row[field]), study_ranks(inputs))

    compared = [
        *(f"{label('loader_workers', row)} reach {times(row['relative'])}" for _, row in fewer.iterrows()),
        *(
            f"{label('cpus_per_rank', row)} {times(row['relative'])}"
            for _, row in other_cores.sort_values("cpus_per_rank").iterrows()
        ),
    ]
    text = (
        f"Of {join([f'{count:.0f}' for count in sorted(steady['loader_workers'])])} loader workers, "
        f"{int(best['loader_workers'])} train fastest, with {label('cpus_per_rank', best)}: "
        f"{measured(best.drop('n'), 'throughput_samples_per_s', 0, unit=' samples/s')} ({repeats(rows['n'].min())})."
    )
    text += f" Of this, {join(compared)}." if compared else ""
    more = alike[alike["loader_workers"] > best["loader_workers"]]
    more = more[(more["relative_high"] < 1) | unsteady[more.index]]
    if more.empty:
        most = int(alike["loader_workers"].max())
        return Missing(
            f"no number of workers up to {most} is significantly slower than a smaller one",
            f"--loader-workers {int(best['loader_workers'])},{2 * most},{4 * most}",
            text,
        )
    first = more.iloc[0]
    numbers = {
        "best_workers": float(best["loader_workers"]),
        "enough_workers": float(enough["loader_workers"]),
        "too_many_workers": float(first["loader_workers"]),
        "too_many_ratio": float(first["relative"]),
    }
    if unsteady[first.name]:
        trials = inputs.measured[inputs.measured["trial_id"].isin(first["trial_ids"])]
        values = trials["throughput_samples_per_s"].astype(float)
        numbers["too_many_spread"] = float(values.max() / values.min())
        paused = {trial for finding in inputs.findings if finding.name == PAUSED for trial in finding.trial_ids}
        was_paused = len(paused & set(first["trial_ids"]))
        stopped = f", and a rank was paused in {was_paused} of {repeats(len(values))}" if was_paused else ""
        return Reply(
            f"{text} {label('loader_workers', first)} give no steady speed: equal repeats differ by "
            f"{times(numbers['too_many_spread'])}, from {number(values.min(), 0)} to {number(values.max(), 0)} "
            f"samples/s{stopped}.",
            numbers,
        )
    return Reply(
        f"{text} {label('loader_workers', first)} are too many: they reach {times(first['relative'])}.", numbers
    )


_CHANGES: Mapping[str, tuple[str, Mapping[str, object], Mapping[str, object]]] = {
    "in_order": ("in order as shuffled", {"order": "in_order"}, {"order": "shuffled"}),
    "cold": ("from a cold page cache as from a warm one", {"page_cache": "cold"}, {"page_cache": "warm"}),
    "shared_memory": (
        "from shared memory as from a warm page cache",
        {"storage_place": "shared_memory", "page_cache": "as_is"},
        {"storage_place": "disk", "page_cache": "warm"},
    ),
}
"""How a sentence compares the two, and their fields."""


def storage(inputs: ReportInputs) -> Reply | Missing:
    """State the throughput of storage formats relative to JPEG files, and of orders, page caches and places."""
    configurations = inputs.configurations
    formats = sorted(set(configurations["storage"]) - {"jpeg"}) if len(configurations) else []
    by_format = {name: pairs(inputs, {"storage": name}, {"storage": "jpeg"})["ratio"] for name in formats}
    by_format = {name: ratios for name, ratios in by_format.items() if len(ratios)}
    if not by_format:
        return Missing("JPEG files and another format were not both measured", "--set storage=jpeg,lmdb,arrow_raw")
    changed = {name: pairs(inputs, fields, usual)["ratio"] for name, (_, fields, usual) in _CHANGES.items()}
    changed = {name: ratios for name, ratios in changed.items() if len(ratios)}
    text = join([f"{span(ratios, unit='x')} as fast from {name}" for name, ratios in by_format.items()])
    text = f"Training is {text} as from JPEG files."
    if changed:
        others = [f"{span(ratios, unit='x')} as fast {_CHANGES[name][0]}" for name, ratios in changed.items()]
        text += f" It is {join(others)}."
    return Reply(text, {name: float(ratios.median()) for name, ratios in (by_format | changed).items()})
