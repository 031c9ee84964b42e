"""Accuracy over the global batch: what a large batch costs, what mends it, and which batch trains soonest.

A run is one training. A remedy is everything by which runs differ besides batch, layout and seed; runs of one remedy, batch
and layout make a cell. The reference of a remedy is its cell at the reference batch, where learning-rate rules scale by 1
and so are idle: runs there that differ by their rule alone are the same training.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.remedies import LAYOUT, remedies
from analysis.results import Results
from analysis.statistics import mean_interval, welch_difference

TARGET_SHARE = 0.99
"""Where no trial names a target, it is this share of the reference's mean accuracy."""

RELEVANT_LOSS = 0.01
"""An accuracy counts as held where its interval excludes a loss of so much: a wide interval holds 0 beside anything."""

ELBOW_COLUMNS = [
    "remedy", "reference_batch", "reference_top1", "elbow", "is_open", "failing_batch", "failing_difference",
    "failing_difference_low", "failing_difference_high", "critical_batch", "critical_batch_low", "critical_batch_high", "critical_from",
]  # fmt: skip
"""Columns of `elbows`."""


@dataclass(frozen=True, eq=False)
class Accuracy:
    """The trainings of one environment, computed. Shares lie in 0..1, times in seconds, batches in samples.

    runs: a row a training, see `training_runs`. epochs: their rows of epochs.parquet. cells: see `cells`. elbows: see
    `elbows`. plain: the remedy of the plain reference. target: accuracy of "time to target", None where unknown;
    target_is_asked: a trial named it.
    """

    runs: pd.DataFrame
    epochs: pd.DataFrame
    cells: pd.DataFrame
    elbows: pd.DataFrame
    plain: str
    target: float | None
    target_is_asked: bool


def accuracy(results: Results) -> Accuracy | None:
    """Everything the report says of trainings; None where none is done."""
    runs = training_runs(results.trials, results.epochs)
    if runs.empty:
        return None
    runs, plain = remedies(runs, results.fields)
    asked = runs["target_accuracy"].dropna().unique() if "target_accuracy" in runs else np.array([])
    members = _members(runs)
    reference = members.get(_reference_of(members, plain, plain), runs.iloc[:0])
    derived = TARGET_SHARE * float(reference["validation_top1"].mean()) if len(reference) else float("nan")
    target = float(asked[0]) if len(asked) == 1 else derived if not len(asked) else None
    reached = _reached(results.epochs, runs, target)
    runs = runs.join(reached, on="trial_id")
    runs["hours_to_target"] = runs["world_size"] * runs["time_to_target_s"] / 3600
    epochs = results.epochs[results.epochs["trial_id"].isin(runs["trial_id"])]
    found = cells(runs, plain)
    known = target if target is not None and np.isfinite(target) else None
    return Accuracy(runs, epochs, found, elbows(found), plain, known, bool(len(asked)))


