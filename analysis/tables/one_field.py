"""Tables that compare the values of one field at a time: storage, precision, strategy, execution, interconnect, settings."""

from dataclasses import dataclass

import pandas as pd

from analysis.compare.one_field import against_reference, loss_summary, trained_accuracy
from analysis.study import Analysis, study_ranks
from analysis.tables.table import N_COLUMN, Column, Table, axis_columns
from analysis.text import GIB, configuration_label, field_label, field_value

_STEP = Column("step_s", "step time (ms)", "plain step, without instruments; median of the repeats.", 1e3)
_THROUGHPUT = Column("throughput_samples_per_s", "throughput (samples/s)", "median of the repeats.")
_MEMORY = Column(
    "peak_memory_bytes", "peak memory (GiB)", "largest of all ranks; 1 GiB = 2³⁰ bytes.", 1 / GIB, 2, optional=True
)
_LOAD = Column("load_wait_s", "load wait (ms)", "for how long a step waits for its batch.", 1e3, optional=True)
_EXPOSED = Column(
    "exposed_s", "exposed (ms)", "all-reduces that the backward pass does not hide.", 1e3, 2, optional=True
)
_HOST = Column(
    "step_launch_s", "host (ms)", "what the host needs to issue a step onto an idle GPU.", 1e3, 2, optional=True
)
_BUSY = Column(
    "busy_s", "kernels (ms)", "what the GPU needs for a step's kernels, back to back.", 1e3, 2, optional=True
)
_AGAINST = Column("against", "against", "the value that a row is held against: that of the first row of its block.")


@dataclass(frozen=True)
class _Comparison:
    """A field, and what is shown beside the ratio."""

    title: str
    field: str
    beside: tuple[Column, ...]
    note: str = ""


_STORAGE = _Comparison(
    "Storage formats", "storage", (_STEP, _LOAD),
    "How samples lie on disk. Where loaders keep ahead of the step, load wait is near zero and no format can be faster.",
)  # fmt: skip
_PRECISION = _Comparison(
    "Precision: speed and loss",
    "precision",
    (
        _STEP,
        _MEMORY,
        Column("final_loss", "final loss", "mean of the last tenth of the plain window, over all ranks; median of the repeats.", decimals=3, optional=True),
        Column("trained_percent", "trained to (%)", "held-out accuracy of this study's trainings in this number format [95 % interval over seeds].", 1, 2, True, optional=True),
        Column("skipped_steps", "skipped steps", "steps after which the loss scale was lowered: their gradients were not finite, and the weights stayed. All repeats together.", decimals=0, optional=True),
        Column("unfinite_losses", "losses not finite", "of steps in the warm-up, plain and phases windows of all ranks and repeats.", decimals=0, optional=True),
    ),
    "A format that is fast and does not learn is not faster: read speed beside the loss.",
)  # fmt: skip
_PARALLEL = _Comparison(
    "Parallel strategies", "parallel", (_STEP, _EXPOSED, _MEMORY),
)  # fmt: skip
_EXECUTION = _Comparison(
    "Execution modes", "execution", (_STEP, _HOST, _BUSY, _MEMORY),
    "Compilation makes fewer and larger kernels; a CUDA graph spares the host from issuing them one by one.",
)  # fmt: skip
_INTERCONNECT = _Comparison(
    "Interconnects", "interconnect", (_STEP, _EXPOSED),
    "Slow interconnects are emulated on this machine, by forbidding NCCL its faster ways; no other hardware was measured.",
)  # fmt: skip


def storage(analysis: Analysis) -> Table:
    """Each storage format against JPEG files."""
    return _table(analysis, _STORAGE)


def precision(analysis: Analysis) -> Table:
    """Each number format against fp32: speed, and whether it learns."""
    return _table(
        analysis,
        _PRECISION,
        loss_summary(analysis.configurations, analysis.results.losses).join(
            trained_accuracy(analysis.configurations, analysis.accuracy)
        ),
    )


