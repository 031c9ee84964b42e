"""The report of a study, rebuilt from its results folder alone.

index.html is one file without network: tables, figures as SVG, and the answer in words. Beside it lie report.md, the
tables as CSV and LaTeX and the figures as SVG and PNG. Each file is written beside its place and renamed.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import pandas as pd
import pyarrow.fs as pafs
from markupsafe import Markup

from analysis.formatting import field_label, join, text, value_label
from analysis.load import Results, filesystem, load
from analysis.plots import GRID, INK, PLOTS, caption, render
from analysis.scaling import Analysis, analyse
from analysis.table import Table
from analysis.tables import TABLES, study_ranks
from analysis.verdict import answer, limits, trust

_STATUSES = {
    "done": "done",
    "failed": "failed",
    "timeout": "timed out",
    "out_of_memory": "out of memory",
    "pruned": "pruned",
    "infeasible": "infeasible",
}


@dataclass(frozen=True)
class _Figure:
    name: str
    caption: str
    svg: str
    png: bytes

    @property
    def inline(self) -> Markup:
        """The picture as an element of the page: its ink follows the page's, its size the page's width."""
        body = re.sub(r"^.*?(?=<svg)", "", self.svg, flags=re.DOTALL)
        body = body.replace(INK, "currentColor").replace(GRID, "var(--line)")
        # Names are unique within a picture only; on a page with several, links must not meet another's target.
        body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{self.name}-", body)
        return Markup(body)

    @property
    def width_rem(self) -> int:
        """Width at which its text is as large as the page's tables: 16 pixels to 10.8 points."""
        width = re.search(r'<svg [^>]*?width="([\d.]+)pt"', self.svg)
        assert width is not None, "matplotlib gives the width in points"
        return round(float(width[1]) / 10.8)


def write_report(
    results_dir: str | os.PathLike[str], out_dir: str | os.PathLike[str] | None = None, *, partial: bool = False
) -> str:
    """Writes the report of `results_dir` into `out_dir` (left out: its folder `report`); returns the path of index.html.

    partial: the study was interrupted, and the report says so. Raises ResultsError where the results cannot be read.
    """
    results = load(results_dir)
    analysis = analyse(results)
    target = os.fspath(out_dir) if out_dir is not None else f"{os.fspath(results_dir).rstrip('/')}/report"
    system, root = filesystem(target)
    tables = {name: make(analysis) for name, make in TABLES.items()}
    figures = _figures(analysis)
    context = _context(results, analysis, partial)
    files: dict[str, bytes] = {}
    for name, table in tables.items():
        files[f"tables/{name}.csv"] = table.to_csv().encode()
        files[f"tables/{name}.tex"] = table.to_latex().encode()
    for figure in figures:
        files[f"figures/{figure.name}.svg"] = figure.svg.encode()
        files[f"figures/{figure.name}.png"] = figure.png
    files["report.md"] = _render("report.md.jinja", context | {"tables": tables, "figures": figures}).encode()
    html = {name: Markup(table.to_html(name)) for name, table in tables.items() if len(table.frame)}
    page = _render("index.html.jinja", context | {"tables": tables, "html": html, "figures": figures})
    files["index.html"] = page.encode()
    for folder in ("tables", "figures"):
        system.create_dir(f"{root}/{folder}", recursive=True)
    _remove_stale(system, root, files)
    for name, content in files.items():
        _write(system, f"{root}/{name}", content)
    return f"{target.rstrip('/')}/index.html"


def summary_table(results_dir: str | os.PathLike[str]) -> tuple[list[str], list[tuple[str, ...]]]:
    """The study in a few columns for a terminal: heads, and a row of strings for each configuration.

    Raises ResultsError where the results cannot be read.
    """
    analysis = analyse(load(results_dir))
    table = TABLES["throughput"](analysis)
    names = {*analysis.axes, "world_size", "throughput_samples_per_s", "step_s", "n"}
    cells = Table(table.title, tuple(column for column in table.columns if column.name in names), table.frame).cells()
    weak = analysis.scaling[analysis.scaling["scaling"] == "weak"].set_index("configuration")["efficiency"]
    shown = (100 * weak.reindex(analysis.configurations.index)).map(
        lambda value: text(value if pd.isna(value) else f"{value:.1f}")
    )
    cells.insert(len(cells.columns) - 1, "weak efficiency (%)", shown.to_numpy())
    return list(cells.columns), [tuple(row) for row in cells.itertuples(index=False)]


