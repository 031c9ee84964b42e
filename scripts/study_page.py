"""Write a study's page for docs/studies from its results: question, answer and supporting tables.

    python -m scripts.study_page RESULTS docs/studies/NAME.md throughput parallel memory_balance prediction_fan

Figures are written to docs/images. Pages are never edited by hand: the command on the page reproduces it.
"""

import argparse
import re
from pathlib import Path

from analysis.answers.registry import answers
from analysis.predict.inputs import report_inputs
from analysis.read.results import load_reduced
from analysis.report.report import environment_rows, status_counts
from analysis.report.sections import PLOTS, TABLES
from analysis.verdict.answer import answer, limits
from analysis.verdict.trust import trust
from scripts.readme_pictures import FOLDER, picture

COMMAND = re.compile(r"^This page: `python -m scripts\.study_page (\S+) (\S+) ([^`]+)`$", re.M)
"""The last line of a page, with its results folder, its file, and the names of its tables and figures."""


def page(results_folder: str, names: list[str], target: Path | None = None) -> str:
    """Return the page as Markdown, with the command that writes it to `target`. names: of tables and figures.

    Raises ResultsError if the folder has no results, KeyError for an unknown table.
    """
    results = load_reduced(results_folder)
    first = report_inputs(results)[0]
    device = first.environment.get("device") or ", ".join(map(str, results.trials["device_name"].dropna().unique()))
    data = ", ".join(sorted(map(str, results.trials["dataset"].dropna().unique())))
    parts = [
        f"# {results.study['name']}",
        results.study["question"],
        *(f"**{reply.question}** {reply.text}" for reply in answers(first)),
        f"Measured on: {device}; data: {data}."
        + (
            " Without GPUs the study runs in a reduced form that shows the method, not the performance of GPUs."
            if set(results.trials["device"]) == {"cpu"}
            else ""
        ),
        f"    {_without_folder(results.study['command'])}",
        ", ".join(f"{count} {label}" for label, count in status_counts(results) if count) + " trials.",
        "## Summary",
        "\n".join(f"- {sentence}" for sentence in [*answer(first), *limits(first)]),
        "## Trust",
        "\n".join(f"- {line}" for line in trust(first)),
        *(_link(figure_file(target, name), name) for name in names if target and name not in TABLES),
        "## Tables",
        *(table.to_markdown() for name in names if name in TABLES and not (table := TABLES[name](first)).frame.empty),
        "## Environment",
        "\n".join(f"- {key}: {value}" for key, value in environment_rows(first)),
        f"This page: `python -m scripts.study_page {results_folder} {target} {' '.join(names)}`" if target else "",
    ]
    return "\n\n".join(part.rstrip() for part in parts if part.strip()) + "\n"


def _link(file: Path, name: str) -> str:
    return f"![Figure: {name.replace('_', ' ')}](../images/{file.name})"


def figure_file(target: Path, name: str) -> Path:
    """Return the file of a figure of a page."""
    return FOLDER / f"{target.stem}-{name}.svg"


def _without_folder(command: str) -> str:
    """Return the command without its results folder."""
    return re.sub(r" --out \S+", "", command)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", help="results folder of a study")
    parser.add_argument("page", type=Path, help="file to write")
    names = [*TABLES, *(name for name in PLOTS if name not in TABLES)]
    parser.add_argument("tables", nargs="+", choices=names, metavar="TABLE", help=f"one of {', '.join(names)}")
    options = parser.parse_args()
    options.page.parent.mkdir(parents=True, exist_ok=True)
    options.page.write_text(page(options.results, options.tables, options.page))
    if figures := set(options.tables) - set(TABLES):
        inputs = report_inputs(load_reduced(options.results))[0]
        for figure in figures:
            figure_file(options.page, figure).write_text(picture(figure, inputs))
