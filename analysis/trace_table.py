"""The table that holds the live account against the profiler's traces."""

from analysis.columns import axis_columns
from analysis.formatting import join
from analysis.study import Analysis
from analysis.table import Column, Table
from analysis.trace import check

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
    checked = check(analysis.results)
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
