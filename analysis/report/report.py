"""Write the report of a study from its results folder alone.

index.html is self-contained: the card first, then one figure and one table per question, then everything else
collapsed. The same folder contains report.md in the same order, methods.md, the card as JSON and SVG, the tables as CSV
and LaTeX, and the figures as SVG and PNG. Each file is replaced atomically.
"""

import os
import re
import secrets
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
import pyarrow as pa
import pyarrow.fs as pafs
from markupsafe import Markup

from analysis.answers.lab_tables import document as lab_document
from analysis.answers.registry import Answer
from analysis.figures.style import BRIEF
from analysis.predict.inputs import ReportInputs, report_inputs
from analysis.read.environment import commit, difference, used_nodes
from analysis.read.errors import ReportNotWritten, line
from analysis.read.links import below
from analysis.read.results import Results, filesystem, load_reduced
from analysis.read.study_record import StudyRecord
from analysis.report.card import as_html as card_as_html
from analysis.report.card import as_json_text, as_markdown
from analysis.report.card_svg import as_svg
from analysis.report.methods import methods
from analysis.report.page import embedded, glossary, security_policy, static, with_terms
from analysis.report.picture import MOST_NARROW_CHARACTERS, Picture, draw, first_drawn
from analysis.report.questions import OVERVIEW, Question, questions
from analysis.report.sections import PLOTS, RETIRED_PLOTS, SECTIONS, TABLES, WITHOUT_LATEX
from analysis.report.sentences import actions
from analysis.report.summary import Summary, left_out, summary
from analysis.study import Analysis, study_ranks
from analysis.tables.table import Table
from analysis.text import as_html, as_prose, join
from analysis.verdict import communication
from analysis.verdict.answer import answer, limits
from analysis.verdict.card import Card, card_of
from analysis.verdict.facts import dates, facts, facts_line
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


_ON_LATEX = r"""Each table as CSV, with all columns in base units, and as LaTeX, with the columns of the report.

A LaTeX table needs this in the preamble:

    \usepackage{booktabs}

Include it and refer to it by its file name:

    \input{tables/weak_scaling}
    \ref{tab:weak_scaling}
"""

DOCUMENTS: Mapping[str, Callable[[ReportInputs], dict[str, str]]] = {"lab4": lab_document}
"""Further documents that a study may ask for, by name: files of the report with their text."""


@dataclass(frozen=True)
class Report:
    """Path of the index.html written, the study's card, and one row per configuration."""

    path: str
    card: Card
    summary: Summary


@dataclass(frozen=True)
class _Answer:
    """The answer to one question: sentences, and the table and picture that support them, if any."""

    key: str
    title: str
    sentences: list[str]
    table: Table | None
    picture: Picture | None
    replies: list[Answer]
    is_collapsed: bool = False

    @property
    def html(self) -> Markup | None:
        if self.table is None or self.table.frame.empty:
            return None
        return Markup(self.table.to_html(f"answer-{self.key}", is_prose=True))


