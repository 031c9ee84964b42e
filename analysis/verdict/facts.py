"""What was measured: the fields that vary and those that are the same, of timed and of trained trials separately."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd

from analysis.compare.accuracy import Accuracy
from analysis.measure.configurations import derived_lengths
from analysis.read.own_code import COMMAND_COLUMN, FUNCTION, SCRIPT
from analysis.read.unread import unread_fields
from analysis.study import Analysis, study_ranks
from analysis.text import field_label, field_value, join, text


class Facts(NamedTuple):
    """Fields of one kind of trial: label and value. `kind` is empty if the study has only one kind.

    default: constant fields that have their default and say nothing about the workload or its size.
    """

    kind: str
    varied: Sequence[tuple[str, str]]
    constant: Sequence[tuple[str, str]]
    default: Sequence[tuple[str, str]] = ()


_ALWAYS_SHOWN = ("workload", "layout", "batch")
"""Kinds of fields that are shown even if they have their default."""

_IMAGE_FOLDERS = ("image_folder", "tiny_imagenet")
"""Starts of the names of data sets that are files of images."""

_OF_EPOCHS = ("order", "set_epoch")
"""Fields of storage that data sets in memory read too."""


def facts(analysis: Analysis) -> list[Facts]:
    """Return the fields of the timed and of the trained trials, without those that have no effect."""
    names = [*analysis.axes, *analysis.fixed]
    trained = analysis.accuracy
    of_training = set(analysis.fields.of_kind("recipe", "training")) - {"optimizer"}
    timed = [name for name in names if name in analysis.axes or name not in of_training]
    if trained is None:
        return [_facts(analysis, "", analysis.configurations, timed)]
    learned = [
        name
        for name in analysis.fields.facts
        if name in trained.runs and name not in ("repeat", "seed", *analysis.fields.timing)
    ]
    if analysis.configurations.empty:
        return [_facts(analysis, "", trained.runs, learned)]
    return [
        _facts(analysis, "Timed trials", analysis.configurations, timed),
        _facts(analysis, "Trained trials", trained.runs, learned),
    ]


MOST_NAMES = 3
"""Maximum models or data sets that the line of facts lists."""


def facts_line(analysis: Analysis) -> list[str]:
    """Return model, data, devices, torch version and date of the done trials, without what is unknown."""
    torch = analysis.environment.get("torch")
    return [part for part in (*trained(analysis), f"torch {torch}" if torch else "", *dates(analysis)) if part]


def trained(analysis: Analysis, *, in_prose: bool = False) -> tuple[str, str, str]:
    """Return models, data and devices of the done trials, each empty if unknown or if no trial is done.

    The models of the card come first, in its order. in_prose: as parts of a sentence.
    """
    trials = analysis.results.trials
    done = trials[trials["status"] == "done"]
    if done.empty:
        return "", "", ""
    trial_ids = analysis.configurations["trial_ids"].to_dict()
    place = {trial: i for i, each in enumerate(analysis.headlines) for trial in trial_ids[each.configuration]}
    done = done.loc[done["trial_id"].map(place).sort_values(kind="stable", na_position="last").index]
    own = done["workload"].fillna("") if "workload" in done else pd.Series("", index=done.index)
    models = own.str.rpartition("/")[2].where(own != "", done.get("model", ""))
    if COMMAND_COLUMN in done:
        programs = done[COMMAND_COLUMN].map(own_program)
        models = programs.where(programs != "", models)
    names = [_several(models), _several(done["dataset"][own == ""]) if "dataset" in done else ""]
    images = done[~done.get("model", models).isin(analysis.fields.sequence_models)]
    if "image_size" in done and (sizes := sorted(images["image_size"].dropna().unique())) and names[1]:
        listed = [text(int(size)) for size in sizes[:MOST_NAMES]]
        names[1] += f" images of {join(listed)} pixels" if in_prose else f" ({', '.join(listed)} px)"
    elif in_prose and names[1] == "synthetic":
        names[1] += " text"
    ranks = sorted(done["world_size"].astype(int).unique())
    ends = dict.fromkeys((ranks[0], ranks[-1]))
    count = join([str(size) for size in ranks]) if in_prose else " to ".join(map(str, ends))
    device = str(analysis.environment.get("device") or "")
    one, several = study_ranks(analysis)
    noun = one if ranks == [1] else several
    if set(done["device"]) != {"cuda"} or not device:
        return names[0], names[1], f"{count} {noun}"
    return names[0], names[1], f"{count} {device} {noun}" if in_prose else f"{count} × {device}"


def own_program(command: Any, with_arguments: bool = False) -> str:
    """Return a user's script, or the file of a train function, and whether DDP was added; "" for other trials.

    command: value of `COMMAND_COLUMN`.
    """
    own = command if isinstance(command, dict) else {}
    file = str(own.get(SCRIPT) or own.get(FUNCTION) or "").rpartition("/")[2]
    arguments = own.get("script_arguments") if with_arguments else ""
    return " ".join(filter(None, (file, arguments, "with added DDP" if own.get("add_ddp") else "")))


def dates(analysis: Analysis) -> list[str]:
    """Return the date or range of dates (UTC) on which the done trials started, as a list of one; empty if unknown."""
    trials = analysis.results.trials
    started = trials.loc[trials["status"] == "done", "started_at"].dropna().astype(float)
    if started.empty:
        return []
    days = pd.to_datetime(started, unit="s").dt.strftime("%Y-%m-%d")
    return [" to ".join(dict.fromkeys([days.min(), days.max()]))]


def _several(values: "pd.Series[str]") -> str:
    """Return the distinct values; of many, the first ones and how many more."""
    names = [str(value) for value in dict.fromkeys(values.dropna()) if value]
    more = len(names) - MOST_NAMES
    return join([*names[:MOST_NAMES], f"{more} more"] if more > 0 else names)


def _facts(analysis: Analysis, kind: str, rows: pd.DataFrame, names: Sequence[str]) -> Facts:
    ranks = study_ranks(analysis)
    axes = [name for name in names if name in rows and rows[name].nunique(dropna=False) > 1]
    varied = [
        (
            field_label(name, ranks),
            ", ".join(field_value(name, value) for value in sorted(rows[name].dropna().unique())),
        )
        for name in axes
    ]
    if kind != "Trained trials":
        varied += [
            (field_label(name, ranks), f"{text(lengths.min())} to {text(lengths.max())}, derived from the other fields")
            for name in derived_lengths(analysis.results.trials)
            for lengths in [analysis.results.trials[name]]
        ]
    unread = unread_fields(analysis.results.trials)
    constant: list[tuple[str, str]] = []
    default: list[tuple[str, str]] = []
    for name in names:
        if len(rows) and name in rows and name not in axes and _matters(analysis, name, rows):
            value, known = rows[name].iloc[0], analysis.fields[name]
            is_telling = value != known.default or known.kind in _ALWAYS_SHOWN
            if not is_telling and (name in unread or not _is_read(name, known.kind, rows)):
                continue
            shown = constant if is_telling else default
            shown.append((field_label(name, ranks), field_value(name, value)))
    return Facts(kind, varied, constant, default)


def _is_read(name: str, kind: str, rows: pd.DataFrame) -> bool:
    """Return False for a field of loading or storage that none of the data sets reads."""
    if kind not in ("loading", "storage") or "dataset" not in rows:
        return True
    data = {str(value) for value in rows["dataset"].dropna()} - {"synthetic"}  # one resident batch, which nothing loads
    if kind == "loading" or name in _OF_EPOCHS:
        return bool(data)
    return any(value.startswith(_IMAGE_FOLDERS) for value in data)


def _matters(analysis: Analysis, name: str, rows: pd.DataFrame) -> bool:
    """Return True if a constant field has a value, and an effect in at least one trial."""
    value: Any = rows[name].iloc[0]
    if value in ("", None) or pd.isna(value):
        return False
    known = analysis.fields.facts
    return any(analysis.fields[name].has_effect(row, known) for row in rows.to_dict("records"))


def trained_workload(accuracy: Accuracy) -> str:
    """Return what was trained: model and data set, or the user's workload."""
    runs = accuracy.runs
    own = runs["workload"].fillna("") if "workload" in runs else pd.Series("", index=runs.index)
    labels = [
        workload.rpartition(":")[2] if workload else f"{model} on {dataset}"
        for workload, model, dataset in zip(own, runs["model"], runs["dataset"], strict=True)
    ]
    return join(list(dict.fromkeys(labels)))


def trains_another_model(analysis: Analysis) -> bool:
    """Return True if a trained model is not among the timed ones, so that its accuracy says nothing about those."""
    trained = analysis.accuracy
    if trained is None or analysis.configurations.empty:
        return False
    return not set(trained.runs["model"]) <= set(analysis.configurations["model"])
