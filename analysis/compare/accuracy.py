"""Compare accuracy over the global batch: the loss at large batches, recipes against it, and the fastest batch.

A run is one training. A recipe (column `recipe`) consists of all fields in which runs differ except batch, layout and
seed. Runs of one recipe, batch and layout form a cell. The reference of a recipe is its cell at the reference batch.
Learning-rate rules scale by 1 there and have no effect, so runs that differ only in their rule are the same training.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.compare.recipes import LAYOUT, with_recipes
from analysis.measure.noise_scale import PERIODS, critical_batches
from analysis.measure.training import reached_target, training_runs
from analysis.read.results import Results
from analysis.statistics import mean_interval, welch_difference

TARGET_SHARE = 0.99
"""If no trial sets a target accuracy, the target is this share of the mean accuracy of the reference."""


RELEVANT_LOSS = 0.01
"""An accuracy counts as preserved if its interval excludes a loss of this size. Containing 0 is not sufficient, because
a wide interval always does.
"""


LOSSLESS_BATCH_COLUMNS = [
    "recipe", "reference_batch", "reference_top1", "lossless_batch", "is_open", "failing_batch", "failing_difference",
    "failing_difference_low", "failing_difference_high",
    *(f"critical_batch{period}{end}" for period in ("", *(f"_{period}" for period in PERIODS))
      for end in ("", "_low", "_high")),
    *(f"epochs_{period}" for period in PERIODS), "critical_from",
]  # fmt: skip
"""Columns of `lossless_batches`."""


Key = tuple[Hashable, ...]


_SEEDS = ("seed", "repeat")


def _members(runs: pd.DataFrame) -> dict[Key, pd.DataFrame]:
    """Group runs by recipe, global batch and layout: batches ascending, layouts with fewest parts and ranks first.

    A recipe without runs at the reference batch uses those of recipes that differ only in an idle rule.
    """
    keys = ["recipe", "global_batch", *LAYOUT]
    order = ["recipe_number", "global_batch", "accumulation_steps", "world_size"]
    result: dict[Key, pd.DataFrame] = {}
    ordered = runs.assign(is_shared=False).sort_values(order, kind="stable")
    at_reference = runs["global_batch"] == runs["reference_batch"]
    for recipe, members in ordered.groupby("recipe", sort=False):
        first = members.iloc[0]
        shared = runs[at_reference & (runs["rest"] == first["rest"]) & (runs["recipe"] != recipe)]
        has_reference = (members["global_batch"] == members["reference_batch"]).any()
        if len(shared) and not has_reference:
            shared = shared.assign(recipe=recipe, recipe_number=first["recipe_number"], is_shared=True)
            members = pd.concat([shared, members])
        # trainings that differ only in an idle rule are copies of each other
        members = members.sort_values(order[1:], kind="stable").drop_duplicates(["global_batch", *LAYOUT, *_SEEDS])
        result |= {tuple(key): part for key, part in members.groupby(keys, sort=False)}
    return result


def _reference_of(members: dict[Key, pd.DataFrame], recipe: str, plain: str) -> Key:
    """Return the key of the reference cell of a recipe.

    It is the cell at the reference batch: of the recipe, else of the plain recipe, else the cell of its smallest batch.
    """
    at_reference = [key for key, part in members.items() if key[1] == part["reference_batch"].iloc[0]]
    of_recipe = [key for key in at_reference if key[0] == recipe]
    of_plain = [key for key in at_reference if key[0] == plain]
    return next(iter([*of_recipe, *of_plain, *(key for key in members if key[0] == recipe)]), ())


def cells(runs: pd.DataFrame, plain: str, epochs: pd.DataFrame) -> pd.DataFrame:
    """Return one row per recipe, global batch and layout. epochs: rows of epochs.parquet of these runs.

    Columns: recipe, recipe_number, global_batch, the layout's fields, made_of (the layout in words). is_reference;
    is_chosen: the layout that represents its batch; is_shared: its runs also belong to another recipe.
    n: seeds.
    top1: mean of the last epoch's validation accuracy, with `_low` and `_high` (95 %, Student's t) and top1_sd.
    top5 and losses: means.
    difference: top1 minus that of the recipe's reference (the plain reference if it has none), with `_low` and `_high`
    (`seed_difference`).
    within_noise: True if the interval contains 0 and excludes a loss of RELEVANT_LOSS, False if it excludes 0, None if
    there are too few seeds.
    plain_difference: difference to the plain reference, for recipes with another one.
    throughput_samples_per_s: geometric mean with interval. noise_batch, noise_batch_first, _middle and _last, each with
    `_low` and `_high`, noise_n and noise_epochs_*: see `noise_scale.critical_batches`.
    reached: runs that reached the target. steps_to_target, samples_to_target, time_to_target_s (with `_low` and
    `_high`) and hours_to_target (rank-hours): means, NaN unless every run reached it.
    concurrent: largest number of concurrent trainings. trial_ids.
    """
    members = _members(runs)
    rows = []
    plain_reference = _reference_of(members, plain, plain)
    for key, part in members.items():
        recipe = key[0]
        reference = _reference_of(members, str(recipe), plain)
        first_layout = next(candidate for candidate in members if candidate[:2] == key[:2])
        values = by_seed(part)
        row: dict[str, Any] = dict(zip(["recipe", "global_batch", *LAYOUT], key, strict=True))
        low, high = mean_interval(values, least=0, most=1)
        row |= {
            "recipe_number": part["recipe_number"].min(),
            "is_shared": bool(part["is_shared"].all()),
            "reference_batch": part["reference_batch"].iloc[0],
        }
        row |= {
            "made_of": made_of(*key[2:]),
            "is_reference": key == reference,
            "is_chosen": key == first_layout,
            "n": len(values),
        }
        row |= {"top1": values.mean(), "top1_low": low, "top1_high": high, "top1_sd": values.std()}
        row |= {"top5": part["validation_top5"].mean(), "train_loss": part["train_loss"].mean()}
        is_same = key[:2] == reference[:2]
        row |= _difference("difference", values, by_seed(members[reference]), key == reference, is_same)
        has_other_reference = plain_reference and members[plain_reference]["rest"].iloc[0] != part["rest"].iloc[0]
        other_values = by_seed(members[plain_reference]) if has_other_reference else values.iloc[:0]
        row |= _difference("plain_difference", values, other_values, not has_other_reference)
        row |= _throughput(part["throughput_samples_per_s"].dropna())
        row |= critical_batches(epochs[epochs["trial_id"].isin(part["trial_id"])]) | _to_target(part)
        row |= {"concurrent": part["concurrent"].max(), "trial_ids": tuple(part["trial_id"])}
        rows.append(row)
    return pd.DataFrame(rows)


def made_of(world_size: Any, batch_per_gpu: Any, accumulation_steps: Any) -> str:
    """Return the layout of a global batch in words: ranks × samples per forward pass × accumulated parts.

    Batch normalisation sees the samples of one forward pass.
    """
    text = f"{world_size} × {batch_per_gpu}"
    return text if accumulation_steps == 1 else f"{text} × {accumulation_steps} accumulated"


def by_seed(runs: pd.DataFrame) -> pd.Series:
    """Return the last epoch's validation accuracy of each run, with its seed as index."""
    return runs.set_index("seed")["validation_top1"].dropna()


