"""Open a results folder, packed or with a folder per trial: its records, and its tables in checked portions."""

import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.fs as pafs

from analysis.read.errors import RESTORE, RUN_AGAIN, ResultsError, line, printable
from analysis.read.links import symlink_outside, trial_files
from analysis.read.packed import TRIALS, PackedTrial, is_packed, read_trials, total_rows
from analysis.read.parquet import TableFile, categorised, plain_frame, portions, read_portion, row_groups, table_file
from analysis.read.schema import REQUIRED, SCHEMA_VERSION, frame_schema
from analysis.read.validate.json_file import plain_json, read_json
from analysis.read.validate.records import TrialFile, check_study, trial_file
from analysis.read.validate.tables import damage, most_rows, without_infinities

_TRACE = re.compile(r"(.*)/traces/rank(\d+)\.json\.gz")


def filesystem(directory: str | os.PathLike[str]) -> tuple[pafs.FileSystem, str]:
    """Return the file system of a path or URI, and the path in it. Raises ResultsError if the address is invalid."""
    text = os.fspath(directory)
    if not text.strip():
        raise ResultsError(f"{text!r} is not a path; give a folder or a URI")
    if "\0" in text or printable(text) != text:
        raise ResultsError(f"{printable(text)}: a path with undecodable or control characters; rename the folder")
    if "://" not in text:
        return pafs.LocalFileSystem(), os.path.abspath(text)
    try:
        return pafs.FileSystem.from_uri(text)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ResultsError(
            f"{text}: no file system supports this address ({line(error)}); give a folder or a URI"
        ) from None


@dataclass(frozen=True)
class Folder:
    """A results folder whose JSON has been read: the trials, and the locations of their tables.

    files: records of trials, by id. traces: addresses of their profiler traces. damaged: one line per damaged trial, by
    id; reading the tables adds to it.
    """

    system: pafs.FileSystem
    root: str
    study: dict[str, Any]
    files: dict[str, TrialFile]
    traces: Mapping[str, tuple[str, ...]]
    damaged: dict[str, str]
    paths: Collection[str]
    packed: Sequence[PackedTrial] | None = None

    def portions(self, name: str) -> Iterator[list[TableFile]]:
        """Yield the files of a table in portions. Raises ResultsError if a packed file is damaged."""
        return portions(self._packed_table(name) if self.packed is not None else self._tables(name))

    def _tables(self, name: str) -> Iterator[TableFile]:
        for trial_id, file in self.files.items():
            if f"{trial_id}/{name}.parquet" not in self.paths:
                continue
            path = f"{self.root}/trials/{trial_id}/{name}.parquet"
            try:
                table = table_file(
                    self.system, path, frame_schema(name), REQUIRED[name], trial_id, most_rows(name, file)
                )
            except ResultsError as error:
                self.damaged[trial_id] = str(error)
                continue
            if name == "steps" and file.status == "done" and not table.rows():
                self.damaged[trial_id] = f"{path}: has no rows, though trial.json has status done; {RUN_AGAIN}"
            yield table

    def _packed_table(self, name: str) -> Iterator[TableFile]:
        path, rows = f"{self.root}/{name}.parquet", total_rows(self.packed or (), name)
        if rows is None:
            return
        if self.system.get_file_info(path).type != pafs.FileType.File:
            raise ResultsError(f"{path}: missing, though {TRIALS} lists {rows} rows; {RESTORE}")
        for trial in self.packed or ():
            file, listed = self.files.get(trial.record["trial_id"]), trial.rows.get(name, 0)
            if file is not None and listed > (most := most_rows(name, file)):
                raise ResultsError(f"{path}: {listed} rows of {file.trial_id}, which has at most {most}; {RESTORE}")
        table = table_file(self.system, path, frame_schema(name), ("trial_id", *REQUIRED[name]), None, sys.maxsize)
        if (actual := table.rows()) != rows:
            raise ResultsError(f"{path}: holds {actual} rows, though {TRIALS} lists {rows}; {RESTORE}")
        yield from row_groups(replace(table, most_rows=rows))

    def checked(self, name: str, files: Sequence[TableFile], schema: pa.Schema) -> tuple[pa.Table, pd.DataFrame]:
        """Read files, as a table and as a frame with categories. Rows of damaged trials are left out and noted."""
        table, damaged = read_portion(files, schema)
        frame = without_infinities(categorised(table))
        known = frame["trial_id"].isin(list(self.files))
        found = damage(name, frame[known], self.files)
        self.damaged.update(damaged)
        for trial_id, reason in found.items():
            where = self.root if self.packed is not None else f"{self.root}/trials/{trial_id}"
            of_trial, fix = (f" of {trial_id}", RESTORE) if self.packed is not None else ("", RUN_AGAIN)
            self.damaged[trial_id] = f"{where}/{name}.parquet: {reason}{of_trial}; {fix}"
        keep = known & ~frame["trial_id"].isin([*found, *damaged])
        if not keep.all():
            frame, table = frame[keep].reset_index(drop=True), table.filter(pa.array(keep))
            frame["trial_id"] = frame["trial_id"].cat.remove_unused_categories()
        return table, frame

    def frame(self, name: str) -> pd.DataFrame:
        """Read a table of all trials, with the columns of its frame schema."""
        schema = frame_schema(name)
        tables = [self.checked(name, files, schema)[0] for files in self.portions(name)]
        return without_infinities(plain_frame(tables, schema))


