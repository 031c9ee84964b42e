"""What tables share: units, names of phases and ranks, and columns for the fields that vary and the number of repeats."""

import re
import unicodedata
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from analysis.study import Analysis, study_ranks
from analysis.text import MISSING, decimals_for, field_label, field_value, join, number, percent, with_interval


def _exact(frame: pd.DataFrame, name: str) -> int | None:
    return 0 if name in frame and pd.api.types.is_integer_dtype(frame[name]) else None


_MATHS = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta", "η": "eta", "θ": "theta",
    "ι": "iota", "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "ξ": "xi", "π": "pi", "ρ": "rho", "σ": "sigma",
    "τ": "tau", "υ": "upsilon", "φ": "phi", "χ": "chi", "ψ": "psi", "ω": "omega", "Γ": "Gamma", "Δ": "Delta",
    "Θ": "Theta", "Λ": "Lambda", "Ξ": "Xi", "Π": "Pi", "Σ": "Sigma", "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega",
    "×": "times", "·": "cdot", "±": "pm", "≥": "geq", "≤": "leq", "≠": "neq", "≈": "approx", "√": "surd",
    "→": "rightarrow", "←": "leftarrow", "∞": "infty",
}  # fmt: skip


_LATEX = {
    **{mark: f"\\{mark}" for mark in "{}$&#_%"},
    **{mark: f"\\ensuremath{{\\{name}}}" for mark, name in _MATHS.items()},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "−": r"\ensuremath{-}",
    "°": r"\textsuperscript{\ensuremath{\circ}}",
    "\u00a0": r"\,",
    "–": r"\textendash{}",
    "—": r"\textemdash{}",
    "‘": "`",
    "’": "'",
    "“": "``",
    "”": "''",
    "…": r"\dots{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}
"""Characters that LaTeX reads as commands, and others than ASCII, in commands that need no package."""


@dataclass(frozen=True)
class Column:
    """One column as people read it. `name` is that of the frame, whose unit `scale` turns into the header's.

    interval: the frame has `name_low` and `name_high`. too_wide: name of a column that says where these are too far apart
    to be shown. share: name of the frame's column with the part of the whole.
    beside: name of a column of the same unit that is shown in the same cell, as "1.2 / 3.4"; up_to: the same for a range,
    "1.2–3.4", which is one number where both ends read alike.
    decimals: fixed, else from the values. optional: left out where the frame has no value at all.
    """

    name: str
    header: str
    meaning: str = ""
    scale: float = 1.0
    decimals: int | None = None
    interval: bool = False
    too_wide: str | None = None
    share: str | None = None
    beside: str | None = None
    up_to: str | None = None
    optional: bool = False

    def cells(self, frame: pd.DataFrame) -> list[str]:
        """The column's cells, rounded alike."""
        values = frame[self.name]
        if not pd.api.types.is_numeric_dtype(values) or pd.api.types.is_bool_dtype(values):
            return [field_value(self.name, value) for value in values]
        values = values * self.scale
        second = self.beside or self.up_to
        others = frame[second] * self.scale if second else None
        shown = values if others is None else pd.concat([values, others])
        decimals = decimals_for(shown) if self.decimals is None else self.decimals
        if self.interval:
            low, high = frame[f"{self.name}_low"] * self.scale, frame[f"{self.name}_high"] * self.scale
            wide = frame[self.too_wide].eq(True) if self.too_wide else [False] * len(frame)
            rows = zip(values, low, high, wide, strict=True)
            return [with_interval(value, least, most, decimals, flag) for value, least, most, flag in rows]
        if self.share:
            shares = frame[self.share]
            return [
                number(value, decimals) if pd.isna(share) else f"{number(value, decimals)} ({percent(share)})"
                for value, share in zip(values, shares, strict=True)
            ]
        first = [number(value, decimals) for value in values]
        if others is None:
            return first
        pairs = zip(first, [number(other, decimals) for other in others], strict=True)
        if self.up_to:
            return [low if low == high else f"{low}–{high}" for low, high in pairs]
        return [MISSING if a == b == MISSING else f"{a} / {b}" for a, b in pairs]


N_COLUMN = Column("n", "n", "repeats: separate runs of the same configuration; one repeat has no interval.", decimals=0)


def axis_columns(
    analysis: Analysis, last: tuple[str, ...] = ("world_size",), without: tuple[str, ...] = ()
) -> list[Column]:
    """A column for each field that varies, those in `last` at the end; the number of ranks always."""
    ranks = study_ranks(analysis)
    first = [name for name in analysis.axes if name not in (*last, *without)]
    return [
        Column(name, field_label(name, ranks), decimals=_exact(analysis.configurations, name))
        for name in (*first, *last)
    ]


def blocks(axes: list[Column]) -> tuple[str, ...]:
    """A new block of rows wherever anything but the number of ranks changes."""
    return tuple(column.name for column in axes if column.name != "world_size")


@dataclass(frozen=True)
class Table:
    """A table: `frame` holds plain values in the units of its column names, `columns` say how they are shown.

    blocks: columns whose change begins a new block of rows, drawn as a line. empty: what to say where there is no row;
    with nothing to say a report leaves the table out.
    """

    title: str
    columns: tuple[Column, ...]
    frame: pd.DataFrame
    note: str = ""
    blocks: tuple[str, ...] = ()
    empty: str = ""

    def shown(self) -> "Table":
        """Without the optional columns that hold nothing."""
        return replace(
            self, columns=tuple(c for c in self.columns if not (c.optional and self.frame[c.name].isna().all()))
        )

    def cells(self) -> pd.DataFrame:
        """All cells as strings under the headers that people read."""
        return pd.DataFrame({column.header: column.cells(self.frame) for column in self.shown().columns}, dtype=object)

    def definitions(self) -> list[tuple[str, str]]:
        """Header and meaning of each column that needs one; columns that mean the same share a line."""
        headers: dict[str, list[str]] = {}
        for column in self.shown().columns:
            if column.meaning:
                headers.setdefault(column.meaning, []).append(column.header)
        return [(join(alike), meaning) for meaning, alike in headers.items()]

    def to_html(self, key: str) -> str:
        """An HTML table; `key` keeps its ids apart from those of other tables on the page. Every cell is escaped."""
        cells = self.cells()
        numeric = [_is_number(self.frame[column.name]) for column in self.shown().columns]
        starts = self._block_starts()
        classes = [
            " ".join(name for name, there in (("number", right), ("block", row in starts)) if there)
            for row in range(len(cells))
            for right in numeric
        ]
        of_cell = pd.DataFrame(np.array(classes, dtype=object).reshape(cells.shape), columns=cells.columns)
        head: list[Any] = [
            {"selector": f"th.col{i}", "props": "text-align: right"} for i, right in enumerate(numeric) if right
        ]
        styler = cells.style.hide(axis="index").format(escape="html").format_index(escape="html", axis="columns")
        styler = styler.set_td_classes(of_cell).set_table_styles(head)
        return styler.to_html(table_uuid=key, cell_ids=False)

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
            names += [name for name in (column.too_wide, column.share, column.beside, column.up_to) if name]
        frame = self.frame[list(dict.fromkeys(names))]
        if "trial_ids" in self.frame:
            frame = frame.assign(trial_ids=self.frame["trial_ids"].map(" ".join))
        if "interconnect" in frame:  # labelled in every table, also where it goes on into another
            frame = frame.assign(interconnect=[field_value("interconnect", value) for value in frame["interconnect"]])
        return frame.to_csv(index=False)

    def to_latex(self) -> str:
        """A booktabs table in ASCII, which plain pdflatex takes."""
        cells = self.cells().map(_latex_escaped).rename(columns=_latex_escaped)
        align = "".join("r" if _is_number(self.frame[column.name]) else "l" for column in self.shown().columns)
        styler = cells.style.hide(axis="index")
        return styler.to_latex(hrules=True, column_format=align, caption=_latex_escaped(self.title))

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


def _latex_escaped(text: str) -> str:
    """Text that LaTeX sets as it reads, in ASCII; what LaTeX has no command for is a question mark."""
    shown = re.sub("-(?=-)", "-{}", "".join(map(_latex, text)))  # else the "--" of an option becomes a dash
    return f"{{}}{shown}" if shown.startswith(("[", "*")) else shown  # after a row's \\ either is an argument


def _latex(mark: str) -> str:
    if mark in _LATEX:
        return _LATEX[mark]
    if mark.isascii():
        return mark if mark.isprintable() else " "
    parts = unicodedata.normalize("NFKD", mark)
    if parts == mark:
        return "" if unicodedata.combining(mark) else "?"
    plain = "".join(map(_latex, parts))
    script = {"<super>": "textsuperscript", "<sub>": "textsubscript"}.get(
        unicodedata.decomposition(mark).partition(" ")[0]
    )
    return f"\\{script}{{{plain}}}" if script else plain