def write_report(
    results_dir: str | os.PathLike[str], out_dir: str | os.PathLike[str] | None = None, *, partial: bool = False
) -> Report:
    """Write the report of `results_dir` into `out_dir` (default: its folder `report`).

    partial: mark the report of an interrupted study. Raises ResultsError if the results cannot be read or the report
    cannot be written.
    """
    results = load_reduced(results_dir)
    first, *others = report_inputs(results)
    target = os.fspath(out_dir) if out_dir is not None else below(os.fspath(results_dir), "report")
    system, root = filesystem(target)
    parts = [_part(first), *(_part(other, number, first) for number, other in enumerate(others, 2))]
    card = card_of(first, others)
    overview = first_drawn(first, OVERVIEW, parts[0]["tables"]) if has_results(first) else None
    answers = _answers(first, parts[0]["tables"], overview)
    visible = [picture for picture in (overview, *(shown.picture for shown in answers)) if picture]
    figures = _figures(first, parts[0]["tables"], without={picture.name for picture in visible})
    context = _context(results, first, others, partial) | {
        "card": card_as_html(card),
        "card_markdown": Markup(as_markdown(card)),
        "overview": overview,
        "answers": answers,
        "figures": figures,
        "first": parts[0],
        "others": parts[1:],
    }
    context |= _placed(figures, parts[0]["tables"])
    files: dict[str, bytes] = {}
    for part in parts:
        for name, table in part["tables"].items():
            files[f"tables/{name}{part['suffix']}.csv"] = table.to_csv().encode()
            if name not in WITHOUT_LATEX:
                files[f"tables/{name}{part['suffix']}.tex"] = table.to_latex(f"{name}{part['suffix']}").encode()
    files["tables/README.md"] = _ON_LATEX.encode()
    for picture in (*visible, *figures):
        files[f"figures/{picture.name}.svg"] = picture.svg.encode()
        files[f"figures/{picture.name}.png"] = picture.png
    for name in first.record.documents:
        if name in DOCUMENTS and has_results(first):
            files |= {file: text.encode() for file, text in DOCUMENTS[name](first).items()}
    files["card.json"] = as_json_text(card).encode()
    files["card.svg"] = as_svg(card).encode()
    files["methods.md"] = methods(first).encode()
    files["report.md"] = _render("report.md.jinja", context).encode()
    files["index.html"] = with_terms(_render("index.html.jinja", context), context["glossary"]).encode()
    try:
        for folder in ("tables", "figures"):
            system.create_dir(f"{root}/{folder}", recursive=True)
        _remove_stale(system, root, files)
        for name, content in files.items():
            _write(system, f"{root}/{name}", content)
    except (OSError, pa.ArrowException) as error:
        command = shlex.join(["python", "-m", "study.scaling", "report", os.fspath(results_dir)])
        raise ReportNotWritten(
            f"{target}: cannot write the report ({line(error)}); fix this, then run: {command}"
        ) from None
    return Report(below(target, "index.html"), card, summary(first, others))


def has_results(analysis: Analysis) -> bool:
    """Return True if a trial is done, timed or trained."""
    return not analysis.configurations.empty or analysis.accuracy is not None


def _answers(inputs: ReportInputs, tables: Mapping[str, Table], overview: Picture | None) -> list[_Answer]:
    shown = set() if overview is None else {overview.name}
    answers: list[_Answer] = []
    for question in questions(inputs):
        picture = first_drawn(inputs, question.figures, tables, shown)
        shown |= {picture.name} if picture else set()
        said = {text for earlier in answers for text in earlier.sentences}
        answers.append(_answer(inputs, question, picture, said))
    return [found for found in answers if found.sentences or found.replies or found.picture or found.html]


def _answer(inputs: ReportInputs, question: Question, picture: Picture | None, said: Collection[str]) -> _Answer:
    """Return the answer to a question, without sentences that an earlier answer has (`said`)."""
    title = question.title.format(ranks=study_ranks(inputs)[1])
    table = None if question.table is None else question.table(inputs)
    sentences = [text for text in question.sentences(inputs) if text not in said]
    return _Answer(question.key, title, sentences, table, picture, question.replies(inputs), question.is_collapsed)


def _figures(inputs: ReportInputs, tables: Mapping[str, Table], without: Iterable[str]) -> list[Picture]:
    """Draw the figures of all sections except those in `without`. Long ones have no form for phones: they scroll."""
    known = set(without)
    drawn = (draw(inputs, figure, tables) for section in SECTIONS for figure in section.figures
             if figure.name not in known)  # fmt: skip
    return [
        replace(picture, narrow_svg=None) if len(picture.narrow_svg or "") > MOST_NARROW_CHARACTERS else picture
        for picture in drawn
        if picture
    ]


