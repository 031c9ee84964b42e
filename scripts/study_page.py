"""Write a study's page for docs/studies from its results: question, answer and supporting tables.

    python -m scripts.study_page RESULTS docs/studies/NAME.md throughput parallel memory_balance

Pages are never edited by hand. The command on the page and this command reproduce it.
"""

import argparse
import re
from pathlib import Path

from analysis.answers.registry import answers
from analysis.predict.inputs import report_inputs
from analysis.read.results import load_reduced
from analysis.report.report import environment_rows, status_counts
from analysis.report.sections import TABLES
from analysis.verdict.answer import answer, limits
from analysis.verdict.trust import trust


def page(results_folder: str, names: list[str], target: Path | None = None) -> str:
    """Return the page as Markdown, with the command that writes it to `target`.

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
        "## Tables",
        *(table.to_markdown() for name in names if not (table := TABLES[name](first)).frame.empty),
        "## Environment",
        "\n".join(f"- {key}: {value}" for key, value in environment_rows(first)),
        f"This page: `python -m scripts.study_page {results_folder} {target} {' '.join(names)}`" if target else "",
    ]
    return "\n\n".join(part.rstrip() for part in parts if part.strip()) + "\n"


def _without_folder(command: str) -> str:
    """Return the command without its results folder."""
    return re.sub(r" --out \S+", "", command)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", help="results folder of a study")
    parser.add_argument("page", type=Path, help="file to write")
    parser.add_argument("tables", nargs="+", choices=list(TABLES), metavar="TABLE", help=f"one of {', '.join(TABLES)}")
    options = parser.parse_args()
    options.page.parent.mkdir(parents=True, exist_ok=True)
    options.page.write_text(page(options.results, options.tables, options.page))
