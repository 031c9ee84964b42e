"""The three tables of the course lab in its own layout: one row per number of GPUs, columns per batch."""

from collections.abc import Callable, Hashable
from typing import Any

import pandas as pd

from analysis.answers.registry import answers
from analysis.answers.reply import MS
from analysis.compare.communication_cost import bandwidth_rows
from analysis.compare.scaling import WEAK
from analysis.predict.inputs import ReportInputs
from analysis.study import study_ranks
from analysis.tables.table import Column, Table
from analysis.text import GB, MISSING, not_resolved, number, percent, value_label

Cells = Callable[[int], str]


def tables(inputs: ReportInputs) -> dict[str, Table]:
    """Return Tables 1, 2 and 3 by file name."""
    return {
        "lab4_table_1": speed_up(inputs),
        "lab4_table_2": compute_and_communication(inputs),
        "lab4_table_3": bandwidth_utilisation(inputs),
    }


def speed_up(inputs: ReportInputs) -> Table:
    """Return Table 1: time and speed-up of each number of ranks, per batch."""
    rows = inputs.scaling[inputs.scaling["scaling"] == WEAK].drop_duplicates("configuration")
    rows = rows.set_index("configuration")
    epochs = inputs.epoch_s
    unit, what = ("s", "epoch") if epochs else ("ms", "step")

    def time(index: int) -> str:
        seconds = epochs.get(index) if epochs else MS * float(inputs.configurations["step_s"][index])
        return number(seconds, 3)

    def gain(index: int) -> str:
        if index not in rows.index:
            return MISSING
        row: dict[Hashable, Any] = rows.loc[index].to_dict()
        return not_resolved(row["speed_up_more"]) if row["speed_up_more"] > 0 else number(row["speed_up"], 2)

    return _table(
        inputs,
        "Table 1: Speedup Measurement for different Batch Size",
        {
            f"Time ({unit})": (time, f"of one {what}, after the warm-up."),
            "Speedup": (gain, "over one rank, same batch."),
        },
        smallest=1,
    )


def compute_and_communication(inputs: ReportInputs) -> Table:
    """Return Table 2: compute and exposed communication of an epoch, or of a step if it is not known, per batch."""
    exposed, epochs = inputs.communication.exposed, inputs.epoch_s
    unit, what = ("s", "epoch") if epochs else ("ms", "step")

    def times(index: int) -> tuple[float, float] | None:
        """Return the time of an epoch or step, and the exposed communication in it."""
        if index not in exposed.index or (epochs and index not in epochs):
            return None
        step_s = float(inputs.configurations["step_s"][index])
        total = epochs[index] if epochs else MS * step_s
        return total, total * float(exposed["exposed_s"][index]) / step_s

    def compute(index: int) -> str:
        return MISSING if (found := times(index)) is None else number(found[0] - found[1], 3)

    def communication(index: int) -> str:
        return MISSING if (found := times(index)) is None else number(found[1], 3)

    return _table(
        inputs,
        "Table 2: Compute and Communication time for different Batch Size",
        {
            f"Compute ({unit})": (compute, f"of one {what}, without exposed communication."),
            f"Comm ({unit})": (communication, f"exposed communication in one {what}."),
        },
        smallest=2,
    )


def bandwidth_utilisation(inputs: ReportInputs) -> Table:
    """Return Table 3: bus bandwidth of the all-reduces and its share of the measured limit, per batch."""
    rows = bandwidth_rows(inputs.configurations, inputs.communication)

    def cell(index: int) -> str:
        row: dict[Hashable, Any] = rows.loc[index].to_dict() if index in rows.index else {}
        if pd.isna(row.get("wire_bus_bytes_per_s")):
            return MISSING
        share = f" ({percent(row['utilisation'])})" if pd.notna(row["utilisation"]) else ""
        return f"{number(row['wire_bus_bytes_per_s'] / GB, 1)}{share}"

    return _table(
        inputs,
        "Table 3: Communication Bandwidth Utilization",
        {
            "Bandwidth Utilization (GB/s)": (
                cell, "S / t · 2(N-1)/N of the all-reduces of a step; in brackets, share of the measured limit, which "
                "all-reduces above 100 % reach.",
            )
        },
        smallest=2,
    )  # fmt: skip


def _table(inputs: ReportInputs, title: str, cells: dict[str, tuple[Cells, str]], smallest: int) -> Table:
    """Return a table in the lab's layout. cells: per column of a batch, its text by configuration, and its meaning."""
    configurations = inputs.configurations
    several = configurations[configurations["world_size"] >= smallest]
    ranks = study_ranks(inputs)
    strategies = list(dict.fromkeys(several["parallel"]))
    batches = sorted(set(several["batch_per_gpu"].astype(int)))
    rows, columns = [], [Column("gpus", ranks[1])]
    for batch in batches:
        for header, (_, meaning) in cells.items():
            columns.append(Column(f"{header} {batch}", f"Batch-size {batch} per {ranks[0]}: {header}", meaning))
    for strategy in strategies:
        of_strategy = several[several["parallel"] == strategy]
        for size, group in of_strategy.groupby("world_size"):
            name = value_label("world_size", int(size), ranks)
            row = {"gpus": name if len(strategies) == 1 else f"{name}, {strategy}"}
            index = {int(batch): int(i) for i, batch in group["batch_per_gpu"].items()}
            for batch in batches:
                for header, (cell, _) in cells.items():
                    row[f"{header} {batch}"] = cell(index[batch]) if batch in index else MISSING
            rows.append(row)
    return Table(title, tuple(columns), pd.DataFrame(rows, columns=[column.name for column in columns]))


def document(inputs: ReportInputs) -> dict[str, str]:
    """Return files by name: lab4.md with answers and tables, and each table as CSV and LaTeX."""
    found = {name: table for name, table in tables(inputs).items() if len(table.frame)}
    replies = [f"**{reply.question}** {reply.text}" for reply in answers(inputs)]
    texts = [f"# {inputs.record.name}", *replies, *(table.to_markdown() for table in found.values())]
    files: dict[str, str] = {}
    for name, table in found.items():
        files[f"tables/{name}.csv"] = table.to_csv()
        files[f"tables/{name}.tex"] = table.to_latex(name)
    return {"lab4.md": "\n\n".join(text.rstrip() for text in texts) + "\n"} | files
