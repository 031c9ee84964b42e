"""Tables that compare the values of one field, with all other fields equal."""

from dataclasses import dataclass

import pandas as pd

from analysis.compare.one_field import against_reference, loss_summary, trained_accuracy
from analysis.read.study_record import MeasuredGain
from analysis.study import Analysis, study_ranks
from analysis.tables.table import N_COLUMN, RATIO_ESTIMATE, Column, Table, axis_columns
from analysis.text import GIB, configuration_label, field_label, field_value, held_bounds, join

_STEP = Column(
    "step_s", "step time (ms)", "plain step, without instrumentation; geometric mean over worker groups.", 1e3
)
_THROUGHPUT = Column("throughput_samples_per_s", "throughput (samples/s)", "geometric mean over worker groups.")
_MEMORY = Column("peak_memory_bytes", "peak memory (GiB)", "largest of all ranks; 1 GiB = 2³⁰ bytes.", 1 / GIB, 2)
_LOAD = Column("load_wait_s", "load wait (ms)", "wait of a step for its batch, mean over steps and ranks.", 1e3, 2)
_EXPOSED = Column(
    "exposed_s",
    "exposed (ms)",
    "exposed communication: all-reduces that the backward pass does not hide.",
    1e3,
    2,
)
_HOST = Column("step_launch_s", "host (ms)", "host time to launch a step on an idle GPU.", 1e3, 2)
_BUSY = Column("busy_s", "kernels (ms)", "GPU time of a step's kernels, back to back.", 1e3, 2)
_REFERENCE = Column(
    "against", "reference", "the value that a row is compared with: that of the first row of its block."
)


@dataclass(frozen=True)
class _Comparison:
    """A compared field, and the columns shown after the ratio."""

    title: str
    field: str
    columns: tuple[Column, ...]
    note: str = ""


_STORAGE = _Comparison(
    "Storage formats",
    "storage",
    (_STEP, _LOAD),
    "Formats of samples on disk. If loaders keep ahead of the step, load wait is near zero and no format can be "
    "faster.",
)
_PRECISION = _Comparison(
    "Precision: speed and loss",
    "precision",
    (
        _STEP,
        _MEMORY,
        Column(
            "final_loss",
            "final loss",
            "mean of the last tenth of the plain window, over all ranks; median of the repeats.",
            decimals=3,
        ),
        Column(
            "trained_percent",
            "accuracy (%)",
            "held-out accuracy of this study's training in this number format [95 % interval over seeds].",
            1,
            2,
            True,
        ),
        Column(
            "skipped_steps",
            "skipped steps",
            "steps with non-finite gradients, after which the loss scale was lowered and weights remained unchanged; "
            "total of all repeats.",
            decimals=0,
        ),
        Column(
            "non_finite_losses",
            "non-finite losses",
            "steps in the warm-up, plain and phases windows of all ranks and repeats.",
            decimals=0,
        ),
    ),
    "A fast format that does not learn is of no use: compare loss as well as speed.",
)
_PARALLEL = _Comparison(
    "Parallel strategies",
    "parallel",
    (_STEP, _EXPOSED, _MEMORY),
)
_EXECUTION = _Comparison(
    "Execution modes",
    "execution",
    (_STEP, _HOST, _BUSY, _MEMORY),
    "Compilation produces fewer and larger kernels; a CUDA graph launches them all at once.",
)
_INTERCONNECT = _Comparison(
    "Interconnects",
    "interconnect",
    (_STEP, _EXPOSED),
    "Slow interconnects are emulated by disabling faster ones in NCCL; no other hardware was measured.",
)


def storage(analysis: Analysis) -> Table:
    """Compare each storage format with JPEG files."""
    return _table(analysis, _STORAGE)


def precision(analysis: Analysis) -> Table:
    """Compare each number format with fp32 in speed, loss and accuracy."""
    return _table(
        analysis,
        _PRECISION,
        loss_summary(analysis.configurations, analysis.results.losses).join(
            trained_accuracy(analysis.configurations, analysis.accuracy)
        ),
    )


def parallel(analysis: Analysis) -> Table:
    """Compare each parallel strategy with DDP."""
    return _table(analysis, _PARALLEL)


def execution(analysis: Analysis) -> Table:
    """Compare each execution mode with eager mode."""
    return _table(analysis, _EXECUTION)


def interconnects(analysis: Analysis) -> Table:
    """Compare each interconnect with the one that NCCL chooses."""
    return _table(analysis, _INTERCONNECT)


def settings(analysis: Analysis) -> Table:
    """Compare the values of every other varying field, one field at a time."""
    parts = []
    configurations = analysis.configurations
    compared = analysis.fields.compared_in("settings")
    for field in compared or ("",):  # no field gives no rows, but their columns
        rows = against_reference(configurations, field, analysis.fields[field].order)
        shown = (
            configurations[field].reindex(rows["configuration"]) if field in configurations else pd.Series(dtype=object)
        )
        label = field_label(field, study_ranks(analysis))
        rows = rows.assign(setting=label, value=[field_value(field, value) for value in shown])
        parts.append(rows.assign(against=[field_value(field, value) for value in rows["against"]]))
    rows = pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)
    axes = [column for column in axis_columns(analysis) if column.name not in compared]
    others = [column for column in axis_columns(analysis) if column.name in compared]
    frame = _joined(analysis, rows, [*axes, *others])
    return Table(
        "Settings, compared one at a time",
        (
            Column("setting", "setting", "the compared field of the trials."),
            Column("value", "value", "its value."),
            *axes,
            *(others if len(others) > 1 else ()),
            _THROUGHPUT,
            _REFERENCE,
            _ratio(analysis),
            N_COLUMN,
        ),
        frame,
        "All other fields are equal within a comparison.",
        blocks=("setting", "reference"),
    )