def seed_difference(values: pd.Series, reference: pd.Series, only_layout: bool) -> tuple[float, float, float]:
    """Return the mean accuracy of `values` minus that of `reference`, and the ends of its 95 % interval.

    values, reference: shares, with seeds as index. only_layout: both have the same recipe and global batch. Then
    trainings with the same seed start with the same weights and see the same batches, so their differences are compared
    (Student's t), if both sides have the same seeds. Else Welch's t.
    """
    values, reference = values.sort_index(), reference.sort_index()
    if not (only_layout and values.index.is_unique and values.index.equals(reference.index) and len(values) > 1):
        return welch_difference(values, reference, 1.0)
    gaps = values - reference
    return float(gaps.mean()), *mean_interval(gaps, -1, 1)


def _difference(
    name: str, values: pd.Series, reference: pd.Series, is_reference: bool, only_layout: bool = False
) -> dict[str, Any]:
    difference, low, high = (np.nan,) * 3 if is_reference else seed_difference(values, reference, only_layout)
    within_noise = True if -RELEVANT_LOSS < low <= 0 <= high else False if low > 0 or high < 0 else None
    columns = {name: difference, f"{name}_low": low, f"{name}_high": high}
    return columns | ({"within_noise": within_noise} if name == "difference" else {})


def _throughput(values: pd.Series) -> dict[str, float]:
    logs = values.astype(float).map(np.log)
    ends = dict(zip(("", "_low", "_high"), (logs.mean(), *mean_interval(logs)), strict=True))
    return {f"throughput_samples_per_s{end}": float(np.exp(log)) for end, log in ends.items()}


