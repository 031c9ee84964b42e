"""Tables: what was measured and compared, as values that render to HTML, Markdown, CSV and LaTeX.

To add a table: a function from `Analysis` to `Table`, and a line in `TABLES`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from analysis.formatting import MISSING, decimals_for, field_label, number, percent, rank_noun, text, with_interval
from analysis.measures import PHASES
from analysis.scaling import STRONG, WEAK, Analysis

GIB = 2**30
GB = 1e9

PHASE_LABELS = {
    "load_wait_s": "load wait",
    "host_to_device_s": "host to device",
    "forward_s": "forward",
    "backward_s": "backward",
    "optimizer_s": "optimizer",
}


@dataclass(frozen=True)
class Column:
    """One column as people read it. `name` is that of the frame, whose unit `scale` turns into the header's.

    interval: the frame has `name_low` and `name_high`. share: name of the frame's column with the part of the whole.
    decimals: fixed, else from the values. optional: left out where the frame has no value at all.
    """

    name: str
    header: str
    meaning: str = ""
    scale: float = 1.0
    decimals: int | None = None
    interval: bool = False
    share: str | None = None
    optional: bool = False

    def cells(self, frame: pd.DataFrame) -> list[str]:
        """The column's cells, rounded alike."""
        values = frame[self.name]
        if not pd.api.types.is_numeric_dtype(values) or pd.api.types.is_bool_dtype(values):
            return [text(value) for value in values]
        values = values * self.scale
        decimals = decimals_for(values) if self.decimals is None else self.decimals
        if self.interval:
            low, high = frame[f"{self.name}_low"] * self.scale, frame[f"{self.name}_high"] * self.scale
            return [with_interval(*row, decimals) for row in zip(values, low, high, strict=True)]
        if self.share:
            shares = frame[self.share]
            return [
                MISSING if pd.isna(value) else f"{number(value, decimals)} ({percent(share)})"
                for value, share in zip(values, shares, strict=True)
            ]
        return [number(value, decimals) for value in values]


@dataclass(frozen=True)
class Table:
    """A table: `frame` holds plain values in the units of its column names, `columns` say how they are shown.

    blocks: columns whose change begins a new block of rows, drawn as a line. empty: what to say where there is no row.
    """

    title: str
    columns: tuple[Column, ...]
    frame: pd.DataFrame
    note: str = ""
    blocks: tuple[str, ...] = ()
    empty: str = "Nothing to show."

    def shown(self) -> "Table":
        """Without the optional columns that hold nothing."""
        return replace(
            self, columns=tuple(c for c in self.columns if not (c.optional and self.frame[c.name].isna().all()))
        )

    def cells(self) -> pd.DataFrame:
        """All cells as strings under the headers that people read."""
        return pd.DataFrame({column.header: column.cells(self.frame) for column in self.shown().columns}, dtype=object)

    def definitions(self) -> list[tuple[str, str]]:
        """Header and meaning of each column that needs one."""
        return [(column.header, column.meaning) for column in self.shown().columns if column.meaning]

    def to_html(self, key: str) -> str:
        """An HTML table; `key` keeps its ids apart from those of other tables on the page. Every cell is escaped."""
        from great_tables import GT, loc, style

        cells = self.cells()
        numeric = [f"{key}-{i}" for i, c in enumerate(self.shown().columns) if _is_number(self.frame[c.name])]
        names: dict[str, Any] = {f"{key}-{i}": header for i, header in enumerate(cells.columns)}
        cells.columns = list(names)
        table = GT(cells).cols_label(cases=names).cols_align("left").cols_align("right", columns=numeric)
        if starts := self._block_starts():
            table = table.tab_style(style.css("border-top: 1px solid var(--line)"), loc.body(rows=starts))
        html = re.search(r"<table.*</table>", table.as_raw_html(), flags=re.DOTALL)
        assert html is not None, "great_tables made no table"
        return html.group()

    def to_markdown(self) -> str:
        """A pipe table with its title and the meaning of its columns. Cells cannot break the table."""
        head = f"### {self.title}\n\n{self.note}".rstrip() + "\n\n"
        if self.frame.empty:
            return f"{head}{self.empty}\n"
        shown = self.shown().columns
        align = ["right" if _is_number(self.frame[column.name]) else "left" for column in shown]
        cells = self.cells().map(_markdown_escaped)
        body = cells.to_markdown(index=False, colalign=align, disable_numparse=True)
        notes = "".join(f"- *{header}*: {meaning}\n" for header, meaning in self.definitions())
        return f"{head}{body}\n\n{notes}"

    def to_csv(self) -> str:
        """Plain values, unrounded, in the units of the column names; intervals as columns of their own; missing is empty."""
        names: list[str] = []
        for column in self.columns:
            names.append(column.name)
            names += [f"{column.name}_low", f"{column.name}_high"] if column.interval else []
            names += [column.share] if column.share else []
        frame = self.frame[names]
        if "trial_ids" in self.frame:
            frame = frame.assign(trial_ids=self.frame["trial_ids"].map(" ".join))
        return frame.to_csv(index=False)

    def to_latex(self) -> str:
        """A booktabs table; special characters are escaped."""
        cells = self.cells()
        cells.columns = [header.replace("%", r"\%").replace("_", r"\_").replace("&", r"\&") for header in cells.columns]
        align = "".join("r" if _is_number(self.frame[column.name]) else "l" for column in self.shown().columns)
        styler = cells.style.hide(axis="index").format(escape="latex")
        return styler.to_latex(hrules=True, column_format=align, caption=self.title)

    def _block_starts(self) -> list[int]:
        if not self.blocks or self.frame.empty:
            return []
        block = self.frame.groupby(list(self.blocks), dropna=False, sort=False).ngroup().to_numpy()
        return [i for i in range(1, len(block)) if block[i] != block[i - 1]]


