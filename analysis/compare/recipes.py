"""What a run does against the loss of accuracy at large batches, in words: the fields in which it differs from the plain one."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis.load.fields import Fields
from analysis.load.results import OUTCOME_COLUMNS
from analysis.text import value_label

NOTHING = "nothing"

LAYOUT = ("world_size", "batch_per_gpu", "accumulation_steps")
"""fields that make a global batch"""

RULE = ("lr_rule", "warmup", "warmup_epochs")
"""fields that change nothing at the reference batch"""

_NO_RECIPE_KINDS = ("loading", "layout", "batch", "machine", "timing", "run")
_NO_RECIPE = ("noise_scale", "reference_batch", "interconnect")
"""fields that are no part of a recipe, however they vary"""

_RULES = {"linear": "linear", "sqrt": "square root"}
_OPTIMIZERS = {"sgd": "SGD", "nesterov": "Nesterov momentum", "lars": "LARS", "lamb": "LAMB", "adamw": "AdamW"}
_WORDS = {
    ("decay_norm_and_bias", False): "no decay of norms and biases",
    ("decay_norm_and_bias", True): "decay of norms and biases",
    ("zero_gamma", True): "zero gamma",
    ("zero_gamma", False): "no zero gamma",
    ("momentum_correction", False): "no momentum correction",
    ("sync_batch_norm", True): "batch normalisation over all ranks",
    ("loss_mean", "rank"): "loss averaged by rank",
    ("shared_shuffle", False): "a shuffle of each rank's own",
    ("label_smoothing", 0.0): "no label smoothing",
}


def remedies(runs: pd.DataFrame, declared: Fields) -> tuple[pd.DataFrame, str]:
    """`runs` with columns remedy (in words), remedy_number (of remedies, the plain one first) and rest (what tells references apart:
    all that varies but the rule); and the name of the plain remedy.

    The plain run has no learning-rate rule, and of what else varies the values that most runs without a rule have; of
    values that as many have, those in fp32.
    """
    aside = {*declared.of_kind(*_NO_RECIPE_KINDS), *_NO_RECIPE, *RULE}
    fields = [name for name in _fields(runs) if name not in aside]
    varying = [name for name in fields if runs[name].nunique(dropna=False) > 1]
    rest = [" ".join(map(str, values)) for values in runs[varying].to_numpy()]
    ruled = runs["lr_rule"] != "none"
    base = pd.Series(rest)[~ruled.to_numpy()] if (~ruled).any() else pd.Series(rest)
    usual = _most_usual(base, runs)
    plain = runs.iloc[rest.index(usual)]
    told = [name for name in varying if not (name == "learning_rate" and _follows_optimizer(runs))]
    spans = runs.loc[runs["warmup"] != "none", "warmup_epochs"].nunique() > 1
    formats = told == ["precision"] and not ruled.any()  # compared with one another, and none of them mends anything
    names = [str(row["precision"]) if formats else _name(row, plain, told, spans) for _, row in runs.iterrows()]
    runs = runs.assign(remedy=names, rest=rest)
    plain_name = NOTHING if NOTHING in names else str(runs["remedy"][runs["rest"] == usual].iloc[0])
    rows = sorted(set(names), key=lambda name: (name != plain_name, name.count(" + "), name))
    runs["remedy_number"] = [rows.index(name) for name in names]
    return runs, plain_name


def _most_usual(rest: pd.Series, runs: pd.DataFrame) -> str:
    """What most of these runs have; of what as many have, that in fp32, which other number formats are held against."""
    counts = rest.value_counts()
    first = rest[rest.isin(counts[counts == counts.max()].index)].drop_duplicates()
    precisions = runs["precision"].iloc[first.index] if "precision" in runs else pd.Series("", index=first.index)
    return str(min(zip(precisions != "fp32", first, strict=True))[1])


def _fields(runs: pd.DataFrame) -> list[str]:
    """Fields of trials among the columns: those before the measures, of which epochs_trained is the first."""
    columns = list(runs.columns)
    return [name for name in columns[: columns.index("epochs_trained")] if name not in OUTCOME_COLUMNS]


def _follows_optimizer(runs: pd.DataFrame) -> bool:
    """Whether each optimizer has one learning rate, which its name then stands for."""
    return "optimizer" in runs and bool((runs.groupby("optimizer")["learning_rate"].nunique() == 1).all())


def _name(row: pd.Series, plain: pd.Series, told: Sequence[str], spans: bool) -> str:
    parts = []
    idle = row["global_batch"] == row["reference_batch"]
    if row["lr_rule"] != "none" and not (idle and _alike(row, plain, told)):
        parts.append(_RULES.get(row["lr_rule"], str(row["lr_rule"])))
        if row["warmup"] != "none":
            over = f" over {row['warmup_epochs']:g} epochs" if spans else ""
            parts.append(f"{row['warmup']} warm-up{over}")
    parts += [_word(name, row[name]) for name in told if str(row[name]) != str(plain[name])]
    return " + ".join(parts) or NOTHING


def _alike(row: pd.Series, plain: pd.Series, told: Sequence[str]) -> bool:
    return all(str(row[name]) == str(plain[name]) for name in told)


def _word(field: str, value: Any) -> str:
    if field == "optimizer":
        return _OPTIMIZERS.get(str(value), str(value))
    for (name, known), word in _WORDS.items():
        if name == field and value == known:
            return word
    return value_label(field, value, ("rank", "ranks"))
