"""Tables and columns: formatting of cells, export to HTML, Markdown, CSV and LaTeX, and columns used by many tables."""

import re
import unicodedata
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from markupsafe import escape

from analysis.study import Analysis, study_ranks
from analysis.text import (
    MISSING,
    as_html,
    decimals_for,
    field_label,
    field_value,
    join,
    not_resolved,
    number,
    percent,
    with_interval,
    without_links,
)


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
"""LaTeX for special and non-ASCII characters, using commands that need no package."""


@dataclass(frozen=True)
class Column:
    """One column as readers see it.

    name: column of the frame; `scale` converts its unit to that of the header.
    interval: show the interval from the columns `name_low` and `name_high`. If the frame has a column `name_more` (see
    `statistics.intervals`), a value whose interval is too wide is not shown, with or without its interval.
    instead: name of a column with text that is shown in brackets instead of an unknown interval.
    share: name of a column with the share of the total, shown in brackets.
    paired_with: name of a column of the same unit, shown in the same cell as "1.2 / 3.4".
    up_to: the same for the upper end of a range, "1.2–3.4", or one number if both ends look equal.
    decimals: fixed; None derives them from the values.
    is_main: what the table is about; `Table.telling` keeps it even if it is the same in all rows.
    """

    name: str
    header: str
    meaning: str = ""
    scale: float = 1.0
    decimals: int | None = None
    interval: bool = False
    instead: str | None = None
    share: str | None = None
    paired_with: str | None = None
    up_to: str | None = None
    is_main: bool = False

    def has_values(self, frame: pd.DataFrame) -> bool:
        """Return False if every cell would be a dash. A table without rows keeps its columns."""
        values = frame[self.name]
        return frame.empty or not (values.isna() | values.eq("")).all() or set(self.cells(frame)) - {MISSING} != set()

    def cells(self, frame: pd.DataFrame) -> list[str]:
        """Return the column's cells, all rounded to the same decimals."""
        values = frame[self.name]
        if not pd.api.types.is_numeric_dtype(values) or pd.api.types.is_bool_dtype(values):
            return [field_value(self.name, value) for value in values]
        values = values * self.scale
        second = self.paired_with or self.up_to
        others = frame[second] * self.scale if second else None
        shown = values if others is None else pd.concat([values, others])
        decimals = decimals_for(shown) if self.decimals is None else self.decimals
        more = frame[f"{self.name}_more"] if f"{self.name}_more" in frame else pd.Series(0.0, index=frame.index)
        if self.interval:
            low, high = frame[f"{self.name}_low"] * self.scale, frame[f"{self.name}_high"] * self.scale
            instead = frame[self.instead] if self.instead else [None] * len(frame)
            rows = zip(values, low, high, instead, more, strict=True)
            return [with_interval(value, least, most, decimals, reason, n) for value, least, most, reason, n in rows]
        if self.share:
            shares = frame[self.share]
            return [
                number(value, decimals) if pd.isna(share) else f"{number(value, decimals)} ({percent(share)})"
                for value, share in zip(values, shares, strict=True)
            ]
        first = [not_resolved(n) if n > 0 else number(value, decimals) for value, n in zip(values, more, strict=True)]
        if others is None:
            return first
        pairs = zip(first, [number(other, decimals) for other in others], strict=True)
        if self.up_to:
            return [low if low == high else f"{low}–{high}" for low, high in pairs]
        return [MISSING if a == b == MISSING else f"{a} / {b}" for a, b in pairs]


ESTIMATE = "geometric mean over worker groups [95 % interval]"
"""How a value of several repeats is estimated, as part of the meaning of a column."""


RATIO_ESTIMATE = "[95 % interval; what all configurations of a worker group share cancels]"
"""The interval of a ratio within one study, as part of the meaning of a column."""


N_COLUMN = Column("n", "n", "repeats: separate runs of the same configuration; no interval for one repeat.", decimals=0)