def _is_number(values: pd.Series) -> bool:
    return pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)


def _markdown_escaped(cell: str) -> str:
    """Text that stays in its cell and stays text."""
    for mark in "\\`*_<>|[]":
        cell = cell.replace(mark, f"\\{mark}") if mark not in "<>[]" else cell
    return cell.replace("<", "&lt;").replace(">", "&gt;").replace("\n", " ")


def axis_columns(
    analysis: Analysis, last: tuple[str, ...] = ("world_size",), without: tuple[str, ...] = ()
) -> list[Column]:
    """A column for each field that varies, those in `last` at the end; the number of ranks always."""
    ranks = study_ranks(analysis)
    names = [*(["device_name"] if "device" in analysis.unlike else []), *analysis.axes]
    first = [name for name in names if name not in (*last, *without)]
    return [
        Column(name, field_label(name, ranks), decimals=_exact(analysis.configurations, name))
        for name in (*first, *last)
    ]


def _exact(frame: pd.DataFrame, name: str) -> int | None:
    return 0 if name in frame and pd.api.types.is_integer_dtype(frame[name]) else None


def study_ranks(analysis: Analysis) -> tuple[str, str]:
    """What this study's ranks are called, one and several."""
    return rank_noun(analysis.trials["device"].dropna() if "device" in analysis.trials else ())


N_COLUMN = Column("n", "n", "repeats: separate runs of the same configuration; one repeat has no interval.", decimals=0)


def throughput(analysis: Analysis) -> Table:
    """Throughput and step time of every configuration."""
    found = analysis.configurations
    labels = analysis.scaling.groupby("configuration")["scaling"].agg(" + ".join)
    frame = found.assign(series=labels.reindex(found.index).astype(object))
    axes = axis_columns(analysis)
    return Table(
        "Throughput and step time",
        (
            *axes,
            Column("global_batch", "global batch", "samples that all ranks take in one step.", decimals=0),
            Column(
                "throughput_samples_per_s",
                "throughput (samples/s)",
                "samples of all ranks / wall time of the slowest, in a window without instruments; median of the repeats "
                "[95 % interval].",
                interval=True,
            ),
            Column(
                "step_s", "step time (ms)", "wall time of the slowest rank / steps, same window.", 1e3, interval=True
            ),
            Column(
                "peak_memory_bytes",
                "peak memory (GiB)",
                "largest of all ranks; 1 GiB = 2³⁰ bytes.",
                1 / GIB,
                2,
                optional=True,
            ),
            N_COLUMN,
            Column(
                "series",
                "scaling",
                "weak: the batch per rank was held while ranks were added; strong: the global batch was; neither: nothing "
                "comparable was measured with another number of ranks.",
            ),
        ),
        frame,
        blocks=_block(axes),
        empty="No trial is done yet.",
    )


def weak_scaling(analysis: Analysis) -> Table:
    """Speed-up and efficiency with the batch per rank held."""
    one = study_ranks(analysis)[0]
    return _scaling_table(
        analysis,
        WEAK,
        f"Weak scaling: batch per {one} held",
        axis_columns(analysis),
        f"No two configurations differ only in the number of {study_ranks(analysis)[1]}.",
    )


def strong_scaling(analysis: Analysis) -> Table:
    """Speed-up and efficiency with the global batch held."""
    columns = axis_columns(analysis, last=("world_size", "batch_per_gpu"))
    return _scaling_table(
        analysis,
        STRONG,
        "Strong scaling: global batch held",
        [Column("global_batch", "global batch", decimals=0), *columns],
        f"No two configurations share a global batch on different numbers of {study_ranks(analysis)[1]}.",
    )