def _to_target(part: pd.DataFrame) -> dict[str, Any]:
    reached = part["time_to_target_s"].notna()
    names = ("steps_to_target", "samples_to_target", "time_to_target_s", "hours_to_target")
    result = {name: part[name].mean() if reached.all() else np.nan for name in names}
    low, high = mean_interval(part["time_to_target_s"], least=0) if reached.all() else (np.nan, np.nan)
    interval = {"time_to_target_s_low": low, "time_to_target_s_high": high}
    return result | interval | {"reached": int(reached.sum()), "runs": len(part)}


def lossless_batches(cells: pd.DataFrame) -> pd.DataFrame:
    """Return one row per recipe with batches above its reference.

    lossless_batch: the largest batch, from the reference upwards, before accuracy first drops significantly (the
    interval of the difference lies below 0); NaN if there are too few seeds.
    is_open: accuracy never dropped, so the largest lossless batch may be larger.
    failing_batch: the first batch with a significant drop, and its difference with `_low` and `_high`.
    critical_batch and critical_batch_first, _middle, _last with `_low` and `_high`: see `critical_batch`, of the
    recipe's runs at the reference batch, or at its smallest batch with a noise scale. epochs_first, _middle, _last:
    their epochs. critical_from: the cell they come from.
    """
    rows = []
    for recipe, part in cells.groupby("recipe", sort=False):
        chosen = part[part["is_chosen"]].sort_values("global_batch")
        reference = chosen[chosen["is_reference"]]
        if reference.empty:
            continue
        above = chosen[chosen["global_batch"] > reference["global_batch"].iloc[0]]
        if above.empty:
            continue
        fails = above[above["difference_high"] < 0]
        failing = fails.iloc[0] if len(fails) else None
        before = above if failing is None else above[above["global_batch"] < failing["global_batch"]]
        unknown = bool(before["within_noise"].isna().any())
        preserved = [int(reference["global_batch"].iloc[0]), *(int(batch) for batch in before["global_batch"])]
        row = {"recipe": recipe, "reference_batch": preserved[0], "reference_top1": reference["top1"].iloc[0]}
        row |= {"lossless_batch": np.nan if unknown else preserved[-1], "is_open": not unknown and failing is None}
        for name in ("global_batch", "difference", "difference_low", "difference_high"):
            row[f"failing_{name}".replace("global_", "")] = np.nan if failing is None else failing[name]
        rows.append(row | critical_batch(cells, str(recipe)))
    return pd.DataFrame(rows, columns=LOSSLESS_BATCH_COLUMNS)


@dataclass(frozen=True, eq=False)
class Accuracy:
    """The trainings of one environment. Shares are in 0..1, times in seconds, batches in samples.

    runs: one row per training, see `training_runs`. epochs: their rows of epochs.parquet. cells: see `cells`.
    lossless_batches: see the function of that name. plain: the plain recipe. target: accuracy for "time to target",
    None if unknown. target_is_asked: a trial sets the target.
    """

    runs: pd.DataFrame
    epochs: pd.DataFrame
    cells: pd.DataFrame
    lossless_batches: pd.DataFrame
    plain: str
    target: float | None
    target_is_asked: bool


