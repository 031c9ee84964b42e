"""The report of a study, rebuilt from its results folder alone.

index.html is one file without network: tables, figures as SVG, and the answer in words. Beside it lie report.md, the
tables as CSV and LaTeX and the figures as SVG and PNG. Each file is written beside its place and renamed.
"""

import base64
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
import pyarrow as pa
import pyarrow.fs as pafs
from markupsafe import Markup

from analysis.figures.style import GRID, INK, render
from analysis.load.environment import commit, difference
from analysis.load.errors import ResultsError, line
from analysis.load.results import Results, filesystem, load_reduced
from analysis.load.study_record import StudyRecord
from analysis.measure.configurations import derived_lengths
from analysis.predict.inputs import ReportInputs, report_inputs
from analysis.report.sections import PLOTS, SECTIONS, TABLES
from analysis.report.summary import Summary, left_out, summary
from analysis.study import Analysis, study_ranks
from analysis.tables.table import Table
from analysis.text import field_label, field_value, join, text, value_label
from analysis.verdict.answer import answer, limits
from analysis.verdict.communication import sentences
from analysis.verdict.next_steps import next_steps
from analysis.verdict.trust import trust

_STATUSES = {
    "done": "done",
    "failed": "failed",
    "timeout": "timed out",
    "out_of_memory": "out of memory",
    "pruned": "pruned",
    "infeasible": "infeasible",
}


@dataclass(frozen=True)
class Report:
    """A report that was written: the path of its index.html, and the study in a few lines."""

    path: str
    summary: Summary


@dataclass(frozen=True)
class _Figure:
    name: str
    caption: str
    svg: str
    png: bytes
    data: str | None

    @cached_property
    def data_uri(self) -> str | None:
        """What it draws as an address that holds the CSV itself, so that the page needs no file beside it."""
        return self.data and f"data:text/csv;charset=utf-8;base64,{base64.b64encode(self.data.encode()).decode()}"

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
) -> Report:
    """Writes the report of `results_dir` into `out_dir` (left out: its folder `report`).

    partial: the study was interrupted, and the report says so. Raises ResultsError where the results cannot be read.
    """
    results = load_reduced(results_dir)
    first, *others = report_inputs(results)
    target = os.fspath(out_dir) if out_dir is not None else f"{os.fspath(results_dir).rstrip('/')}/report"
    system, root = filesystem(target)
    parts = [_part(first), *(_part(other, number, first) for number, other in enumerate(others, 2))]
    figures = _figures(first, parts[0]["tables"])
    context = _context(results, first, others, partial) | {
        "figures": figures,
        "first": parts[0],
        "others": parts[1:],
        "sections": [
            (section.name, [figure.name for figure in section.figures]) for section in SECTIONS if not section.at_end
        ],
    }
    files: dict[str, bytes] = {}
    for part in parts:
        for name, table in part["tables"].items():
            files[f"tables/{name}{part['suffix']}.csv"] = table.to_csv().encode()
            files[f"tables/{name}{part['suffix']}.tex"] = table.to_latex().encode()
    for figure in figures:
        files[f"figures/{figure.name}.svg"] = figure.svg.encode()
        files[f"figures/{figure.name}.png"] = figure.png
    files["report.md"] = _render("report.md.jinja", context).encode()
    files["index.html"] = _render("index.html.jinja", context).encode()
    try:
        for folder in ("tables", "figures"):
            system.create_dir(f"{root}/{folder}", recursive=True)
        _remove_stale(system, root, files)
        for name, content in files.items():
            _write(system, f"{root}/{name}", content)
    except (OSError, pa.ArrowException) as error:
        raise ResultsError(
            f"{target}: the report cannot be written ({line(error)}); mend that, then: python -m study.scaling report DIR"
        ) from None
    return Report(f"{target.rstrip('/')}/index.html", summary(first, others))


def _figures(inputs: ReportInputs, tables: Mapping[str, Table]) -> list[_Figure]:
    drawn = []
    for section in SECTIONS:
        for figure in section.figures:
            drawing = figure.draw(inputs)
            if drawing is not None:
                data = figure.data_csv(inputs, tables.get(section.name))
                drawn.append(_Figure(figure.name, figure.caption, *render(drawing), data))
    return drawn


