"""Tables that check the data: findings with affected trials and fixes, and the live breakdown against traces."""

import pandas as pd

from analysis.checks.finding import FALSE_ALARM, MATTERS
from analysis.checks.steps import CHECKS
from analysis.measure.trace import agreement
from analysis.study import Analysis
from analysis.tables.table import Column, Table, axis_columns
from analysis.text import MOST_NAMED, join, named, percent


def data_checks(analysis: Analysis) -> Table:
    """Tabulate the findings of all data checks (`checks.CHECKS`), with the trials concerned."""
    findings = analysis.findings
    silent = [_words(name) for name in CHECKS if name not in {finding.name for finding in findings}]
    frame = pd.DataFrame(
        {
            "check": [_words(finding.name) for finding in findings],
            "finding": [finding.sentence for finding in findings],
            "what_to_do": [finding.what_to_do for finding in findings],
            "trials": [len(finding.trial_ids) for finding in findings],
            "such_as": [named(finding.trial_ids) for finding in findings],
            "trial_ids": [finding.trial_ids for finding in findings],
        },
        columns=["check", "finding", "what_to_do", "trials", "such_as", "trial_ids"],
    )
    passed = f"Checks without findings: {join(silent)}. " if silent else ""
    return Table(
        "Data checks",
        (
            Column("check", "check", "what was checked."),
            Column("finding", "finding", "what was found, and how large the effect is."),
            Column("what_to_do", "what to do", "how to avoid it in another run, or which results to read with care."),
            Column("trials", "trials", "number of affected trials.", decimals=0),
            Column("such_as", "examples", f"the first {MOST_NAMED} affected trials; the CSV file lists all."),
        ),
        frame,
        f"{passed}Each check has a false-alarm rate of at most {percent(FALSE_ALARM)} per study and ignores effects "
        f"below {percent(MATTERS)} of a step. With few trials or steps, effects may go undetected.",
        empty="" if analysis.configurations.empty else "No check has findings.",
    )


def _words(name: str) -> str:
    return name.replace("_", " ")


_HIDDEN = "all-reduces of the gradients (union of their intervals) before the last local gradient."


_WIRE = "transfer time: the shortest time of any rank."


_EXPOSED = "all-reduces after the last local gradient."


_UNCOVERED = (
    "all-reduces while no compute kernel ran, called exposed by Holistic Trace Analysis. If the backward pass waits "
    "for "
    "its host, the gaps between its kernels count here."
)


_SECONDS = (
    Column("hidden_live_s", "hidden, live (ms)", _HIDDEN, 1e3, 3),
    Column("hidden_trace_s", "hidden, trace (ms)", _HIDDEN, 1e3, 3),
    Column("wire_live_s", "wire time, live (ms)", _WIRE, 1e3, 3),
    Column("wire_trace_s", "wire time, trace (ms)", _WIRE, 1e3, 3),
    Column("uncovered_s", "uncovered (ms)", _UNCOVERED, 1e3, 3),
    Column("exposed_live_s", "exposed, live (ms)", _EXPOSED, 1e3, 3),
    Column("exposed_trace_s", "exposed, trace (ms)", _EXPOSED, 1e3, 3),
    Column("exposed_difference_s", "difference (ms)", "exposed time, live minus trace.", 1e3, 3),
)


def trace(analysis: Analysis) -> Table:
    """Tabulate hidden, exposed and wire time of each traced trial, measured live and from its traces.

    One row per trial: means over its steps and traced ranks. The measurements agree only if they agree on every rank.
    """
    checked = agreement(analysis.results)
    numbers = [column.name for column in _SECONDS]
    checked[numbers] = checked[numbers].astype(float)
    by_trial = checked.groupby("trial_id", sort=False)
    frame = by_trial[numbers].mean()
    frame["ranks"] = by_trial["rank"].agg(lambda ranks: join([str(int(rank)) for rank in sorted(ranks.dropna())]))
    frame["exposed_difference_share"] = frame["exposed_difference_s"] / frame["exposed_trace_s"].where(
        frame["exposed_trace_s"] > 0
    )
    frame[["holds", "problem"]] = by_trial.agg({"holds": "all", "problem": "first"})
    axes = axis_columns(analysis)
    if analysis.configurations["n"].max() > 1:
        axes.append(Column("repeat", "repeat", "number of the repeat within its configuration, from 0.", decimals=0))
    fields = analysis.results.trials.set_index("trial_id").reindex(columns=[column.name for column in axes])
    return Table(
        "Communication breakdown: live vs. trace",
        (
            *axes,
            Column("ranks", "traced ranks", "ranks with a trace."),
            *_SECONDS,
            Column("exposed_difference_share", "difference (%)", "difference / exposed time of the trace.", 1e2, 1),
            Column(
                "holds", "agree", "on every traced rank, the live exposed time is within 5 % or 0.1 ms of the trace."
            ),
            Column("problem", "problem", "why a trace could not be used."),
        ),
        frame.join(fields).reset_index(),
        "The same steps as measured by the communication hook and by the profiler; means over steps and traced "
        "ranks. In the trace, the last local gradient is the end of the last compute kernel launched before the "
        "step's last all-reduce.",
    )