def open_folder(directory: str | os.PathLike[str]) -> Folder:
    """Read the JSON of a results folder. Raises ResultsError if it cannot be read, or study.json is damaged."""
    system, root = filesystem(directory)
    try:
        if isinstance(system, pafs.LocalFileSystem) and (link := symlink_outside(root)):
            raise ResultsError(f"{link}: leads outside of {root}; replace the link with a copy of its target")
        study = _read_study(system, root)
        if is_packed(system, root):
            return _open_packed(system, root, study)
        paths = trial_files(system, root)
    except (OSError, pa.ArrowException) as error:
        raise ResultsError(f"{root}: cannot be read ({line(error)})") from None
    trial_ids = sorted(path.removesuffix("/trial.json") for path in paths if path.endswith("/trial.json"))
    declared = _defaults(study)

    def read(trial_id: str) -> TrialFile | str:
        try:
            return _read_trial(system, root, trial_id, declared, paths)
        except ResultsError as error:
            return str(error)

    with ThreadPoolExecutor(16) as pool:  # remote stores have a high latency but serve many requests at once
        found = dict(zip(trial_ids, pool.map(read, trial_ids), strict=True))
    address = os.fspath(directory)
    traces = _trace_paths(
        [f"{root}/trials/{path}" for path in paths],
        lambda path: address.replace(root, path, 1) if "://" in address else path,
    )
    files, damaged = _without_copies(found, lambda trial_id: f"{root}/trials/{trial_id}", RUN_AGAIN)
    by_id = {folder.rpartition("/")[2]: addresses for folder, addresses in traces.items()}
    return Folder(system, root, study, files, by_id, damaged, paths)


def _open_packed(system: pafs.FileSystem, root: str, study: dict[str, Any]) -> Folder:
    packed = read_trials(system, root)
    path = f"{root}/{TRIALS}"
    declared = _defaults(study)
    found: dict[str, TrialFile | str] = {}
    for trial in packed:
        trial_id = trial.record["trial_id"]
        where = f"{path}: {printable(trial_id)}"
        try:
            record = plain_json(trial.record)
            _refuse_other_version(record, where)
            file = trial_file(record, declared, where, RESTORE)
            if file.status == "done" and not trial.rows.get("steps"):
                raise ResultsError(f"{where}: status is done, but there are no steps; {RESTORE}")
            found[trial_id] = file
        except ResultsError as error:
            found[trial_id] = str(error)
        except ValueError as error:
            found[trial_id] = f"{where}: {line(error)}; {RESTORE}"
    files, damaged = _without_copies(found, lambda trial_id: f"{path}: {trial_id}", RESTORE)
    return Folder(system, root, study, files, {}, damaged, (), packed)


def _defaults(study: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default of each field that study.json describes."""
    return {name: facts.get("default") for name, facts in (study.get("fields") or {}).items()}


def _without_copies(
    found: Mapping[str, TrialFile | str], where: Callable[[str], str], fix: str
) -> tuple[dict[str, TrialFile], dict[str, str]]:
    """Split what was read into trials and damaged trials, by id. A trial with the fields of another is a copy of it."""
    files: dict[str, TrialFile] = {}
    damaged: dict[str, str] = {}
    first: dict[str, str] = {}
    for trial_id, file in found.items():
        if isinstance(file, str):
            damaged[trial_id] = file
            continue
        original = first.setdefault(file.trial.model_dump_json(), trial_id)
        if original == trial_id:
            files[trial_id] = file
        else:
            damaged[trial_id] = f"{where(trial_id)}: has the same fields as {original}, so one is a copy; {fix}"
    return files, damaged


def _trace_paths(paths: Collection[str], address: Callable[[str], str]) -> dict[str, tuple[str, ...]]:
    """Return the profiler traces by trial folder, in rank order, as addresses that `filesystem` accepts."""
    ranked: dict[str, list[tuple[int, str]]] = {}
    for path in paths:
        if match := _TRACE.fullmatch(path):
            ranked.setdefault(match[1], []).append((int(match[2]), address(path)))
    return {folder: tuple(path for _, path in sorted(traces)) for folder, traces in ranked.items()}


def _refuse_other_version(value: Mapping[str, Any], where: str) -> None:
    version = value.get("schema_version")
    if isinstance(version, int) and version != SCHEMA_VERSION:
        age, fix = ("newer", "update the program") if version > SCHEMA_VERSION else ("older", "run the study again")
        raise ResultsError(
            f"{where}: schema version {version} is {age} than {SCHEMA_VERSION}, which this program reads; {fix}"
        )


def _read_study(system: pafs.FileSystem, root: str) -> dict[str, Any]:
    path = f"{root}/study.json"
    if system.get_file_info(path).type != pafs.FileType.File:
        raise ResultsError(
            f"{root}: no study.json, so this is not a results folder; give the folder that a study was run into"
        )
    fix = "restore it from a copy, or run the study into another folder"
    study = read_json(system, path, fix)
    _refuse_other_version(study, path)
    check_study(study, path, fix)
    return study


def _read_trial(
    system: pafs.FileSystem, root: str, trial_id: str, declared: Mapping[str, Any], paths: Collection[str]
) -> TrialFile:
    path = f"{root}/trials/{trial_id}/trial.json"
    record = read_json(system, path, RUN_AGAIN)
    _refuse_other_version(record, path)
    file = trial_file(record, declared, path, RUN_AGAIN)
    if file.trial_id != trial_id:
        raise ResultsError(
            f"{path}: trial_id is {file.trial_id!r}, but its folder is {trial_id!r}; rename or remove the folder"
        )
    if file.status == "done" and f"{trial_id}/steps.parquet" not in paths:
        raise ResultsError(
            f"{root}/trials/{trial_id}/steps.parquet: missing, though trial.json has status done; {RUN_AGAIN}"
        )
    return file
