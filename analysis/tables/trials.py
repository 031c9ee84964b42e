"""Every trial of a study, with the command that measures its configuration again: where each number comes from."""

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from analysis.load.fields import Fields
from analysis.measure.configurations import trial_fields
from analysis.study import Analysis
from analysis.tables.table import Column, Table, axis_columns
from analysis.text import text

AGAIN = "results/again"


def trials(analysis: Analysis) -> Table:
    """Every trial with its outcome, and the command that measures its configuration again."""
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
        "Every trial, and how to run it again",
        (
            *axes,
            Column("repeat", "repeat", "number of the run among those of its configuration, from 0.", decimals=0, optional=True),
            Column("status", "status", "done, or why there is no result: the table of trials without one has the reasons."),
            Column("throughput_samples_per_s", "throughput (samples/s)", "of this trial alone."),
            Column("step_s", "step time (ms)", "of this trial alone.", 1e3),
            Column("trial_id", "trial", "its folder below trials/ in the results holds everything that was measured."),
            Column("command", "run its configuration again", f"one fresh repeat, into {AGAIN}."),
        ),
        rows.sort_values(order, kind="stable"),
        "A row of any other table is made from the trials with the same fields; in its CSV the last column names them.",
        blocks=tuple(column.name for column in axes),
    )  # fmt: skip


def again(fields: Mapping[Any, Any], names: Iterable[str], declared: Fields) -> str:
    """The command that measures one configuration again: the fields `names` of the trial in full.

    They are set on the default study, a plain grid, of which they leave one trial: the trial's own may be a benchmark's,
    which has no name on the command line, or may since have become another.
    """
    command = ["python", "-m", "study.scaling", "run", "default"]
    for field in names:
        value = fields.get(field)
        facts = declared[field]
        refused = value != facts.default and not facts.has_effect(fields, declared.facts)
        if text(value) in ("", "–") or facts.option is None or refused:
            continue
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        command += ["--set", f"{field}={shown}"] if facts.option == "set" else [f"--{facts.option}", shown]
    return shlex.join([*command, "--repeats", "1", "--out", AGAIN])


def failures(analysis: Analysis) -> Table:
    """Every trial without a result, and why."""
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
                "failed: an exception, or a rank that died; timeout: no answer for too long; pruned: not tried, for a smaller batch "
                "ran out of memory; infeasible: not tried, for it cannot be run here.",
            ),
            Column("reason", "reason", "the error in one line, or what stood in the way."),
            Column("log", "log", "path in the results folder.", optional=True),
        ),
        frame,
        blocks=("status",),
        empty="Every trial has a result.",
    )
