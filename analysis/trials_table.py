"""Every trial of a study, with the command that measures its configuration again: where each number comes from."""

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from analysis.columns import axis_columns
from analysis.formatting import text
from analysis.scaling import Analysis, trial_fields
from analysis.table import Column, Table

_OPTIONS = {
    "world_size": "gpus",
    "nodes": "nodes",
    "batch_per_gpu": "batch-per-gpu",
    "loader_workers": "loader-workers",
    "precision": "precision",
    "model": "model",
    "interconnect": "interconnect",
    "steps": "steps",
    "seed": "seed",
    "workload": "workload",
    "data_dir": "data-dir",
}
"""The command line's own options for fields of a trial; any other goes through --set."""

_NEVER = ("repeat", "workload_digest")
_ALWAYS = ("world_size", "nodes", "batch_per_gpu", "cpus_per_rank", "device", "gradient_as_bucket_view")
"""Fields that a study may choose by the machine that it finds, and one whose default has been another."""

_WITH_VIEWS = ("ddp", "ddp_fp16", "ddp_bf16", "zero1")
"""Strategies that have gradients as views of buckets; others are refused where that field is not today's default."""

_PROGRAM = "python -m study.scaling"

AGAIN = "results/again"


def trials(analysis: Analysis) -> Table:
    """Every trial with its outcome, and the command that measures its configuration again."""
    frame = analysis.results.trials
    axes = [column for column in axis_columns(analysis) if column.name in frame]
    measured = analysis.measured.set_index("trial_id")[["throughput_samples_per_s", "step_s"]].astype(float)
    fields = _asked(analysis)
    rows = frame[["trial_id", "status", *(column.name for column in axes)]].join(measured, on="trial_id")
    rows = rows.assign(
        status=rows["status"].str.replace("_", " "),
        repeat=frame["repeat"] if "repeat" in frame else float("nan"),
        command=[again(analysis.results.study, row, fields) for row in frame.to_dict("records")],
    )
    order = [*(column.name for column in axes), "repeat"]
    return Table(
        "Every trial, and how to run it again",
        (
            *axes,
            Column("repeat", "repeat", decimals=0, optional=True),
            Column("status", "status"),
            Column("throughput_samples_per_s", "throughput (samples/s)", "of this trial alone."),
            Column("step_s", "step time (ms)", "of this trial alone.", 1e3),
            Column("trial_id", "trial", "its folder below trials/ in the results holds everything that was measured."),
            Column("command", "run its configuration again", f"one fresh repeat, into {AGAIN}."),
        ),
        rows.sort_values(order, kind="stable"),
        "A row of any other table is made from the trials with the same fields; in its CSV the last column names them.",
        blocks=tuple(column.name for column in axes),
    )  # fmt: skip


def again(study: Mapping[str, Any], fields: Mapping[Any, Any], names: Iterable[str]) -> str:
    """The command that measures one configuration again: the study, and the fields `names` of the trial in full.

    The program knows only its own studies by name; any other's trials are run as those of the default one.
    """
    command = [*_PROGRAM.split(), "run"]
    name = study.get("name") if _is_ours(study) else "default"
    command += [str(name)] if name else []
    for field in names:
        value = fields.get(field)
        without = field == "gradient_as_bucket_view" and fields.get("parallel", "ddp") not in _WITH_VIEWS
        if text(value) in ("", "–") or field in _NEVER or without:
            continue
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        command += [f"--{_OPTIONS[field]}", shown] if field in _OPTIONS else ["--set", f"{field}={shown}"]
    return shlex.join([*command, "--repeats", "1", "--out", AGAIN])


def _is_ours(study: Mapping[str, Any]) -> bool:
    """Whether the program itself ran the study, not a benchmark with trials of its own making."""
    return str(study.get("command") or _PROGRAM).startswith(_PROGRAM)


def _asked(analysis: Analysis) -> list[str]:
    """Fields that tell a trial of this study from the program's defaults: what its configuration names, and what varies.

    All of them where the program does not know the study.
    """
    known = trial_fields(analysis.results.trials)
    if not _is_ours(analysis.results.study):
        return known
    configuration = analysis.results.study.get("configuration")
    configuration = configuration if isinstance(configuration, dict) else {}
    settings = configuration.get("set")
    of_option = {option: field for field, option in _OPTIONS.items()}
    asked = {of_option.get(str(name), "") for name in configuration} | set(
        settings if isinstance(settings, dict) else ()
    )
    trained = analysis.accuracy.runs if analysis.accuracy else analysis.results.trials.iloc[:0]
    asked |= {name for name in known if trained[name].nunique(dropna=False) > 1}
    return [name for name in known if name in asked or name in analysis.axes or name in _ALWAYS]
