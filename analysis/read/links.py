"""Addresses and files of trials in a results folder, and symbolic links that lead out of it.

A results folder may come from somebody else. Neither reading it nor writing its report may touch files outside it.
"""

import os
from collections.abc import Callable, Iterator

import pyarrow.fs as pafs

from analysis.read.schema import SCHEMAS

ENTRIES = (
    "study.json", "trials", "report", "checkpoints", ".partial", "trials.parquet",
    *(f"{name}.parquet" for name in SCHEMAS),
)  # fmt: skip
"""Entries of a results folder that are read or written. Links elsewhere in the folder are harmless."""


def below(folder: str, name: str) -> str:
    """Return the address of `name` in a folder, which is a path or a URI. The query of a URI stays its end."""
    address, mark, query = folder.partition("?") if "://" in folder else (folder, "", "")
    return f"{address.rstrip('/')}/{name}{mark}{query}"


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


def trial_files(system: pafs.FileSystem, root: str) -> dict[str, int | None]:
    """Return the size in bytes of every file of a trial, by its path below `root`/trials: ID/NAME or ID/traces/NAME.

    Nothing deeper is read, so a loop of links ends. Names with control characters or undecodable bytes are left out.
    """
    if isinstance(system, pafs.LocalFileSystem):
        trials = os.path.join(root, "trials")
        return dict(_local_files(trials)) if os.path.lexists(trials) else {}
    selector = pafs.FileSelector(f"{root}/trials", recursive=True, allow_not_found=True)
    base = selector.base_dir.strip("/") + "/"
    files = {
        info.path.strip("/").removeprefix(base): info.size
        for info in system.get_file_info(selector)
        if info.type == pafs.FileType.File
    }
    return {path: size for path, size in files.items() if _is_of_trial(path)}


def _is_of_trial(path: str) -> bool:
    parts = path.split("/")
    return len(parts) == 2 or (len(parts) == 3 and parts[1] == "traces")


def _local_files(trials: str) -> Iterator[tuple[str, int]]:
    for trial in _named_entries(trials):
        for entry in _named_entries(trial.path) if _is(os.DirEntry.is_dir, trial) else ():
            if _is(os.DirEntry.is_file, entry):
                yield f"{trial.name}/{entry.name}", entry.stat().st_size
            elif entry.name == "traces" and _is(os.DirEntry.is_dir, entry):
                for trace in _named_entries(entry.path):
                    if _is(os.DirEntry.is_file, trace):
                        yield f"{trial.name}/traces/{trace.name}", trace.stat().st_size


def _is(kind: Callable[["os.DirEntry[str]"], bool], entry: "os.DirEntry[str]") -> bool:
    """Return whether an entry is of a kind. A link to itself is of none."""
    try:
        return kind(entry)
    except OSError:
        return False


def _named_entries(folder: str) -> list["os.DirEntry[str]"]:
    with os.scandir(folder) as entries:
        return sorted((entry for entry in entries if entry.name.isprintable()), key=lambda entry: entry.name)