def training_runs(trials: pd.DataFrame, epochs: pd.DataFrame) -> pd.DataFrame:
    """A row for each done training that has an epoch: its fields, and what its last epoch says.

    Columns beside the fields: global_batch; train_* and validation_* of the last epoch; epochs_trained, steps_trained,
    samples_trained, train_s; throughput_samples_per_s (samples / train_s, validation left out); noise_trace and
    noise_norm2 (means over its epochs), noise_batch (their ratio, NaN where either is not positive) with `_first` and
    `_last` (of single epochs); side_by_side (the most trainings of a host at a time, itself included; NaN if not noted).
    """
    rows = trials[trials["status"] == "done"] if "epochs" in trials else trials.iloc[:0]
    rows = rows[rows["trial_id"].isin(epochs["trial_id"])]
    if len(rows):
        rows = rows[rows["epochs"].fillna(0) > 0].reset_index(drop=True)
    if rows.empty:
        return rows
    ordered = epochs.sort_values(["trial_id", "epoch"], kind="stable")
    last = ordered.drop_duplicates("trial_id", keep="last").set_index("trial_id").drop(columns=["learning_rate"])
    last = last.rename(columns={"epoch": "epochs_trained", "step": "steps_trained", "samples": "samples_trained"})
    last = last.drop(columns=["validation_s", "noise_trace", "noise_norm2", "non_finite_steps"])
    by_run = ordered.groupby("trial_id")
    noise = by_run[["noise_trace", "noise_norm2"]].mean()
    last = last.join(noise).assign(noise_batch=_ratio(noise["noise_trace"], noise["noise_norm2"]))
    each = ordered.assign(scale=_ratio(ordered["noise_trace"], ordered["noise_norm2"])).dropna(subset="scale")
    last["noise_batch_first"] = each.groupby("trial_id")["scale"].first()
    last["noise_batch_last"] = each.groupby("trial_id")["scale"].last()
    rows = rows.join(last, on="trial_id")
    rows["global_batch"] = rows["world_size"] * rows["batch_per_gpu"] * rows["accumulation_steps"]
    rows["throughput_samples_per_s"] = rows["samples_trained"] / rows["train_s"]
    rows["side_by_side"] = [_noted(environment, "side_by_side") for environment in rows["environment"]]
    return rows


def by_precision(found: Accuracy | None) -> pd.DataFrame:
    """Held-out accuracy after the last epoch by number format: top1 with `_low` and `_high` (see `cells`), trained (what on).

    Empty unless trainings differ by their number format and seed alone.
    """
    columns = ["top1", "top1_low", "top1_high", "trained"]
    if found is None or "precision" not in found.runs:
        return pd.DataFrame(columns=columns)
    formats = found.runs.groupby("remedy")["precision"].agg(["first", "nunique"])
    alone = len(formats) == len(found.cells) == found.runs["precision"].nunique() and (formats["nunique"] == 1).all()
    if not alone:
        return pd.DataFrame(columns=columns)
    run = found.runs.iloc[0]
    data = "a workload" if run.get("workload") else f"{run['model']} on {run['dataset']}"
    frame = found.cells.set_index(found.cells["remedy"].map(formats["first"]))
    return frame.assign(trained=f"{data}, {run['epochs']} epochs at global batch {run['global_batch']:.0f}")[columns]


def _ratio(numerator: pd.Series, denominator: pd.Series) -> pd.Series:
    return (numerator / denominator).where((numerator > 0) & (denominator > 0))


def _noted(environment: Any, name: str) -> float:
    """The most that a rank noted; NaN where none did."""
    noted = [rank.get(name) for rank in (environment or {}).get("ranks") or ()]
    return float(max((value for value in noted if value), default=np.nan))


def _reached(epochs: pd.DataFrame, runs: pd.DataFrame, target: float | None) -> pd.DataFrame:
    """Steps, samples and seconds to each run's first epoch at its own target, or else the common one; no row if none is."""
    goals = pd.Series(np.nan if target is None else target, index=runs["trial_id"], dtype=float)
    if "target_accuracy" in runs:
        goals = runs.set_index("trial_id")["target_accuracy"].astype(float).fillna(goals)
    there = epochs[epochs["validation_top1"] >= epochs["trial_id"].map(goals)].sort_values("epoch")
    first = there.drop_duplicates("trial_id").set_index("trial_id")[["step", "samples", "train_s"]]
    return first.set_axis(["steps_to_target", "samples_to_target", "time_to_target_s"], axis=1).astype(float)


Key = tuple[Hashable, ...]

_SEEDS = ("seed", "repeat")