def axis_columns(
    analysis: Analysis, last: tuple[str, ...] = ("world_size",), without: tuple[str, ...] = ()
) -> list[Column]:
    """Return a column for each varying field, those in `last` at the end and always included."""
    ranks = study_ranks(analysis)
    first = [name for name in analysis.axes if name not in (*last, *without)]
    return [
        Column(name, field_label(name, ranks), decimals=_exact(analysis.configurations, name))
        for name in (*first, *last)
    ]


def blocks(axes: list[Column]) -> tuple[str, ...]:
    """Return the columns that start a new block of rows: all axes except the number of ranks."""
    return tuple(column.name for column in axes if column.name != "world_size")


@dataclass(frozen=True)
class Table:
    """A table: `frame` holds plain values in the units of its column names; `columns` define how they are shown.

    blocks: columns whose change starts a new block of rows, separated by a line. empty: text shown if there are no
    rows; if it is empty too, reports omit the table. not_shown: boolean column that marks rows which tell a reader
    nothing; only the frame and its CSV have them.
    """

    title: str
    columns: tuple[Column, ...]
    frame: pd.DataFrame
    note: str = ""
    blocks: tuple[str, ...] = ()
    empty: str = ""
    not_shown: str | None = None

    def shown(self) -> "Table":
        """Return the table without rows that are not shown, and without columns that have no value in any row."""
        frame = self.frame if self.not_shown is None else self.frame[~self.frame[self.not_shown].astype(bool)]
        columns = tuple(c for c in self.columns if c.has_values(frame))
        return replace(self, columns=columns, frame=frame)

    def cells(self) -> pd.DataFrame:
        """Return all cells as strings, with headers as column names."""
        shown = self.shown()
        return pd.DataFrame({column.header: column.cells(shown.frame) for column in shown.columns}, dtype=object)

    def definitions(self) -> list[tuple[str, str]]:
        """Return header and meaning of each column that has one; columns with the same meaning share an entry."""
        headers: dict[str, list[str]] = {}
        for column in self.shown().columns:
            if column.meaning:
                headers.setdefault(column.meaning, []).append(column.header)
        return [(join(alike), meaning) for meaning, alike in headers.items()]

    def telling(self) -> "Table":
        """Return the table without columns that say nothing: empty, or the same in all of several rows.

        Columns with intervals are results, and only omitted if they are empty. Main columns always stay.
        """
        shown = self.shown()
        if shown.frame.empty:
            return shown
        columns = []
        for column in shown.columns:
            values = set(column.cells(shown.frame))
            is_constant = len(values) == 1 and len(shown.frame) > 1 and not column.interval
            if not column.is_main and (is_constant or values <= {MISSING, ""}):
                continue
            columns.append(column)
        return replace(shown, columns=tuple(columns))

    def to_html(self, key: str, *, is_prose: bool = False) -> str:
        """Return an HTML table with all text escaped; `key` is its id. A header's title is the column's meaning.

        is_prose: options and percentages in cells are not divided at the end of a line, see `text.as_html`.
        """
        as_shown = as_html if is_prose else escape
        shown = self.shown()
        columns, cells, starts = shown.columns, shown.cells(), shown._block_starts()
        numeric = [_is_number(shown.frame[column.name]) for column in columns]
        head = "".join(
            _element("th", column.header, class_="number" if right else "", title=column.meaning, scope="col")
            for column, right in zip(columns, numeric, strict=True)
        )
        rows = []
        for row, texts in enumerate(cells.itertuples(index=False, name=None)):
            block = ("block",) if row in starts else ()
            rows.append(
                "".join(
                    _element("td", as_shown(text), class_=" ".join((*_classes(text, right), *block)))
                    for text, right in zip(texts, numeric, strict=True)
                )
            )
        body = "\n".join(f"<tr>{row}</tr>" for row in rows)
        return f'<table id="T_{escape(key)}">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>'

    def to_markdown(self) -> str:
        """Return a pipe table with title and column meanings; cells are escaped."""
        head = f"### {self.title}\n\n{self.note}".rstrip() + "\n\n"
        if self.frame.empty:
            return f"{head}{self.empty}\n"
        shown = self.shown().columns
        align = ["right" if _is_number(self.frame[column.name]) else "left" for column in shown]
        cells = self.cells().map(markdown_escaped)
        body = cells.to_markdown(index=False, colalign=align, disable_numparse=True)
        notes = "".join(f"- *{header}*: {meaning}\n" for header, meaning in self.definitions())
        return f"{head}{body}\n\n{notes}"

    def to_csv(self) -> str:
        """Return unrounded values in the units of the column names; ends of intervals are columns, missing is empty."""
        names: list[str] = []
        for column in self.columns:
            names.append(column.name)
            names += [f"{column.name}_low", f"{column.name}_high"] if column.interval else []
            names += [name for name in (column.instead, column.share, column.paired_with, column.up_to) if name]
        frame = self.frame[list(dict.fromkeys(names))]
        if "trial_ids" in self.frame:
            frame = frame.assign(trial_ids=self.frame["trial_ids"].map(" ".join))
        if "interconnect" in frame:  # mark emulated interconnects in exported tables too
            frame = frame.assign(interconnect=[field_value("interconnect", value) for value in frame["interconnect"]])
        return as_csv(frame)

    def to_latex(self, name: str = "") -> str:
        """Return a booktabs table in ASCII that plain pdflatex accepts, with the label "tab:name" if it has a name."""
        cells = self.cells().map(_latex_escaped).rename(columns=_latex_escaped)
        align = "".join("r" if _is_number(self.frame[column.name]) else "l" for column in self.shown().columns)
        styler = cells.style.hide(axis="index")
        label = f"tab:{name}" if name else None
        return styler.to_latex(hrules=True, column_format=align, caption=_latex_escaped(self.title), label=label)

    def _block_starts(self) -> list[int]:
        if not self.blocks or self.frame.empty:
            return []
        block = self.frame.groupby(list(self.blocks), dropna=False, sort=False).ngroup().to_numpy()
        return [i for i in range(1, len(block)) if block[i] != block[i - 1]]