def accuracy(results: Results) -> Accuracy | None:
    """Evaluate all done trainings; None if there are none."""
    runs = training_runs(results.trials, results.epochs)
    if runs.empty:
        return None
    runs, plain = with_recipes(runs, results.fields)
    asked = runs["target_accuracy"].dropna().unique() if "target_accuracy" in runs else np.array([])
    members = _members(runs)
    reference = members.get(_reference_of(members, plain, plain), runs.iloc[:0])
    derived = TARGET_SHARE * float(reference["validation_top1"].mean()) if len(reference) else float("nan")
    target = float(asked[0]) if len(asked) == 1 else derived if not len(asked) else None
    reached = reached_target(results.epochs, runs, target)
    runs = runs.join(reached, on="trial_id")
    runs["hours_to_target"] = runs["world_size"] * runs["time_to_target_s"] / 3600
    epochs = results.epochs[results.epochs["trial_id"].isin(runs["trial_id"])]
    frame = cells(runs, plain, epochs)
    known_target = target if target is not None and np.isfinite(target) else None
    return Accuracy(runs, epochs, frame, lossless_batches(frame), plain, known_target, bool(len(asked)))


def difference_of(accuracy: Accuracy, cell: pd.Series, reference: pd.Series) -> tuple[float, float, float]:
    """Return the accuracy of a cell minus that of another one, and the ends of its interval (`seed_difference`)."""
    runs = accuracy.runs.set_index("trial_id")
    values, others = (by_seed(runs.loc[list(part["trial_ids"])]) for part in (cell, reference))
    only_layout = all(cell[name] == reference[name] for name in ("recipe", "global_batch"))
    return seed_difference(values, others, only_layout)


SPEED_UP_COLUMNS = [
    "recipe", "global_batch", "world_size", "baseline", *(f"speed_up{end}" for end in ("", "_low", "_high")),
]  # fmt: skip


def rank_speed_ups(accuracy: Accuracy) -> pd.DataFrame:
    """Return how much faster most ranks train than fewest, per recipe and global batch that ran on several numbers.

    Plain training and small batches come first. Columns: `SPEED_UP_COLUMNS`. baseline: the fewest ranks. speed_up:
    ratio of the geometric means of throughput, without validation, with its 95 % interval (Welch's t on logarithms). Of
    several layouts with as many ranks, the one that accumulates least.
    """
    logs = accuracy.runs.set_index("trial_id")["throughput_samples_per_s"].astype(float).map(np.log)
    order = ["recipe_number", "global_batch", "accumulation_steps"]
    cells = accuracy.cells.drop_duplicates("trial_ids").sort_values(order, kind="stable")
    rows = []
    for (recipe, batch), layouts in cells.groupby(["recipe", "global_batch"], sort=False):
        by_size = layouts.drop_duplicates("world_size").sort_values("world_size")
        few, many = by_size.iloc[0], by_size.iloc[-1]
        if few["world_size"] == many["world_size"]:
            continue
        of_many, of_few = (logs.reindex(list(cell["trial_ids"])).dropna() for cell in (many, few))
        speed_up = (float(np.exp(end)) for end in welch_difference(of_many, of_few))
        rows.append((recipe, batch, many["world_size"], few["world_size"], *speed_up))
    return pd.DataFrame(rows, columns=SPEED_UP_COLUMNS).dropna(subset="speed_up")


def by_precision(accuracy: Accuracy | None) -> pd.DataFrame:
    """Return held-out accuracy after the last epoch by number format.

    Columns: recipe, n, top1 and plain_difference, both with `_low` and `_high`, and throughput_samples_per_s (see
    `cells`), and trained (workload and epochs). Empty unless trainings differ only in number format and seed.
    """
    intervals = [f"{name}{end}" for name in ("top1", "plain_difference") for end in ("", "_low", "_high")]
    columns = ["recipe", "n", *intervals, "throughput_samples_per_s", "trained"]
    if accuracy is None or "precision" not in accuracy.runs:
        return pd.DataFrame(columns=columns)
    formats = accuracy.runs.groupby("recipe")["precision"].agg(["first", "nunique"])
    alone = (
        len(formats) == len(accuracy.cells) == accuracy.runs["precision"].nunique() and (formats["nunique"] == 1).all()
    )
    if not alone:
        return pd.DataFrame(columns=columns)
    run = accuracy.runs.iloc[0]
    data = "a workload" if run.get("workload") else f"{run['model']} on {run['dataset']}"
    frame = accuracy.cells.set_index(accuracy.cells["recipe"].map(formats["first"]))
    return frame.assign(trained=f"{data}, {run['epochs']} epochs at global batch {run['global_batch']:.0f}")[columns]


