"""Writes a study's page for docs/studies from its results: its question, its answer, and the tables that show it.

    python -m scripts.study_page RESULTS docs/studies/NAME.md throughput parallel memory_balance

Nothing in a page is written by hand: the command that it names and this one make it again.
"""

import argparse
import re
from pathlib import Path

from analysis.load.results import load_reduced
from analysis.predict.inputs import report_inputs
from analysis.report.report import environment_rows, status_counts
from analysis.report.sections import TABLES
from analysis.verdict.answer import answer, limits
from analysis.verdict.trust import trust


def page(results_folder: str, names: list[str]) -> str:
    """The page as Markdown. Raises ResultsError for what is no results folder, KeyError for an unknown table."""
    results = load_reduced(results_folder)
    first = report_inputs(results)[0]
    where = first.environment.get("device") or ", ".join(map(str, results.trials["device_name"].dropna().unique()))
    data = ", ".join(sorted(map(str, results.trials["dataset"].dropna().unique())))
    parts = [
        f"# {results.study['name']}",
        results.study["question"],
        f"Measured on: {where}; data: {data}."
        + (
            " Without GPUs a study is a small form of itself: it shows the way, not what GPUs do."
            if set(results.trials["device"]) == {"cpu"}
            else ""
        ),
        f"    {_anywhere(results.study['command'])}",
        ", ".join(f"{count} {label}" for label, count in status_counts(results) if count) + " trials.",
        "## Answer",
        " ".join([*answer(first), *limits(first)]),
        "\n".join(f"- {line}" for line in trust(first)),
        "## Tables",
        *(table.to_markdown() for name in names if not (table := TABLES[name](first)).frame.empty),
        "## Environment",
        "\n".join(f"- {key}: {value}" for key, value in environment_rows(first)),
    ]
    return "\n\n".join(part.rstrip() for part in parts if part.strip()) + "\n"


def _anywhere(command: str) -> str:
    """The command without the folder that it happened to write into."""
    return re.sub(r" --out \S+", "", command)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", help="folder of a study")
    parser.add_argument("page", type=Path, help="file to write")
    parser.add_argument("tables", nargs="+", choices=list(TABLES), metavar="TABLE", help=f"of {', '.join(TABLES)}")
    options = parser.parse_args()
    options.page.parent.mkdir(parents=True, exist_ok=True)
    options.page.write_text(page(options.results, options.tables))
