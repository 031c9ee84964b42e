"""Names for large-batch training recipes, derived from the fields that differ from the plain run."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis.read.fields import Fields
from analysis.read.results import OUTCOME_COLUMNS
from analysis.text import RankNouns, value_label

NOTHING = "no recipe"

LAYOUT = ("world_size", "batch_per_gpu", "accumulation_steps")
"""Fields that make up a global batch."""

RULE = ("lr_rule", "warmup", "warmup_epochs")
"""Fields without effect at the reference batch."""

_NO_RECIPE_KINDS = ("loading", "layout", "batch", "machine", "timing", "run")
_NO_RECIPE = ("noise_scale", "reference_batch", "interconnect")
"""Fields that are never part of a recipe."""

_LEVELS = {"fp32": "O0", "fp16": "O1", "fp16_master": "O2", "fp16_pure": "O3"}
"""Levels of mixed precision, as NVIDIA Apex names them."""

_RULES = {"linear": "linear", "sqrt": "square root"}
_OPTIMIZERS = {"sgd": "SGD", "nesterov": "Nesterov momentum", "lars": "LARS", "lamb": "LAMB", "adamw": "AdamW"}
_WORDS = {
    ("decay_norm_and_bias", False): "no decay of norms and biases",
    ("decay_norm_and_bias", True): "decay of norms and biases",
    ("zero_gamma", True): "zero gamma",
    ("zero_gamma", False): "no zero gamma",
    ("momentum_correction", False): "no momentum correction",
    ("sync_batch_norm", True): "batch normalisation over all ranks",
    ("loss_mean", "rank"): "loss averaged per rank",
    ("shared_shuffle", False): "separate shuffle per rank",
    ("label_smoothing", 0.0): "no label smoothing",
}


def in_words(recipe: str) -> str:
    """Return the recipe of a training as part of a sentence: "without a recipe", or "with linear"."""
    return "without a recipe" if recipe == NOTHING else f"with {recipe}"


def with_recipes(runs: pd.DataFrame, declared: Fields) -> tuple[pd.DataFrame, str]:
    """Add the recipe of each run, and return the name of the plain recipe.

    Columns: recipe (name of the recipe), recipe_number (plain one first) and rest (all varying fields except the rule;
    it identifies the reference).

    The plain run has no learning-rate rule. Its other fields have the most frequent values among runs without a rule;
    fp32 wins ties.
    """
    excluded = {*declared.of_kind(*_NO_RECIPE_KINDS), *_NO_RECIPE, *RULE}
    fields = [name for name in _fields(runs) if name not in excluded]
    varying = [name for name in fields if runs[name].nunique(dropna=False) > 1]
    rest = [" ".join(map(str, values)) for values in runs[varying].to_numpy()]
    ruled = runs["lr_rule"] != "none"
    base = pd.Series(rest)[~ruled.to_numpy()] if (~ruled).any() else pd.Series(rest)
    plain_rest = _most_frequent(base, runs)
    plain = runs.iloc[rest.index(plain_rest)]
    named = [name for name in varying if not (name == "learning_rate" and _follows_optimizer(runs))]
    warmups_differ = runs.loc[runs["warmup"] != "none", "warmup_epochs"].nunique() > 1
    nouns = RankNouns.of((), declared.labels)
    # Number formats are compared with each other; none of them is a recipe.
    only_precision_varies = named == ["precision"] and not ruled.any()
    if only_precision_varies:
        names = _format_names(runs["precision"])
    else:
        names = [_name(row, plain, named, warmups_differ, nouns) for _, row in runs.iterrows()]
    runs = runs.assign(recipe=names, rest=rest)
    plain_name = NOTHING if NOTHING in names else str(runs["recipe"][runs["rest"] == plain_rest].iloc[0])
    rows = sorted(set(names), key=lambda name: (name != plain_name, name.count(" + "), name))
    runs["recipe_number"] = [rows.index(name) for name in names]
    return runs, plain_name


def _format_names(formats: pd.Series) -> list[str]:
    """Return the names of number formats, with their levels of mixed precision if each of them has one."""
    have_levels = formats.isin([*_LEVELS]).all()
    return [f"{name} ({_LEVELS[name]})" if have_levels else str(name) for name in formats]


def _most_frequent(rest: pd.Series, runs: pd.DataFrame) -> str:
    """Return the most frequent value; fp32, the reference for number formats, wins ties."""
    counts = rest.value_counts()
    first = rest[rest.isin(counts[counts == counts.max()].index)].drop_duplicates()
    return str(min(zip(runs["precision"].iloc[first.index] != "fp32", first, strict=True))[1])


def _fields(runs: pd.DataFrame) -> list[str]:
    """Return the trial fields: columns before the measures, whose first is epochs_trained."""
    columns = list(runs.columns)
    return [name for name in columns[: columns.index("epochs_trained")] if name not in OUTCOME_COLUMNS]


def _follows_optimizer(runs: pd.DataFrame) -> bool:
    """Return True if each optimizer has a single learning rate, which its name then implies."""
    return bool((runs.groupby("optimizer")["learning_rate"].nunique() <= 1).all())


def _name(row: pd.Series, plain: pd.Series, named: Sequence[str], warmups_differ: bool, nouns: RankNouns) -> str:
    parts = []
    at_reference = row["global_batch"] == row["reference_batch"]
    if row["lr_rule"] != "none" and not (at_reference and _alike(row, plain, named)):
        parts.append(_RULES.get(row["lr_rule"], str(row["lr_rule"])))
        if row["warmup"] != "none":
            over = f" over {row['warmup_epochs']:g} epochs" if warmups_differ else ""
            parts.append(f"{row['warmup']} warm-up{over}")
    parts += [_word(name, row[name], nouns) for name in named if str(row[name]) != str(plain[name])]
    return " + ".join(parts) or NOTHING


def _alike(row: pd.Series, plain: pd.Series, named: Sequence[str]) -> bool:
    return all(str(row[name]) == str(plain[name]) for name in named)


def _word(field: str, value: Any, nouns: RankNouns) -> str:
    if field == "optimizer":
        return _OPTIMIZERS.get(str(value), str(value))
    for (name, known), word in _WORDS.items():
        if name == field and value == known:
            return word
    return value_label(field, value, nouns)
