"""A results folder may come from somebody else: nothing in it may lead a reader, or the report's writer, out of it."""

import os
from collections.abc import Iterator

from analysis.load.schema import SCHEMAS

OURS = (
    "study.json", "trials", "report", "checkpoints", ".partial", "trials.parquet", *(f"{name}.parquet" for name in SCHEMAS),
)  # fmt: skip
"""entries of a results folder that are read or written; others are left alone, wherever they lead"""


def leads_outside(root: str) -> str | None:
    """The first link in the local results folder `root` whose target is not in it; None where there is none."""
    real = os.path.join(os.path.realpath(root), "")
    for link in _links(root):
        if not os.path.realpath(link).startswith(real):
            return link
    return None


def _links(root: str) -> Iterator[str]:
    """Symbolic links among what is ours, none of which is followed."""
    for name in OURS:
        path = os.path.join(root, name)
        if os.path.islink(path):
            yield path
        elif os.path.isdir(path):
            yield from _links_below(path)


def _links_below(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                yield entry.path
            elif entry.is_dir(follow_symlinks=False):
                yield from _links_below(entry.path)