def _placed(figures: Sequence[Picture], tables: Mapping[str, Table]) -> dict[str, Any]:
    """Return the sections with the names of their figures, and the figures of sections without a table."""
    sections = [
        (section.name, [figure.name for figure in section.figures]) for section in SECTIONS if not section.at_end
    ]
    with_table = {name for key, names in sections if key in tables for name in names}
    return {"sections": sections, "unplaced": [picture for picture in figures if picture.name not in with_table]}


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
        "embedded": embedded(tables),
        "environment": environment_rows(analysis),
        "answer": answer(analysis),
        "limits": limits(analysis),
        "communication": communication.sentences(analysis),
        "trust": trust(analysis),
        "next": next_steps(analysis),
    }


def _context(results: Results, analysis: ReportInputs, others: Sequence[Analysis], partial: bool) -> dict[str, Any]:
    """Return what the templates of page and Markdown show besides the environments' parts."""
    script, style = static("report.js"), static("style.css")
    return {
        "name": analysis.record.name,
        "question": analysis.record.question,
        "command": analysis.record.command,
        "partial": partial,
        "left_out": left_out(analysis, others),
        "counts": status_counts(results),
        "banner": analysis.record.small_form,
        "facts": facts(analysis),
        "facts_line": facts_line(analysis),
        "has_results": has_results(analysis),
        "actions": actions(analysis),
        "glossary": glossary(study_ranks(analysis)),
        "script": Markup(script),
        "style": Markup(style),
        "security_policy": Markup(security_policy(script, style)),
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
    """Return the common fingerprint of the trials, and what else is known of where and when they ran.

    That is: variables that some trials set, commits, lock file, OS, CPU governor, size of the cluster, and date.
    """
    varying: dict[str, list[str]] = {}
    for environment in analysis.results.trials["environment"]:
        for name, value in (environment.get("variables") or {}).items():
            values = varying.setdefault(name, [])
            if name not in analysis.environment and str(value) not in values:
                values.append(str(value))
    commits = [commit(environment) for environment in analysis.results.trials["environment"]]
    varying["git commit"] = [name for name in dict.fromkeys(commits) if name]
    environments = analysis.results.trials["environment"]
    locks = [environment.get("lock_file") for environment in environments]
    nodes = [node for environment in environments for node in used_nodes(environment)]
    systems, governors = ([node.get(name) for node in nodes] for name in ("os", "cpu_governor"))
    clusters = [_size_of(environment.get("cluster")) for environment in environments]
    for name, listed in (
        ("lock file", locks), ("OS", systems), ("CPU governor", governors), ("Ray cluster", clusters),
        ("date", dates(analysis)),
    ):  # fmt: skip
        varying[name] = [str(value) for value in dict.fromkeys(listed) if value]
    return [*analysis.environment.items(), *((name, join(values, "or")) for name, values in varying.items() if values)]


def _size_of(cluster: Mapping[str, int] | None) -> str | None:
    """Return the size of a trial's cluster; None if it was not recorded."""
    if not cluster:
        return None
    counts = ((cluster[f"{noun.lower()}s"], noun) for noun in ("node", "GPU", "CPU"))
    return ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts)


_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("analysis.report"),
    autoescape=lambda name: name is not None and name.endswith(".html.jinja"),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)


def _as_prose(value: Any) -> Any:
    """Escape texts for Markdown, except what is Markdown already (`Markup`)."""
    return as_prose(value) if isinstance(value, str) and not isinstance(value, Markup) else value


_TEMPLATES.filters["prose"] = as_html

_MARKDOWN = _TEMPLATES.overlay(finalize=_as_prose)


def _render(template: str, context: dict[str, Any]) -> str:
    return (_MARKDOWN if template.endswith(".md.jinja") else _TEMPLATES).get_template(template).render(context)


def _remove_stale(system: pafs.FileSystem, root: str, files: Mapping[str, bytes]) -> None:
    """Remove files of an earlier report that this one lacks; never touch files with other names."""
    plots = [*PLOTS, *RETIRED_PLOTS]
    pattern = re.compile(
        rf"figures/({'|'.join(plots)})(_{BRIEF})?\.(svg|png)|tables/({'|'.join(TABLES)})(-\d+)?\.(csv|tex)"
    )
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