def _scaling_table(analysis: Analysis, label: str, title: str, axes: list[Column], empty: str) -> Table:
    rows = analysis.scaling[analysis.scaling["scaling"] == label]
    shown = [column.name for column in axes if column.name != "world_size"]
    found = analysis.configurations
    frame = rows.join(
        found[[*shown, "throughput_samples_per_s", "trial_ids"]] if len(found) else found, on="configuration"
    )
    frame["efficiency_percent"] = 100 * frame["efficiency"]
    for end in ("low", "high"):
        frame[f"efficiency_percent_{end}"] = 100 * frame[f"efficiency_{end}"]
    references = sorted(set(frame["reference_world_size"].dropna().astype(int)))
    against = f"N₀ = {', '.join(map(str, references))}" if references else ""
    return Table(
        title,
        (
            *axes,
            Column("throughput_samples_per_s", "throughput (samples/s)", "median of the repeats."),
            Column(
                "speed_up",
                "speed-up",
                f"throughput / throughput of the reference, the smallest number of ranks in its series ({against}) "
                "[95 % interval, Welch's t on logarithms].",
                decimals=2,
                interval=True,
            ),
            Column(
                "ideal", "ideal", "number of ranks / that of the reference.", decimals=_ideal_decimals(frame["ideal"])
            ),
            Column(
                "efficiency_percent",
                "efficiency (%)",
                "speed-up / ideal; the reference is 100 by definition.",
                1,
                1,
                True,
            ),
            N_COLUMN,
        ),
        frame,
        blocks=("series",),
        empty=empty,
    )


def _ideal_decimals(ideal: pd.Series) -> int:
    return 0 if (ideal.dropna() % 1 == 0).all() else 2


def _block(axes: list[Column]) -> tuple[str, ...]:
    return tuple(column.name for column in axes if column.name != "world_size")


def phases(analysis: Analysis) -> Table:
    """Where the time of a step goes."""
    found = analysis.configurations
    total = found[list(PHASES)].astype(float).sum(axis=1, min_count=1) if len(found) else pd.Series(dtype=float)
    frame = found.assign(**{f"{name}_share": found[name].astype(float) / total for name in PHASES})
    meanings = {
        "load_wait_s": "the step waits for its batch.",
        "host_to_device_s": "copy of the batch to the device.",
        "forward_s": "forward pass and loss.",
        "backward_s": "backward pass, with DDP's all-reduce that overlaps it and the wait for slower ranks.",
        "optimizer_s": "update of the weights.",
    }
    parts = [
        Column(name, f"{label} (ms)", meanings[name], 1e3, share=f"{name}_share", optional=True)
        for name, label in PHASE_LABELS.items()
    ]
    decimals = decimals_for(frame["phases_step_s"].astype(float) * 1e3, digits=4)
    axes = axis_columns(analysis)
    return Table(
        "Phases of a step",
        (
            *axes,
            *(replace(column, decimals=decimals) for column in parts),
            Column("phases_step_s", "step (ms)", "the step in this window, which carries instruments.", 1e3, decimals),
            Column(
                "instruments_ratio",
                "instruments",
                "wall time a step with instruments / without; 1.01 means that they cost 1 %.",
                decimals=3,
            ),
            Column(
                "host_to_device_bytes_per_s",
                "copy (GB/s)",
                "bytes copied / time; 1 GB = 10⁹ bytes.",
                1 / GB,
                1,
                optional=True,
            ),
            Column(
                "step_launch_s",
                "issue (ms)",
                "host time to issue one step onto an idle device.",
                1e3,
                decimals,
                optional=True,
            ),
            Column(
                "host_bound",
                "host-bound",
                "yes: issuing takes at least 0.9 of the step on an idle device, and most steps in free running found the "
                "device already idle.",
                optional=True,
            ),
        ),
        frame,
        "Median over the steps of a rank, mean over ranks, median over repeats; in brackets the share of the step.",
        blocks=_block(axes),
        empty="No trial is done yet.",
    )


def failures(analysis: Analysis) -> Table:
    """Every trial without a result, and why."""
    frame = analysis.trials[analysis.trials["status"] != "done"].copy()
    order = {name: i for i, name in enumerate(("failed", "timeout", "out_of_memory", "pruned", "infeasible"))}
    frame = frame.sort_values("status", key=lambda s: s.map(order).fillna(len(order)), kind="stable")
    frame["status"] = frame["status"].str.replace("_", " ")
    frame["log"] = [
        f"trials/{row.trial_id}/{row.log}" if isinstance(row.log, str) else None for row in frame.itertuples()
    ]
    return Table(
        "Trials without a result",
        (
            Column("trial_id", "trial"),
            Column("status", "status"),
            Column("reason", "reason"),
            Column("log", "log", "path in the results folder.", optional=True),
        ),
        frame,
        blocks=("status",),
        empty="Every trial has a result.",
    )


TABLES: Mapping[str, Callable[[Analysis], Table]] = {
    "throughput": throughput,
    "weak_scaling": weak_scaling,
    "strong_scaling": strong_scaling,
    "phases": phases,
    "failures": failures,
}