def parallel(analysis: Analysis) -> Table:
    """Each parallel strategy against DDP."""
    return _table(analysis, _PARALLEL)


def execution(analysis: Analysis) -> Table:
    """Each way to issue a step against eager mode."""
    return _table(analysis, _EXECUTION)


def interconnects(analysis: Analysis) -> Table:
    """Each interconnect against what NCCL chooses itself."""
    return _table(analysis, _INTERCONNECT)


def settings(analysis: Analysis) -> Table:
    """Every other field that varies, one at a time."""
    parts = []
    found = analysis.configurations
    compared = analysis.fields.compared_in("settings")
    for field in compared:
        rows = against_reference(found, field, analysis.fields[field].order)
        shown = found[field].reindex(rows["configuration"]) if field in found else pd.Series(dtype=object)
        label = field_label(field, study_ranks(analysis))
        rows = rows.assign(setting=label, value=[field_value(field, value) for value in shown])
        parts.append(rows.assign(against=[field_value(field, value) for value in rows["against"]]))
    rows = pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)
    axes = [column for column in axis_columns(analysis) if column.name not in compared]
    others = [column for column in axis_columns(analysis) if column.name in compared]
    frame = _joined(analysis, rows, [*axes, *others])
    return Table(
        "Settings, one at a time",
        (
            Column("setting", "setting", "the field of a trial that is compared."),
            Column("value", "value", "what it was set to."),
            *axes,
            *(others if len(others) > 1 else ()),
            _THROUGHPUT,
            _AGAINST,
            _ratio(),
            N_COLUMN,
        ),
        frame,
        "All other fields are equal within a comparison.",
        blocks=("setting", "reference"),
    )


def _table(analysis: Analysis, comparison: _Comparison, more: pd.DataFrame | None = None) -> Table:
    rows = against_reference(analysis.configurations, comparison.field, analysis.fields[comparison.field].order)
    axes = [column for column in axis_columns(analysis) if column.name != comparison.field]
    frame = _joined(analysis, rows, axes)
    exposed = analysis.communication.exposed["exposed_s"].reindex(frame["configuration"]).astype(float)
    frame["exposed_s"] = exposed.to_numpy()
    if more is not None:
        frame = frame.join(more, on="configuration")
    if comparison.field not in frame:  # a study without a trial has no fields
        frame[comparison.field] = None
    frame["against"] = [field_value(comparison.field, value) for value in frame["against"]]
    label = field_label(comparison.field, study_ranks(analysis))
    same = [
        name
        for name in (column.name for column in axes)
        if name != "world_size" and frame[name].nunique(dropna=False) == 1
    ]
    told = configuration_label(frame.iloc[0], same, study_ranks(analysis)) if same else ""
    note = (
        f"All fields but {label} are equal within a block{f', in every row {told}' if told else ''}. {comparison.note}"
    )
    return Table(
        comparison.title,
        (
            *(column for column in axes if column.name not in same),
            Column(comparison.field, label),
            _THROUGHPUT,
            _AGAINST,
            _ratio(),
            *comparison.beside,
            N_COLUMN,
        ),
        frame,
        note.rstrip(),
        blocks=("reference",),
    )


def _ratio() -> Column:
    return Column(
        "ratio",
        "times as fast",
        "throughput / that of the value in “against” [95 % interval, Welch's t on logarithms]; an interval that holds 1 is no "
        "difference beyond noise.",
        decimals=3,
        interval=True,
    )  # fmt: skip


def _joined(analysis: Analysis, rows: pd.DataFrame, axes: list[Column]) -> pd.DataFrame:
    found = analysis.configurations
    new = [name for name in found.columns if name not in rows.columns]
    return rows.astype({"configuration": int, "ratio": float, "ratio_low": float, "ratio_high": float}).join(
        found[new], on="configuration"
    )