def _classes(cell: str, right: bool) -> tuple[str, ...]:
    """Return the classes of a cell: numbers stay on one line, unless words take the place of one."""
    return () if not right else ("number", "words") if cell.startswith("not resolved") else ("number",)


def _element(tag: str, text: str, class_: str = "", **attributes: str) -> str:
    """Return an HTML element with escaped text and attributes; empty attributes are left out."""
    listed = {"class": class_, **attributes}
    shown = "".join(f' {name}="{escape(value)}"' for name, value in listed.items() if value)
    return f"<{tag}{shown}>{escape(text)}</{tag}>"


def _is_number(values: pd.Series) -> bool:
    return pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)


def as_csv(frame: pd.DataFrame, float_format: str | None = None) -> str:
    """Return a frame as CSV that a spreadsheet does not take for formulas: such texts get a leading apostrophe."""
    texts = frame.select_dtypes(exclude="number").map(_not_a_formula)
    return frame.assign(**texts).rename(columns=_not_a_formula).to_csv(index=False, float_format=float_format)


def _not_a_formula(value: Any) -> Any:
    if not (isinstance(value, str) and value.startswith(("=", "+", "-", "@"))):
        return value
    return value if _NUMBER.fullmatch(value) else f"'{value}"


_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)


def markdown_escaped(cell: str) -> str:
    """Escape text so that it stays plain text within its cell."""
    for mark in "\\`*_|":
        cell = cell.replace(mark, f"\\{mark}")
    return without_links(cell.replace("<", "&lt;").replace(">", "&gt;").replace("\n", " "))


def _latex_escaped(text: str) -> str:
    """Escape text for LaTeX, in ASCII; characters without a LaTeX command become a question mark."""
    shown = re.sub("-(?=-)", "-{}", "".join(map(_latex, text)))  # LaTeX sets "--" as a dash
    return (
        f"{{}}{shown}" if shown.startswith(("[", "*")) else shown
    )  # both would be arguments of the \\ of the row before


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
