"""Tables of single trials: all trials with the command that repeats them, and trials without a result."""

import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from analysis.measure.configurations import trial_fields
from analysis.read.fields import Fields
from analysis.read.own_code import COMMAND_COLUMN
from analysis.study import Analysis
from analysis.tables.table import Column, Table, axis_columns
from analysis.text import text

AGAIN = "results/again"

STATED = frozenset({
    "batch_per_gpu", "communication_steps", "cpus_per_rank", "dataset", "device", "image_size", "memory_format",
    "model", "nodes", "precision", "sequence_length", "steps", "sweep_bytes", "warmup_steps", "window_limit_s",
    "world_size",
})  # fmt: skip
"""Fields that the default study or its plan sets. A command leaves out others that have their default."""


def trials(analysis: Analysis) -> Table:
    """Tabulate every trial with its outcome and the command that repeats it."""
    frame = analysis.results.trials
    axes = [column for column in axis_columns(analysis) if column.name in frame]
    measured = analysis.measured.set_index("trial_id")[["throughput_samples_per_s", "step_s"]].astype(float)
    fields = trial_fields(frame)
    rows = frame[["trial_id", "status", *(column.name for column in axes)]].join(measured, on="trial_id")
    rows = rows.assign(
        status=rows["status"].str.replace("_", " "),
        repeat=frame["repeat"] if "repeat" in frame else float("nan"),
        command=[again(row, fields, analysis.fields) for row in frame.to_dict("records")],
    )
    order = [*(column.name for column in axes), "repeat"]
    return Table(
        "All trials, and how to rerun them",
        (
            *axes,
            Column("repeat", "repeat", "number of the repeat within its configuration, from 0.", decimals=0),
            Column("status", "status", "done, or why there is no result; see the table of trials without a result."),
            Column("throughput_samples_per_s", "throughput (samples/s)", "of this trial alone."),
            Column("step_s", "step time (ms)", "of this trial alone.", 1e3),
            Column("trial_id", "trial", "its folder below trials/ in the results contains all measurements."),
            Column("command", "rerun its configuration", f"one new repeat, into {AGAIN}."),
        ),
        rows.sort_values(order, kind="stable"),
        "Rows of other tables summarise the trials with the same fields; the last column of their CSV lists them.",
        blocks=tuple(column.name for column in axes),
    )


def again(fields: Mapping[Any, Any], names: Iterable[str], declared: Fields) -> str:
    """Return the command that measures one configuration again, with all fields in `names`.

    The command sets them on the default study, a plain grid, which leaves one trial. The trial's own study may have no
    name on the command line, or may have changed. Fields outside `STATED` that have their default are left out.
    """
    own_code = fields.get(COMMAND_COLUMN)
    if isinstance(own_code, dict):
        return _again_own_code(fields, own_code, declared)
    command = ["python", "-m", "study.scaling", "run", "default"]
    for field in names:
        value = fields.get(field)
        facts = declared[field]
        refused = value != facts.default and not facts.has_effect(fields, declared.facts)
        left_out = field not in STATED and value == facts.default
        if text(value) in ("", "–") or facts.option is None or refused or left_out:
            continue
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        command += ["--set", f"{field}={shown}"] if facts.option == "set" else [f"--{facts.option}", shown]
    return shlex.join([*command, "--repeats", "1", "--out", AGAIN])


def _again_own_code(fields: Mapping[Any, Any], own_code: Mapping[str, Any], declared: Fields) -> str:
    """Return the command for a user's own script or train function. Varied flags are among the script's arguments."""
    command = ["python", "-m", "study.scaling", "run"]
    command += [part for name in ("script", "train_function") if name in own_code for part in _option(name, own_code)]
    for name, value in json.loads(own_code.get("function_config", "{}")).items():
        command.append(f"--vary={name}={value if isinstance(value, str) else json.dumps(value)}")
    bound = shlex.split(own_code.get("bindings", ""))
    command += [f"--bind={entry}" for entry in bound]
    command += [f"--env={entry}" for entry in shlex.split(own_code.get("script_env", ""))]
    if "tokens_per_sample" in own_code:
        command += ["--tokens-per-sample", str(own_code["tokens_per_sample"])]
    if "add_ddp" in own_code:
        command.append("--add-ddp")
    passed_on = {entry.partition("=")[0] for entry in bound}
    for name, facts in declared.facts.items():
        if name not in own_code and facts.option and (facts.any_door or name in passed_on):
            value = fields.get(name)
            if text(value) not in ("", "–"):
                command += ["--set", f"{name}={value}"] if facts.option == "set" else [f"--{facts.option}", str(value)]
    command += ["--repeats", "1", "--out", AGAIN]
    arguments = [part for name in ("script_arguments", "script_flags") for part in shlex.split(own_code.get(name, ""))]
    return shlex.join([*command, *(["--", *arguments] if arguments else [])])


def _option(name: str, own_code: Mapping[str, Any]) -> list[str]:
    return ["--script" if name == "script" else "--train-func", str(own_code[name])]


def failures(analysis: Analysis) -> Table:
    """Tabulate every trial without a result, with the reason."""
    trials = analysis.results.trials
    frame = trials[trials["status"] != "done"].copy()
    order = {name: i for i, name in enumerate(("failed", "timeout", "out_of_memory", "pruned", "infeasible"))}
    frame = frame.sort_values("status", key=lambda s: s.map(order).fillna(len(order)), kind="stable")
    frame["status"] = frame["status"].str.replace("_", " ")
    frame["log"] = [
        f"trials/{row.trial_id}/{row.log}" if isinstance(row.log, str) else None for row in frame.itertuples()
    ]
    return Table(
        "Trials without a result",
        (
            Column("trial_id", "trial", "its folder below trials/ in the results."),
            Column(
                "status",
                "status",
                "failed: an exception, or a dead rank; timeout: no response for too long; pruned: not run, since a "
                "smaller "
                "batch ran out of memory; infeasible: not run, since this cluster cannot run it.",
            ),
            Column("reason", "reason", "the error in one line, or the missing requirement."),
            Column("log", "log", "path in the results folder."),
        ),
        frame,
        blocks=("status",),
        empty="Every trial has a result.",
    )