def _figures(analysis: Analysis) -> list[_Figure]:
    found = []
    for name, draw in PLOTS.items():
        figure = draw(analysis)
        if figure is not None:
            found.append(_Figure(name, caption(name), *render(figure)))
    return found


def _context(results: Results, analysis: Analysis, partial: bool) -> dict[str, Any]:
    """What both the page and the Markdown say besides tables and figures."""
    ranks = study_ranks(analysis)
    return {
        "name": results.study.get("name") or "study",
        "question": results.study.get("question") or "",
        "command": results.study.get("command") or "",
        "partial": partial,
        "answer": answer(analysis),
        "limits": limits(analysis),
        "trust": trust(analysis),
        "counts": status_counts(results),
        "fixed": [
            (field_label(name, ranks), text(value)) for name, value in analysis.fixed.items() if value not in ("", None)
        ],
        "axes": [
            (field_label(name, ranks), ", ".join(text(v) for v in sorted(analysis.configurations[name].unique())))
            for name in analysis.axes
        ],
        "environment": environment_rows(results.trials),
        "configuration_count": len(analysis.configurations),
        "ranks": value_label("world_size", int(analysis.configurations["world_size"].max()), ranks)
        if len(analysis.configurations)
        else "",
    }


def status_counts(results: Results) -> list[tuple[str, int]]:
    """Trials by status, in words; `missing` where study.json lists the trials planned (`configuration.planned_trials`)."""
    seen = results.trials["status"].value_counts()
    counts = [(label, int(seen.get(status, 0))) for status, label in _STATUSES.items()]
    counts += [(str(status), int(count)) for status, count in seen.items() if status not in _STATUSES]
    configuration = results.study.get("configuration")
    planned = configuration.get("planned_trials") if isinstance(configuration, dict) else None
    if isinstance(planned, list):
        counts.append(("missing", len(set(map(str, planned)) - set(results.trials["trial_id"]))))
    return counts


def environment_rows(trials: pd.DataFrame) -> list[tuple[str, str]]:
    """What the trials ran on: each property with every value that was seen."""
    seen: dict[str, list[str]] = {}

    def note(key: str, value: Any) -> None:
        values = seen.setdefault(key, [])
        if value not in (None, "") and str(value) not in values:
            values.append(str(value))

    for environment in trials["environment"]:
        used = {rank.get("node_id") for rank in environment.get("ranks", [])}
        for node in environment.get("nodes", []):
            if node.get("node_id") not in used:
                continue
            note("host", node.get("host"))
            note(
                "CPU",
                f"{node.get('cpu_model') or 'unknown model'}, {node.get('cpu_count') or 'unknown number of'} cores",
            )
            if node.get("memory_bytes"):
                note("host memory", f"{node['memory_bytes'] / 2**30:.0f} GiB")
            gpus = node.get("gpus") or []
            for gpu in gpus:
                note("GPU", gpu.get("name"))
                note("GPU driver", gpu.get("driver"))
                if gpu.get("memory_bytes"):
                    note("GPU memory", f"{gpu['memory_bytes'] / 2**30:.0f} GiB")
        for rank in environment.get("ranks", []):
            note("threads per rank", rank.get("threads"))
        for name, version in (environment.get("versions") or {}).items():
            note(name, version)
        for name, value in (environment.get("variables") or {}).items():
            note(name, value)
        git = environment.get("git") or {}
        if git.get("commit"):
            note("git commit", f"{git['commit']}{' with local changes' if git.get('dirty') else ''}")
    return [(key, join(values, "and")) for key, values in seen.items() if values]


_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("analysis"),
    autoescape=lambda name: name is not None and name.endswith(".html.jinja"),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)


def _render(template: str, context: dict[str, Any]) -> str:
    return _TEMPLATES.get_template(template).render(context)


def _remove_stale(system: pafs.FileSystem, root: str, files: Sequence[str] | dict[str, bytes]) -> None:
    """Removes what an earlier report drew and this one does not; files of other names are left alone."""
    ours = [f"figures/{name}.{kind}" for name in PLOTS for kind in ("svg", "png")]
    ours += [f"tables/{name}.{kind}" for name in TABLES for kind in ("csv", "tex")]
    for name in ours:
        path = f"{root}/{name}"
        if name not in files and system.get_file_info(path).type == pafs.FileType.File:
            system.delete_file(path)


def _write(system: pafs.FileSystem, path: str, content: bytes) -> None:
    """Writes a file beside its place and renames it, so that a reader sees the old one or the new one."""
    beside = f"{path}.tmp"
    with system.open_output_stream(beside) as stream:
        stream.write(content)
    system.move(beside, path)