def _members(runs: pd.DataFrame) -> dict[Key, pd.DataFrame]:
    """Runs by remedy, global batch and layout, batches ascending, the layout with fewest parts and ranks first.

    A remedy without runs of its own at the reference batch takes those that differ by an idle rule alone.
    """
    keys = ["remedy", "global_batch", *LAYOUT]
    order = ["remedy_number", "global_batch", "accumulation_steps", "world_size"]
    found: dict[Key, pd.DataFrame] = {}
    for remedy, own in runs.assign(is_shared=False).sort_values(order, kind="stable").groupby("remedy", sort=False):
        at_reference = runs["global_batch"] == runs["reference_batch"]
        shared = runs[at_reference & (runs["rest"] == own["rest"].iloc[0]) & (runs["remedy"] != remedy)]
        lacks = not (own["global_batch"] == own["reference_batch"]).any()
        together = (
            pd.concat([shared.assign(remedy=remedy, remedy_number=own["remedy_number"].iloc[0], is_shared=True), own])
            if lacks and len(shared)
            else own
        )
        # trainings that differ by an idle rule alone are one another's copies
        together = together.sort_values(order[1:], kind="stable").drop_duplicates(["global_batch", *LAYOUT, *_SEEDS])
        found |= {tuple(key): part for key, part in together.groupby(keys, sort=False)}
    return found


def _reference_of(members: dict[Key, pd.DataFrame], remedy: str, plain: str) -> Key:
    """The cell at the remedy's reference batch; where there is none the plain one there, else that of its smallest batch."""
    at = [key for key, part in members.items() if key[1] == part["reference_batch"].iloc[0]]
    own = [key for key in at if key[0] == remedy]
    plains = [key for key in at if key[0] == plain]
    return next(iter([*own, *plains, *(key for key in members if key[0] == remedy)]), ())


def cells(runs: pd.DataFrame, plain: str) -> pd.DataFrame:
    """A row for each remedy, global batch and layout.

    Columns: remedy, remedy_number, global_batch, the layout's fields, made_of (the layout in words), is_reference,
    is_chosen (the layout that stands for its batch), is_shared (its runs are also another remedy's), n (seeds); top1 (mean of the last epoch's validation accuracy) with
    `_low` and `_high` (95 %, Student's t) and top1_sd; top5 and losses (means); difference (of top1 to the remedy's own
    reference, or to the plain one where it was not trained at that batch) with `_low` and `_high` (Welch's t) and within_noise (True where the interval holds 0 and excludes a loss of
    RELEVANT_LOSS, False where it excludes 0, None where the seeds are too few to tell); plain_difference:
    the same to the plain reference, for remedies that have another; throughput_samples_per_s (geometric mean with interval);
    noise_batch with `_low`, `_high` (t on logarithms over seeds) and noise_n, `_first`, `_last` epoch (geometric means);
    reached (runs that reached the target), steps_to_target, samples_to_target, time_to_target_s with `_low` and `_high` and
    hours_to_target (rank-hours): means, and NaN unless every run reached it; side_by_side (most); trial_ids.
    """
    members = _members(runs)
    rows = []
    plain_reference = _reference_of(members, plain, plain)
    for key, part in members.items():
        remedy = key[0]
        reference = _reference_of(members, str(remedy), plain)
        first = next(other for other in members if other[:2] == key[:2])
        values = part["validation_top1"].dropna()
        row: dict[str, Any] = dict(zip(["remedy", "global_batch", *LAYOUT], key, strict=True))
        low, high = mean_interval(values, least=0, most=1)
        row |= {
            "remedy_number": part["remedy_number"].min(),
            "is_shared": bool(part["is_shared"].all()),
            "reference_batch": part["reference_batch"].iloc[0],
        }
        row |= {
            "made_of": made_of(*key[2:]),
            "is_reference": key == reference,
            "is_chosen": key == first,
            "n": len(values),
        }
        row |= {"top1": values.mean(), "top1_low": low, "top1_high": high, "top1_sd": values.std()}
        row |= {"top5": part["validation_top5"].mean(), "train_loss": part["train_loss"].mean()}
        row |= _difference("difference", values, members[reference]["validation_top1"], key == reference)
        foreign = plain_reference and members[plain_reference]["rest"].iloc[0] != part["rest"].iloc[0]
        other = members[plain_reference]["validation_top1"] if foreign else values.iloc[:0]
        row |= _difference("plain_difference", values, other, not foreign)
        row |= _throughput(part["throughput_samples_per_s"].dropna())
        row |= _noise(part) | _to_target(part)
        row |= {"side_by_side": part["side_by_side"].max(), "trial_ids": tuple(part["trial_id"])}
        rows.append(row)
    return pd.DataFrame(rows)