def _part(analysis: ReportInputs, number: int = 1, first: Analysis | None = None) -> dict[str, Any]:
    """What the report says of the trials of one environment; `number` keeps its ids and files apart from other parts'.

    Where the part is not the `first`, its title says what differs from that; trials without a result are all in the first.
    """
    prefix = f"environment-{number}-" if first else ""
    tables = {name: make(analysis) for name, make in TABLES.items() if first is None or name != "failures"}
    timed = len(analysis.configurations) > 0 or analysis.accuracy is None
    tables = {
        name: table
        for name, table in tables.items()
        if len(table.frame) or (table.empty and (timed or name == "failures"))
    }
    return {
        "prefix": prefix,
        "suffix": f"-{number}" if first else "",
        "title": f"Trials under another environment: {difference(analysis.environment, first.environment)}"
        if first
        else "",
        "tables": tables,
        "html": {name: Markup(table.to_html(prefix + name)) for name, table in tables.items() if len(table.frame)},
        "environment": environment_rows(analysis),
        "answer": answer(analysis),
        "limits": limits(analysis),
        "communication": sentences(analysis),
        "trust": trust(analysis),
        "next": next_steps(analysis),
    }


def _context(results: Results, analysis: Analysis, others: Sequence[Analysis], partial: bool) -> dict[str, Any]:
    """What both the page and the Markdown say besides tables and figures."""
    ranks = study_ranks(analysis)
    runs = analysis.accuracy.runs if analysis.accuracy and analysis.configurations.empty else analysis.configurations
    return {
        "name": analysis.record.name,
        "question": analysis.record.question,
        "command": analysis.record.command,
        "partial": partial,
        "left_out": left_out(analysis, others),
        "counts": status_counts(results),
        "fixed": [
            (field_label(name, ranks), field_value(name, value))
            for name, value in analysis.fixed.items()
            if value not in ("", None)
        ],
        "axes": [
            (
                field_label(name, ranks),
                ", ".join(field_value(name, v) for v in sorted(runs[name].dropna().unique())),
            )
            for name in analysis.axes
        ]
        + [
            (field_label(name, ranks), f"{text(lengths.min())} to {text(lengths.max())}, as the other fields have it")
            for name in derived_lengths(results.trials)
            for lengths in [results.trials[name]]
        ],
        "configuration_count": len(analysis.configurations),
        "ranks": value_label("world_size", int(runs["world_size"].max()), ranks) if len(runs) else "",
    }


def status_counts(results: Results) -> list[tuple[str, int]]:
    """Trials by status, in words; `missing` where study.json lists the trials planned (`configuration.planned_trials`)."""
    seen = results.trials["status"].value_counts()
    counts = [(label, int(seen.get(status, 0))) for status, label in _STATUSES.items()]
    counts += [(str(status), int(count)) for status, count in seen.items() if status not in _STATUSES]
    planned = StudyRecord.of(results.study).planned_trials
    if planned is not None:
        counts.append(("missing", len(set(planned) - set(results.trials["trial_id"]))))
    return counts


def environment_rows(analysis: Analysis) -> list[tuple[str, str]]:
    """What the trials ran under: their common fingerprint, variables that trials set for themselves, and commits."""
    own: dict[str, list[str]] = {}
    for environment in analysis.results.trials["environment"]:
        for name, value in (environment.get("variables") or {}).items():
            values = own.setdefault(name, [])
            if name not in analysis.environment and str(value) not in values:
                values.append(str(value))
    commits = [commit(environment) for environment in analysis.results.trials["environment"]]
    own["git commit"] = [name for name in dict.fromkeys(commits) if name]
    return [*analysis.environment.items(), *((name, join(values, "or")) for name, values in own.items() if values)]


_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("analysis.report"),
    autoescape=lambda name: name is not None and name.endswith(".html.jinja"),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)


def _without_markup(value: Any) -> Any:
    """Markdown lets HTML through: a name with markup in it is to stay text there too."""
    return value.replace("<", "&lt;") if isinstance(value, str) else value


_MARKDOWN = _TEMPLATES.overlay(finalize=_without_markup)


def _render(template: str, context: dict[str, Any]) -> str:
    return (_MARKDOWN if template.endswith(".md.jinja") else _TEMPLATES).get_template(template).render(context)


def _remove_stale(system: pafs.FileSystem, root: str, files: Mapping[str, bytes]) -> None:
    """Removes what an earlier report drew and this one does not; files of other names are left alone."""
    ours = re.compile(rf"figures/({'|'.join(PLOTS)})\.(svg|png)|tables/({'|'.join(TABLES)})(-\d+)?\.(csv|tex)")
    for folder in ("figures", "tables"):
        for info in system.get_file_info(pafs.FileSelector(f"{root}/{folder}")):
            name = f"{folder}/{info.base_name}"
            if name not in files and ours.fullmatch(name):
                system.delete_file(info.path)


def _write(system: pafs.FileSystem, path: str, content: bytes) -> None:
    """Writes a file beside its place and renames it, so that a reader sees the old one or the new one."""
    beside = f"{path}.tmp"
    with system.open_output_stream(beside) as stream:
        stream.write(content)
    system.move(beside, path)
