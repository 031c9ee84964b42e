"""What the data look like, as a table: what the checks found, in which trials, and what to do."""

import pandas as pd

from analysis.checks.finding import FALSE_ALARM, MATTERS
from analysis.checks.steps import CHECKS
from analysis.measure.trace import agreement
from analysis.study import Analysis
from analysis.tables.table import Column, Table, axis_columns
from analysis.text import MOST_NAMED, join, named, percent


def data_checks(analysis: Analysis) -> Table:
    """Every finding of `checks.CHECKS`, with the trials concerned."""
    found = analysis.findings
    silent = [_words(name) for name in CHECKS if name not in {finding.name for finding in found}]
    frame = pd.DataFrame(
        {
            "check": [_words(finding.name) for finding in found],
            "finding": [finding.sentence for finding in found],
            "what_to_do": [finding.what_to_do for finding in found],
            "trials": [len(finding.trial_ids) for finding in found],
            "such_as": [named(finding.trial_ids) for finding in found],
            "trial_ids": [finding.trial_ids for finding in found],
        },
        columns=["check", "finding", "what_to_do", "trials", "such_as", "trial_ids"],
    )
    nothing = f"Nothing found of: {join(silent, 'or')}. " if silent else ""
    return Table(
        "What the data look like",
        (
            Column("check", "check", "what was looked for."),
            Column("finding", "finding", "what was found, and how large it is."),
            Column("what_to_do", "what to do", "what avoids it in another run, or what to read with care."),
            Column("trials", "trials", "how many trials it was found in.", decimals=0),
            Column("such_as", "such as", f"the first {MOST_NAMED} of these; all of them are in the CSV file."),
        ),
        frame,
        f"{nothing}Each check finds something in at most {percent(FALSE_ALARM)} of studies without its fault, and is silent about effects "
        f"that matter little ({percent(MATTERS)} of a step). Few trials or steps may hide what it looks for.",
        empty="" if analysis.configurations.empty else "The checks found nothing.",
    )


def _words(name: str) -> str:
    return name.replace("_", " ")


_HIDDEN = "all-reduces of the gradients, the union of their intervals: the part before the last local gradient."


_WIRE = "transfer alone: the shortest time of any rank."


_EXPOSED = "the part after the last local gradient."


_UNCOVERED = (
    "all-reduces while no compute kernel ran, which Holistic Trace Analysis calls exposed; where the backward pass waits "
    "for its host, the gaps between its kernels count here."
)


_SECONDS = (
    Column("hidden_live_s", "hidden, live (ms)", _HIDDEN, 1e3, 3),
    Column("hidden_trace_s", "hidden, trace (ms)", _HIDDEN, 1e3, 3),
    Column("wire_live_s", "wire, live (ms)", _WIRE, 1e3, 3, optional=True),
    Column("wire_trace_s", "wire, trace (ms)", _WIRE, 1e3, 3, optional=True),
    Column("uncovered_s", "uncovered (ms)", _UNCOVERED, 1e3, 3),
    Column("exposed_live_s", "exposed, live (ms)", _EXPOSED, 1e3, 3),
    Column("exposed_trace_s", "exposed, trace (ms)", _EXPOSED, 1e3, 3),
    Column("exposed_difference_s", "difference (ms)", "exposed, live - trace.", 1e3, 3),
)


def trace(analysis: Analysis) -> Table:
    """Hidden, exposed and wire time of each traced trial, from the live account and from its traces.

    A row for each trial: means over its steps and over the ranks that have a trace; it holds where it does on all of them.
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
        axes.append(
            Column("repeat", "repeat", "number of the run among those of its configuration, from 0.", decimals=0)
        )
    fields = analysis.results.trials.set_index("trial_id").reindex(columns=[column.name for column in axes])
    return Table(
        "Live account against the trace",
        (
            *axes,
            Column("ranks", "ranks traced", "those that kept a trace, by number."),
            *_SECONDS,
            Column("exposed_difference_share", "difference (%)", "that / exposed, trace.", 1e2, 1),
            Column(
                "holds", "holds", "exposed time, live, of every traced rank is within 5 % or 0.1 ms of the trace's."
            ),
            Column("problem", "problem", "why a trace could not be used.", optional=True),
        ),
        frame.join(fields).reset_index(),
        "The same steps as the communication hook and the profiler saw them; means over steps and traced ranks. In the "
        "trace the last local gradient is the end of the last compute kernel that was launched before the step's last "
        "all-reduce.",
    )