def made_of(world_size: Any, batch_per_gpu: Any, accumulation_steps: Any) -> str:
    """A global batch as ranks × batch of a forward pass, which is what batch normalisation sees, × parts."""
    text = f"{world_size} × {batch_per_gpu}"
    return text if accumulation_steps == 1 else f"{text} × {accumulation_steps} accumulated"


def _difference(name: str, values: pd.Series, reference: pd.Series, is_reference: bool) -> dict[str, Any]:
    middle, low, high = (np.nan,) * 3 if is_reference else welch_difference(values, reference.dropna(), 1.0)
    within = True if -RELEVANT_LOSS < low <= 0 <= high else False if low > 0 or high < 0 else None
    found = {name: middle, f"{name}_low": low, f"{name}_high": high}
    return found | ({"within_noise": within} if name == "difference" else {})


def _throughput(values: pd.Series) -> dict[str, float]:
    logs = values.astype(float).map(np.log)
    ends = dict(zip(("", "_low", "_high"), (logs.mean(), *mean_interval(logs)), strict=True))
    return {f"throughput_samples_per_s{end}": float(np.exp(log)) for end, log in ends.items()}


def _noise(part: pd.DataFrame) -> dict[str, Any]:
    logs = part["noise_batch"].astype(float).dropna().map(np.log)
    low, high = mean_interval(logs)
    ends = {
        f"noise_batch_{end}": np.exp(np.log(part[f"noise_batch_{end}"].astype(float)).mean())
        for end in ("first", "last")
    }
    found = {"noise_batch": np.exp(logs.mean()) if len(logs) else np.nan, "noise_n": len(logs)}
    return found | {"noise_batch_low": np.exp(low), "noise_batch_high": np.exp(high)} | ends


def _to_target(part: pd.DataFrame) -> dict[str, Any]:
    reached = part["time_to_target_s"].notna()
    names = ("steps_to_target", "samples_to_target", "time_to_target_s", "hours_to_target")
    found = {name: part[name].mean() if reached.all() else np.nan for name in names}
    low, high = mean_interval(part["time_to_target_s"], least=0) if reached.all() else (np.nan, np.nan)
    ends = {"time_to_target_s_low": low, "time_to_target_s_high": high}
    return found | ends | {"reached": int(reached.sum()), "runs": len(part)}


def elbows(found: pd.DataFrame) -> pd.DataFrame:
    """A row for each remedy with batches above its reference.

    elbow: the largest batch, from the reference upwards, before accuracy first leaves the noise downwards (the interval of
    its difference lies below 0), NaN where seeds too few leave that open; is_open: it never left, so the elbow may lie
    higher; failing_batch and its difference with `_low` and `_high`: where it left. critical_batch with `_low`, `_high`, `_n`:
    the gradient noise scale (McCandlish et al. 2018, https://arxiv.org/abs/1812.06162, section 2.3: B_crit is about
    B_simple) of the remedy's own runs at the reference batch, or at its smallest batch with one; critical_from: which.
    """
    rows = []
    for remedy, part in found.groupby("remedy", sort=False):
        own = part[part["is_chosen"]].sort_values("global_batch")
        reference = own[own["is_reference"]]
        if reference.empty:
            continue
        above = own[own["global_batch"] > reference["global_batch"].iloc[0]]
        if above.empty:
            continue
        fails = above[above["difference_high"] < 0]
        failing = fails.iloc[0] if len(fails) else None
        before = above if failing is None else above[above["global_batch"] < failing["global_batch"]]
        unknown = bool(before["within_noise"].isna().any())
        held = [int(reference["global_batch"].iloc[0]), *(int(batch) for batch in before["global_batch"])]
        row = {"remedy": remedy, "reference_batch": held[0], "reference_top1": reference["top1"].iloc[0]}
        row |= {"elbow": np.nan if unknown else held[-1], "is_open": not unknown and failing is None}
        for name in ("global_batch", "difference", "difference_low", "difference_high"):
            row[f"failing_{name}".replace("global_", "")] = np.nan if failing is None else failing[name]
        rows.append(row | critical_batch(found, str(remedy)))
    return pd.DataFrame(rows, columns=ELBOW_COLUMNS)


