"""Write the report of a study from its results folder alone.

index.html is self-contained and needs no network: the answer, tables, and figures as SVG. The same folder contains
report.md, the tables as CSV and LaTeX, and the figures as SVG and PNG. Each file is replaced atomically.
"""

import base64
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
import pyarrow as pa
import pyarrow.fs as pafs
from markupsafe import Markup

from analysis.figures.style import GRID, INK, render
from analysis.predict.inputs import ReportInputs, report_inputs
from analysis.read.environment import commit, difference
from analysis.read.errors import ResultsError, line
from analysis.read.results import Results, filesystem, load_reduced
from analysis.read.study_record import StudyRecord
from analysis.report.sections import PLOTS, SECTIONS, TABLES
from analysis.report.summary import Summary, left_out, summary
from analysis.study import Analysis
from analysis.tables.table import Table
from analysis.text import join
from analysis.verdict.answer import answer, limits
from analysis.verdict.communication import sentences
from analysis.verdict.facts import facts
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
    """Path of the index.html written, and a summary of the study."""

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
        """Return the drawn data as a data URI, so that the page needs no other file."""
        return self.data and f"data:text/csv;charset=utf-8;base64,{base64.b64encode(self.data.encode()).decode()}"

    @property
    def inline(self) -> Markup:
        """Return the figure as an element of the page that follows the page's colours and width."""
        body = re.sub(r"^.*?(?=<svg)", "", self.svg, flags=re.DOTALL)
        body = body.replace(INK, "currentColor").replace(GRID, "var(--line)")
        # Ids are unique within one figure only; prefix them so that links do not reach another figure.
        body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{self.name}-", body)
        return Markup(body)

    @property
    def width_rem(self) -> int:
        """Return the width at which text is as large as in the page's tables: 16 pixels for 10.8 points."""
        width = re.search(r'<svg [^>]*?width="([\d.]+)pt"', self.svg)
        assert width is not None, "matplotlib gives the width in points"
        return round(float(width[1]) / 10.8)


def write_report(
    results_dir: str | os.PathLike[str], out_dir: str | os.PathLike[str] | None = None, *, partial: bool = False
) -> Report:
    """Write the report of `results_dir` into `out_dir` (default: its folder `report`).

    partial: mark the report of an interrupted study. Raises ResultsError if the results cannot be read or the report
    cannot be written.
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
            f"{target}: cannot write the report ({line(error)}); fix this, then run: python -m study.scaling report DIR"
        ) from None
    return Report(f"{target.rstrip('/')}/index.html", summary(first, others))


def _figures(inputs: ReportInputs, tables: Mapping[str, Table]) -> list[_Figure]:
    figures = []
    for section in SECTIONS:
        for figure in section.figures:
            drawing = figure.draw(inputs)
            if drawing is not None:
                data = figure.data_csv(inputs, tables.get(section.name))
                figures.append(_Figure(figure.name, figure.caption, *render(drawing), data))
    return figures


def _part(analysis: ReportInputs, number: int = 1, first: Analysis | None = None) -> dict[str, Any]:
    """Return the part of the report on one environment; `number` makes its ids and files unique.

    first: the first part's analysis, None for the first part itself. Other parts name their differences from it in the
    title. Only the first part lists trials without a result.
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
    """Return what the templates of page and Markdown show besides the environments' parts."""
    return {
        "name": analysis.record.name,
        "question": analysis.record.question,
        "command": analysis.record.command,
        "partial": partial,
        "left_out": left_out(analysis, others),
        "counts": status_counts(results),
        "banner": analysis.record.small_form,
        "facts": facts(analysis),
    }


def status_counts(results: Results) -> list[tuple[str, int]]:
    """Count trials by status; `missing` only if study.json lists `configuration.planned_trials`."""
    by_status = results.trials["status"].value_counts()
    counts = [(label, int(by_status.get(status, 0))) for status, label in _STATUSES.items()]
    counts += [(str(status), int(count)) for status, count in by_status.items() if status not in _STATUSES]
    planned = StudyRecord.of(results.study).planned_trials
    if planned is not None:
        counts.append(("missing", len(set(planned) - set(results.trials["trial_id"]))))
    return counts


def environment_rows(analysis: Analysis) -> list[tuple[str, str]]:
    """Return the common fingerprint of the trials, variables that individual trials set, and commits."""
    varying: dict[str, list[str]] = {}
    for environment in analysis.results.trials["environment"]:
        for name, value in (environment.get("variables") or {}).items():
            values = varying.setdefault(name, [])
            if name not in analysis.environment and str(value) not in values:
                values.append(str(value))
    commits = [commit(environment) for environment in analysis.results.trials["environment"]]
    varying["git commit"] = [name for name in dict.fromkeys(commits) if name]
    return [*analysis.environment.items(), *((name, join(values, "or")) for name, values in varying.items() if values)]


_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("analysis.report"),
    autoescape=lambda name: name is not None and name.endswith(".html.jinja"),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)


def _escape_markup(value: Any) -> Any:
    """Escape `<`, since Markdown passes HTML through."""
    return value.replace("<", "&lt;") if isinstance(value, str) else value


_MARKDOWN = _TEMPLATES.overlay(finalize=_escape_markup)


def _render(template: str, context: dict[str, Any]) -> str:
    return (_MARKDOWN if template.endswith(".md.jinja") else _TEMPLATES).get_template(template).render(context)


def _remove_stale(system: pafs.FileSystem, root: str, files: Mapping[str, bytes]) -> None:
    """Remove files of an earlier report that this one lacks; never touch files with other names."""
    pattern = re.compile(rf"figures/({'|'.join(PLOTS)})\.(svg|png)|tables/({'|'.join(TABLES)})(-\d+)?\.(csv|tex)")
    for folder in ("figures", "tables"):
        for info in system.get_file_info(pafs.FileSelector(f"{root}/{folder}")):
            name = f"{folder}/{info.base_name}"
            if name not in files and pattern.fullmatch(name):
                system.delete_file(info.path)


def _write(system: pafs.FileSystem, path: str, content: bytes) -> None:
    """Replace a file, so that readers see either the old or the new one.

    An object store shows an upload when it is complete. A local file is written to a new name, which nobody can have
    created as a link or a named pipe, and renamed.
    """
    if not isinstance(system, pafs.LocalFileSystem):
        with system.open_output_stream(path) as stream:
            stream.write(content)
        return
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "wb") as file:
        try:
            file.write(content)
            file.close()
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
