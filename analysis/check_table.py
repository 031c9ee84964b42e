"""What the data look like, as a table: what the checks found, in which trials, and what to do."""

import pandas as pd

from analysis.checks import CHECKS
from analysis.finding import FALSE_ALARM, MATTERS
from analysis.formatting import MOST_NAMED, join, named, percent
from analysis.study import Analysis
from analysis.table import Column, Table


def data_checks(analysis: Analysis) -> Table:
    """Every finding of `checks.CHECKS`, with the trials concerned."""
    found = analysis.findings
    silent = [_words(name) for name in CHECKS if name not in {finding.name for finding in found}]
    frame = pd.DataFrame(
        {
            "check": [_words(finding.name) for finding in found],
            "finding": [finding.sentence for finding in found],
            "what_to_do": [finding.what_to_do for finding in found],
            "trials": [len(finding.trial_ids) for finding in found],
            "such_as": [named(finding.trial_ids) for finding in found],
            "trial_ids": [finding.trial_ids for finding in found],
        },
        columns=["check", "finding", "what_to_do", "trials", "such_as", "trial_ids"],
    )
    nothing = f"Nothing found of: {join(silent, 'or')}. " if silent else ""
    return Table(
        "What the data look like",
        (
            Column("check", "check", "what was looked for."),
            Column("finding", "finding", "what was found, and how large it is."),
            Column("what_to_do", "what to do", "what avoids it in another run, or what to read with care."),
            Column("trials", "trials", "how many trials it was found in.", decimals=0),
            Column("such_as", "such as", f"the first {MOST_NAMED} of these; all of them are in the CSV file."),
        ),
        frame,
        f"{nothing}Each check finds something in at most {percent(FALSE_ALARM)} of studies without its fault, and is silent about effects "
        f"that matter little ({percent(MATTERS)} of a step). Few trials or steps may hide what it looks for.",
        empty="" if analysis.configurations.empty else "The checks found nothing.",
    )


def _words(name: str) -> str:
    return name.replace("_", " ")