def critical_batch(found: pd.DataFrame, remedy: str) -> dict[str, Any]:
    """Critical batch of a remedy in samples, with its interval over seeds and the cell that it comes from."""
    known = found[(found["remedy"] == remedy) & found["noise_batch"].notna()]
    known = known.sort_values(["is_reference", "global_batch"], ascending=[False, True], kind="stable")
    if known.empty:
        return {
            "critical_batch": np.nan,
            "critical_batch_low": np.nan,
            "critical_batch_high": np.nan,
            "critical_from": None,
        }
    row = known.iloc[0]
    return {
        "critical_batch": row["noise_batch"],
        "critical_batch_low": row["noise_batch_low"],
        "critical_batch_high": row["noise_batch_high"],
        "critical_from": f"batch {row['global_batch']} ({row['made_of']}), n = {row['noise_n']}",
    }


def goodput(found: pd.DataFrame, plain: str) -> pd.DataFrame:
    """Throughput that counts, for every cell whose remedy, or else the plain one, has a noise scale.

    With phi the noise scale, M the global batch and M0 the reference batch: statistical efficiency = (phi + M0) / (phi + M),
    the progress of a sample relative to the reference batch; goodput = throughput * efficiency (Qiao et al. 2021, Pollux,
    https://www.usenix.org/conference/osdi21/presentation/qiao, section 3). Columns: efficiency and
    goodput_samples_per_s with `_low` and `_high` (efficiency's from the interval of phi; goodput's from that and from the
    throughput's, the two taken as independent), is_best (the highest of its remedy).
    """
    shown = found[found["is_chosen"]].copy()
    of = {str(remedy): critical_batch(found, str(remedy)) for remedy in shown["remedy"].unique()}
    plains = of.get(plain, critical_batch(found, plain))
    for end in ("", "_low", "_high"):
        phi = shown["remedy"].map(
            lambda remedy, end=end: (of[remedy] if of[remedy]["critical_from"] else plains)[f"critical_batch{end}"]
        )
        shown[f"efficiency{end}"] = (phi + shown["reference_batch"]) / (phi + shown["global_batch"])
    ends = shown[["efficiency_low", "efficiency_high"]]  # below the reference batch a larger phi lowers the efficiency
    shown["efficiency_low"], shown["efficiency_high"] = ends.min(axis=1, skipna=False), ends.max(axis=1, skipna=False)
    name, product = "goodput_samples_per_s", shown["throughput_samples_per_s"] * shown["efficiency"]
    shown[name] = product
    for end, sign in (("low", -1), ("high", 1)):
        off = [np.log(shown[f"{part}_{end}"] / shown[part]) for part in ("throughput_samples_per_s", "efficiency")]
        shown[f"{name}_{end}"] = product * np.exp(sign * np.hypot(*off))
    shown = shown.dropna(subset=name)
    highest = shown.groupby("remedy")["goodput_samples_per_s"].transform("max")
    return shown.assign(is_best=shown["goodput_samples_per_s"] == highest)
