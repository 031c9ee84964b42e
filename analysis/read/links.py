"""Find symbolic links that lead out of a results folder.

A results folder may come from somebody else. Neither reading it nor writing its report may touch files outside it.
"""

import os
from collections.abc import Iterator

from analysis.read.schema import SCHEMAS

ENTRIES = (
    "study.json", "trials", "report", "checkpoints", ".partial", "trials.parquet",
    *(f"{name}.parquet" for name in SCHEMAS),
)  # fmt: skip
"""Entries of a results folder that are read or written. Links elsewhere in the folder are harmless."""


def symlink_outside(root: str) -> str | None:
    """Return the first link in the local results folder `root` whose target is outside it. None if there is none."""
    real = os.path.join(os.path.realpath(root), "")
    for link in _links(root):
        if not os.path.realpath(link).startswith(real):
            return link
    return None


def _links(root: str) -> Iterator[str]:
    """Yield the symbolic links below `ENTRIES`, without following any."""
    for name in ENTRIES:
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
