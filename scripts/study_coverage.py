"""Grade each row of the published studies by the committed results.

    python -m scripts.study_coverage docs/studies/coverage.csv

`coverage_rows.csv` lists the rows: the results folders that measure a row, the values of trial fields that it needs
(`field=value|value;field=value&value`: any of the values, or every one of them), the key of the question that it asks,
and the command that measures it. Grades:

works: trials on GPUs with these values are done, each configuration has at least `LEAST_REPEATS` repeats in the same
environment (`analysis.read.environment`), and the question, if any, is answered from these folders. Rows without trials
need only the answer. After a trial that ran out of memory its later repeats are pruned; rows about the end of memory
count them.
partly: such trials are done, but with fewer repeats or without one of the values, or the question is not answered.
no: no such trial is done. The column `reason` has the reason of each row that does not work.
"""

import argparse
import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.answers.registry import answers
from analysis.measure.configurations import trial_fields
from analysis.read.environment import by_environment
from analysis.read.results import load_reduced
from analysis.text import join
from scripts.claims.sources import committed_inputs
from scripts.study_answers import FOLDERS, RESULTS

LEAST_REPEATS = 3
ROWS = Path(__file__).parent / "coverage_rows.csv"
COLUMNS = ("row", "source", "study", "result", "gpu_kinds", "repeats", "answer", "grade", "reason", "command")
Asked = tuple[str, str]
"""A results folder and the key of a question."""
OUT_OF_SCOPE = "out of scope"
ENVIRONMENT = "environment_number"


def rows() -> list[dict[str, str]]:
    """Return the rows to grade, as in `coverage_rows.csv`."""
    with ROWS.open(newline="") as file:
        return list(csv.DictReader(file))


def graded(
    row: Mapping[str, str], results: Mapping[str, pd.DataFrame], answered: Mapping[Asked, bool]
) -> dict[str, Any]:
    """Return a row with its grade. results: trials by folder. answered: by folder and key of a question.

    Results without the values of a row do not answer its question.
    """
    parts = {name: matching(results[name], row["where"]) for name in row["results"].split() if name in results}
    parts = {name: trials for name, trials in parts.items() if len(trials)}
    trials = pd.concat(parts.values()) if parts else pd.DataFrame()
    repeats = min((_fewest_repeats(part) for part in parts.values()), default=0)
    absent = _absent(trials, row["where"])
    needs_trials = bool(row["results"])
    known = [
        found
        for (folder, key), found in answered.items()
        if key == row["answer"] and (folder in parts or not needs_trials)
    ]
    is_answered = not row["answer"] or any(known)
    answer = "none asked" if not row["answer"] else "yes" if is_answered else "no"
    reasons = []
    if row["command"] == OUT_OF_SCOPE:
        reasons.append("out of scope: this project measures training of models that fit into memory")
    elif needs_trials and not parts:
        reasons.append("no committed result has these settings")
    elif needs_trials and repeats < LEAST_REPEATS:
        reasons.append(f"{repeats} repeat{'' if repeats == 1 else 's'} in place of {LEAST_REPEATS}")
    if parts and absent:
        reasons.append(f"no trial with {join(absent)}")
    if not is_answered and (parts or not needs_trials) and row["command"] != OUT_OF_SCOPE:
        reasons.append("these results do not answer the question")
    nothing = row["command"] == OUT_OF_SCOPE or (needs_trials and not parts) or not (needs_trials or is_answered)
    return {
        **{name: row[name] for name in ("row", "source", "study", "command")},
        "result": " ".join(parts),
        "gpu_kinds": " / ".join(sorted(set(trials["device_name"].dropna()))) if len(trials) else "",
        "repeats": repeats if needs_trials else "",
        "answer": answer,
        "grade": "no" if nothing else "partly" if reasons else "works",
        "reason": "; ".join(reasons),
    }


def matching(trials: pd.DataFrame, where: str) -> pd.DataFrame:
    """Return the trials on GPUs with any of these values. Trials must be done, unless a status is asked for."""
    found = trials[trials["device"] == "cuda"]
    for name, sets in ({"status": [["done"]]} | _asked(where)).items():
        if name not in found:
            return found.iloc[:0]
        found = found[found[name].map(str).isin([value for values in sets for value in values])]
    return found


def _asked(where: str) -> dict[str, list[list[str]]]:
    """Return, by field, sets of values. Trials must have a value of each set."""
    conditions = (condition.split("=") for condition in where.split(";") if condition)
    return {name: [values.split("|") for values in text.split("&")] for name, text in conditions}


def _absent(trials: pd.DataFrame, where: str) -> list[str]:
    """Return the sets of values that no trial has, as `model resnet50`."""
    return [
        f"{name} {' or '.join(values)}"
        for name, sets in _asked(where).items()
        for values in sets
        if name in trials and not trials[name].map(str).isin(values).any()
    ]


def _fewest_repeats(trials: pd.DataFrame) -> int:
    fields = [name for name in trial_fields(trials) if name not in ("repeat", "seed", ENVIRONMENT)]
    keys = trials[fields].map(str).agg("\0".join, axis=1)
    found = trials.groupby([keys, trials[ENVIRONMENT]])["repeat"].nunique()
    return int(found.groupby(level=0).max().min())


@cache
def committed() -> dict[str, pd.DataFrame]:
    """Return the trials of each packed folder that a row names."""
    names = dict.fromkeys(name for row in rows() for name in row["results"].split())
    return {name: _by_environment(RESULTS / name) for name in names if (RESULTS / name / "study.json").exists()}


def _by_environment(folder: Path) -> pd.DataFrame:
    parts = by_environment(load_reduced(str(folder)))
    return pd.concat([part.trials.assign(**{ENVIRONMENT: number}) for number, part in enumerate(parts)])


def coverage() -> list[dict[str, Any]]:
    """Return all rows, graded by the committed results."""
    folders = {name for row in rows() if row["answer"] for name in row["results"].split() or FOLDERS[row["study"]]}
    answered = {
        (name, reply.key): reply.is_answered
        for name in sorted(folders & {path.name for path in RESULTS.iterdir()})
        for reply in answers(committed_inputs(name)[0])
    }
    return [graded(row, committed(), answered) for row in rows()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="CSV file to write")
    options = parser.parse_args()
    found = coverage()
    with options.page.open("w", newline="") as destination:
        writer = csv.DictWriter(destination, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    print(pd.Series([row["grade"] for row in found]).value_counts().to_string())