def critical_batch(cells: pd.DataFrame, recipe: str) -> dict[str, Any]:
    """Return the critical batch of a recipe in samples, and the cell and seeds that it comes from.

    Over all epochs and in `noise_scale.PERIODS`, each with its interval over blocks of epochs.
    """
    names = [f"critical_batch{period}" for period in ("", *(f"_{period}" for period in PERIODS))]
    columns = [f"{name}{end}" for name in names for end in ("", "_low", "_high")]
    known = cells[(cells["recipe"] == recipe) & (cells["noise_n"] > 0)]
    known = known.sort_values(["is_reference", "global_batch"], ascending=[False, True], kind="stable")
    epochs = [f"epochs_{period}" for period in PERIODS]
    if known.empty:
        return dict.fromkeys(columns, np.nan) | dict.fromkeys([*epochs, "critical_from"])
    row = known.iloc[0]
    return {
        **{name: row[name.replace("critical_batch", "noise_batch")] for name in columns},
        **{name: row[f"noise_{name}"] for name in epochs},
        "critical_from": f"batch {row['global_batch']} ({row['made_of']}), n = {row['noise_n']}",
    }


def goodput(cells: pd.DataFrame, plain: str) -> pd.DataFrame:
    """Return the goodput of every cell whose recipe, or else the plain one, has a noise scale.

    With noise scale phi, global batch M and reference batch M0: statistical efficiency = (phi + M0) / (phi + M), the
    progress per sample relative to the reference batch; goodput = throughput * efficiency (Qiao et al. 2021, Pollux,
    https://www.usenix.org/conference/osdi21/presentation/qiao, section 3). Columns: efficiency and
    goodput_samples_per_s with `_low` and `_high`, and is_best (the highest of its recipe). The interval of efficiency
    follows from that of phi. The interval of goodput also includes that of throughput; the two are assumed to be
    independent.
    """
    shown = cells[cells["is_chosen"]].copy()
    by_recipe = {str(recipe): critical_batch(cells, str(recipe)) for recipe in shown["recipe"].unique()}
    of_plain = by_recipe.get(plain, critical_batch(cells, plain))
    for end in ("", "_low", "_high"):
        phi = shown["recipe"].map(
            lambda recipe, end=end: (by_recipe[recipe] if by_recipe[recipe]["critical_from"] else of_plain)[
                f"critical_batch{end}"
            ]
        )
        efficiency = (phi + shown["reference_batch"]) / (phi + shown["global_batch"])
        shown[f"efficiency{end}"] = efficiency.where(~np.isinf(phi.astype(float)), 1.0)  # noise hides the gradient
    ends = shown[["efficiency_low", "efficiency_high"]]  # below the reference batch, efficiency falls with phi
    shown["efficiency_low"], shown["efficiency_high"] = ends.min(axis=1, skipna=False), ends.max(axis=1, skipna=False)
    name, product = "goodput_samples_per_s", shown["throughput_samples_per_s"] * shown["efficiency"]
    shown[name] = product
    for end, sign in (("low", -1), ("high", 1)):
        relative = [np.log(shown[f"{part}_{end}"] / shown[part]) for part in ("throughput_samples_per_s", "efficiency")]
        shown[f"{name}_{end}"] = product * np.exp(sign * np.hypot(*relative))
    shown = shown.dropna(subset=name)
    highest = shown.groupby("recipe")["goodput_samples_per_s"].transform("max")
    return shown.assign(is_best=shown["goodput_samples_per_s"] == highest)