def levers(analysis: Analysis) -> Table:
    """Tabulate the changes that `improve` tried: upper bound, measured gain, and whether they are kept and why."""
    found = analysis.record.search
    rows = [
        {
            "lever": row.lever,
            "onto": join(list(row.onto)) or "the baseline",
            "effect": row.effect,
            "bound": row.bound,
            **_gain("gain", row.gain),
            **_gain("on_one", row.gain_on_one),
            **_gain("on_all", row.gain_on_all if found is not None and found.goal != "throughput" else None),
            "kept": "yes" if row.is_kept else "no",
            "why": row.why,
            "note": row.note,
        }
        for row in (() if found is None else found.levers)
    ]
    names = ["lever", "onto", "effect", "bound", *(f"{name}{end}" for name in ("gain", "on_one", "on_all")
             for end in ("", "_low", "_high")), "kept", "why", "note"]  # fmt: skip
    numbers = {name: float for name in names if name.startswith(("bound", "gain", "on_"))}
    checked = [] if found is None else found.checked_bounds
    return Table(
        "Changes tried by improve",
        (
            Column("lever", "lever", "the change."),
            Column("onto", "added to", "the configuration that it was compared with, in the same worker groups."),
            Column("effect", "effect", "whether it changes arithmetic, memory, or only the order of operations."),
            Column("bound", "at most (x)", "gain without the parts of the step that it concerns.", 1, 2),
            Column("gain", "measured (x)", f"gain by the goal {RATIO_ESTIMATE}", 1, 3, True),
            Column("on_one", "on one rank (x)", "gain in throughput on one rank.", 1, 3, True),
            Column("on_all", "on all ranks (x)", "gain in throughput on all ranks.", 1, 3, True),
            Column("kept", "kept", "whether the result contains it."),
            Column("why", "why", "reason to keep it or not."),
            Column("note", "to do", "what you have to do or check if you use it."),
        ),
        pd.DataFrame(rows, columns=names).astype(numbers),
        f"{held_bounds(checked)}. A bound fails if the entire measured interval is above it." if checked else "",
    )


def _gain(name: str, gain: MeasuredGain | None) -> dict[str, float | None]:
    ends = (None, None, None) if gain is None else (gain.value, gain.low, gain.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))


def _table(analysis: Analysis, comparison: _Comparison, more: pd.DataFrame | None = None) -> Table:
    rows = against_reference(analysis.configurations, comparison.field, analysis.fields[comparison.field].order)
    axes = [column for column in axis_columns(analysis) if column.name != comparison.field]
    frame = _joined(analysis, rows, axes)
    exposed = analysis.communication.exposed["exposed_s"].reindex(frame["configuration"]).astype(float)
    frame["exposed_s"] = exposed.to_numpy()
    if more is not None:
        frame = frame.join(more, on="configuration")
    if comparison.field not in frame:  # a study without trials has no fields
        frame[comparison.field] = None
    frame["against"] = [field_value(comparison.field, value) for value in frame["against"]]
    label = field_label(comparison.field, study_ranks(analysis))
    same = [
        name
        for name in (column.name for column in axes)
        if name != "world_size" and frame[name].nunique(dropna=False) == 1
    ]
    constant = configuration_label(frame.iloc[0], same, study_ranks(analysis)) if same else ""
    everywhere = f", in all rows {constant}" if constant else ""
    note = f"All fields but {label} are equal within a block{everywhere}. {comparison.note}"
    return Table(
        comparison.title,
        (
            *(column for column in axes if column.name not in same),
            Column(comparison.field, label),
            _THROUGHPUT,
            _REFERENCE,
            _ratio(analysis),
            *comparison.columns,
            N_COLUMN,
        ),
        frame,
        note.rstrip(),
        blocks=("reference",),
    )


def _ratio(analysis: Analysis) -> Column:
    in_search = (
        " Repeats of all worker groups count here; the changes tried by improve compare those in which both ran."
        if analysis.record.search is not None
        else ""
    )
    return Column(
        "ratio",
        "relative throughput",
        f"throughput / that of the reference {RATIO_ESTIMATE}; not significantly different if the interval contains 1."
        + in_search,
        decimals=3,
        interval=True,
    )


def _joined(analysis: Analysis, rows: pd.DataFrame, axes: list[Column]) -> pd.DataFrame:
    configurations = analysis.configurations
    new = [name for name in configurations.columns if name not in rows.columns]
    return rows.astype(
        {"configuration": int, "ratio": float, "ratio_low": float, "ratio_high": float, "ratio_more": float}
    ).join(configurations[new], on="configuration")
