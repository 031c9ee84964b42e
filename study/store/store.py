"""The results folder: one folder per trial, whose `trial.json` is written last. It is the only record of what has run.

    DIR/study.json                       name, question, configuration, versions, command
    DIR/trials/<trial_id>/               trial.json, and those of the other files that the trial produced
        steps.parquet                    one row per rank, window and step
        buckets.parquet                  one row per rank, window, step and gradient bucket
        sweep.parquet                    one row per rank, message size and repetition of the all-reduce sweep
        epochs.parquet                   one row per epoch of a training to an accuracy
        traces/rank<R>.json.gz           the profiler trace of a rank, in Chrome's format
        error.log                        tracebacks of the ranks
        trial.json                       the trial's fields, status, reason, environment
    DIR/checkpoints/<trial_id>/          checkpoint of an unfinished training (`study/store/checkpoints.py`)
    DIR/trials.parquet, steps.parquet, ...  instead of trials/, if the folder is packed (`study/store/packing.py`)
    DIR/.partial/                        unfinished writes; opening DIR clears those of killed writers

`analysis/read/schema.py` defines the columns. DIR is a path or a URI of `pyarrow.fs` (s3://, gs://, hdfs://, file://).
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from pyarrow import fs

from analysis.read.errors import ResultsError
from analysis.read.links import below, symlink_outside, trial_files
from analysis.read.packed import PackedTrial, is_packed, read_trials
from analysis.read.schema import SCHEMA_VERSION, SCHEMAS
from analysis.read.validate.json_file import MAX_BYTES as MAX_JSON_BYTES
from analysis.read.validate.json_file import parsed
from study.errors import USAGE, one_line
from study.options import recorded_fields
from study.store.durable import clear_partial, create_file, is_plain_name, replace_file, replace_folder
from study.store.records import is_complete_record, statuses_of
from study.store.redaction import encodable, redacted
from study.store.result import TrialResult, files_of, json_bytes
from study.store.tables import MIN_PARQUET_BYTES, has_parquet_footer

KEPT_ENTRIES = ("notes", "improve", "evidence")
"""Entries of study.json that stay if the study runs again."""


class StoreError(Exception):
    """A results folder cannot be used. The message is one line: which folder, what is wrong, what to do."""

    exit_code = USAGE


@dataclass(frozen=True)
class Store:
    """A results folder. Use `Store.open` to write or `Store.at` to read.

    Every method raises StoreError if the folder cannot be read or written.
    """

    out: str
    filesystem: fs.FileSystem
    root: str

    @classmethod
    def open(
        cls,
        out: str,
        *,
        name: str,
        question: str,
        configuration: Mapping[str, Any],
        versions: Mapping[str, str],
        command: str,
        filesystem: fs.FileSystem | None = None,
    ) -> Self:
        """Create the results folder of study `name`, or reopen it: trials are kept, study.json is replaced.

        With `filesystem`, `out` is a path in it. Raises StoreError if the folder belongs to another study, contains
        something else, is corrupt or packed, or was written by another version.
        """
        store = cls.locate(out, filesystem)
        with store_errors(f"{out} cannot be used"):
            existing = store._read_study()
            if existing is None:
                store._has_trials()
            else:
                refuse_other_study(out, existing["name"], name)
                if store.is_packed:
                    raise StoreError(
                        f"{out} is packed, so no trial can be added; "
                        f"run python -m study.scaling unpack {out}, then run the study again"
                    )
            study = {
                "schema_version": SCHEMA_VERSION,
                "name": name,
                "question": question,
                "configuration": dict(configuration),
                "versions": dict(versions),
                "command": command,
                "fields": recorded_fields(),
                **{name: existing[name] for name in KEPT_ENTRIES if existing and name in existing},
            }
            store.filesystem.create_dir(f"{store.root}/trials", recursive=True)
            if not store._put_study(json_bytes(redacted(study)), exists=existing is not None):
                refuse_other_study(out, store.study()["name"], name)
            if store.is_local:
                clear_partial(Path(store.root))
        return store

    @classmethod
    def existing(cls, out: str) -> Self | None:
        """Return the results folder `out`, or None if it does not exist. Raises StoreError like `open`.

        A folder that has lost its study.json counts: its trials say all that a run needs, and `open` writes the file.
        """
        store = cls.locate(out, None)
        with store_errors(f"{out} cannot be used"):
            return store if store._read_study() is not None or store._has_trials() else None

    @classmethod
    def at(cls, out: str, filesystem: fs.FileSystem | None = None) -> Self:
        """The results that are in `out`; changes nothing."""
        store = cls.locate(out, filesystem)
        with store_errors(f"{out} cannot be used"):
            if store._read_study() is None:
                fix = "give the folder of a study"
                with contextlib.suppress(StoreError):
                    if store._has_trials():
                        fix = "restore it from a copy, or run the study again with this --out, which keeps its trials"
                raise StoreError(f"{out} is not a results folder: it has no study.json; {fix}")
        return store

    def set_entry(self, name: str, record: Mapping[str, Any]) -> None:
        """Write the outcome of `improve`, or the evidence of a study, into study.json."""
        with store_errors(f"{self.out} cannot be used"):
            self.replace_file("study.json", json_bytes(redacted(self.study() | {name: dict(record)})))

    def study(self) -> dict[str, Any]:
        """Return the content of study.json."""
        with store_errors(f"{self.out} cannot be read"):
            study = self._read_study()
        if study is None:
            raise StoreError(f"{self.out} is not a results folder any more: its study.json is missing")
        return study

    def name(self) -> str | None:
        """Return the name of the study, or None if the folder has lost its study.json."""
        with store_errors(f"{self.out} cannot be read"):
            study = self._read_study()
        return None if study is None else str(study["name"])

    def records(self) -> list[dict[str, Any]]:
        """Return the records of all complete trials, sorted by trial id."""
        return self.scan()[0]

    def statuses(self) -> dict[str, str]:
        """Return trial id -> status. Incomplete and corrupt trials are left out, so they run again."""
        return statuses_of(self.records())

    def corrupt(self) -> list[str]:
        """Return the ids of damaged trials: trial.json is unreadable, or a table is missing or truncated."""
        return self.scan()[1]

    @property
    def is_packed(self) -> bool:
        """True if all trials are in a few files (`study/store/packing.py`). No trial can be added to such a folder."""
        return is_packed(self.filesystem, self.root)

    def packed_trials(self) -> list[PackedTrial]:
        """Return the trials of a packed folder."""
        try:
            with store_errors(f"{self.out} cannot be read"):
                return read_trials(self.filesystem, self.root)
        except ResultsError as error:
            raise StoreError(str(error)) from error

    def trial_folder(self, trial_id: str) -> str:
        """Return the path or URI of a trial's folder, for messages."""
        return self.address(f"trials/{trial_id}")

    def address(self, name: str) -> str:
        """Return the path or URI of a file or folder in this folder, for messages."""
        return below(self.out, name)

    def save(self, result: TrialResult) -> None:
        """Save a trial's result in place of an earlier one, unless that is done. A kill leaves all of it or nothing.

        A local folder is written elsewhere and renamed. Object stores have no atomic rename: there, trial.json, without
        which a trial does not count, is removed first and written last.
        """
        trial_id = result.trial.trial_id
        if not is_plain_name(trial_id):
            raise StoreError(
                f"trial {trial_id!r} cannot be a folder name: a workload's name may contain letters, digits and _"
            )
        files = files_of(result)
        with store_errors(f"trial {trial_id} cannot be saved in {self.out}"):
            self.save_new(trial_id, files)

    def save_new(self, trial_id: str, files: Mapping[str, bytes]) -> None:
        """Replace a trial's folder by these files, unless the trial is done. trial.json must be the last."""
        if not self._is_done(trial_id):
            self.save_files(trial_id, files)

    def save_files(self, trial_id: str, files: Mapping[str, bytes]) -> None:
        """Replace a trial's folder by exactly these files. trial.json must be the last."""
        if self.is_local:
            replace_folder(Path(self.root), trial_id, files)
        else:
            self._save_remote(trial_id, files)

    def _is_done(self, trial_id: str) -> bool:
        """Return True if the trial is complete and done. Then another run has measured it, and its result stays."""
        if not self.has_file(f"trials/{trial_id}/trial.json"):
            return False
        entries = self.filesystem.get_file_info(fs.FileSelector(f"{self.root}/trials/{trial_id}"))
        files = {f"{trial_id}/{entry.base_name}": entry.size for entry in entries if entry.type == fs.FileType.File}
        record = self._read_record(trial_id, files)
        return record is not None and record["status"] == "done"

    @classmethod
    def locate(cls, out: str, filesystem: fs.FileSystem | None = None) -> Self:
        """Return a store for the folder `out` without reading it."""
        if filesystem is not None:
            return cls(out, filesystem, out.strip("/"))
        if not out.strip():
            raise StoreError(f"{out!r} is not a path: give a folder or a URI")
        if "://" not in out:
            return cls(out, fs.LocalFileSystem(), _local_root(out))
        try:
            filesystem, root = fs.FileSystem.from_uri(out)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise StoreError(f"{out} is not a folder or a known URI: {one_line(error)}") from error
        return cls(out, filesystem, root.rstrip("/"))

    @property
    def is_local(self) -> bool:
        return isinstance(self.filesystem, fs.LocalFileSystem)

    def _read_study(self) -> dict[str, Any] | None:
        """Return the validated content of study.json, or None if there is no such file."""
        if self.filesystem.get_file_info(f"{self.root}/study.json").type != fs.FileType.File:
            return None
        try:
            study = parsed(self.read_file("study.json"))
            if not (isinstance(study["name"], str) and isinstance(study["schema_version"], int)):
                raise TypeError("its name or schema_version has the wrong type")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else one_line(error)
            raise StoreError(
                f"{self.address('study.json')} is corrupt ({reason}); restore it from a copy, or remove it and run "
                "the study again with this --out, which keeps its trials"
            ) from error
        if (version := study["schema_version"]) != SCHEMA_VERSION:
            age, fix = ("a newer", "update the tool, or ") if version > SCHEMA_VERSION else ("an older", "")
            raise StoreError(
                f"{self.out} was written by {age} version of this tool (schema {version}, supported: "
                f"{SCHEMA_VERSION}); {fix}choose another --out"
            )
        return dict(study)

    def _has_trials(self) -> bool:
        """Return True if a folder without study.json has trials, or False if it is empty.

        Raises StoreError if it contains something else. Hidden entries do not count: a killed writer leaves .partial.
        """
        info = self.filesystem.get_file_info(self.root)
        if info.type == fs.FileType.File:
            raise StoreError(f"{self.out} is a file; --out must be a folder")
        entries = self.filesystem.get_file_info(fs.FileSelector(self.root, allow_not_found=True))
        names = {entry.base_name for entry in entries if not entry.base_name.startswith(".")}
        if "trials" in names and names <= {"trials", "report", "checkpoints"} and self.records():
            return True
        if names:
            raise StoreError(
                f"{self.out} is not empty and has no study.json, so it is not a results folder; choose another --out"
            )
        return False

    def scan(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the records of complete trials, and the ids of corrupt ones."""
        if self.is_packed:
            packed = self.packed_trials()
            complete = {trial.record["trial_id"]: is_complete_record(trial.record, trial.rows) for trial in packed}
            return (
                [trial.record for trial in packed if complete[trial.record["trial_id"]]],
                [trial_id for trial_id, is_complete in complete.items() if not is_complete],
            )
        with store_errors(f"{self.out} cannot be read"):
            files = trial_files(self.filesystem, self.root)
            trial_ids = sorted(folder for folder, _, name in (f.partition("/") for f in files) if name == "trial.json")
            with ThreadPoolExecutor(16) as readers:  # each read from an object store waits for the network
                records = list(readers.map(lambda trial_id: self._read_record(trial_id, files), trial_ids))
        corrupt = [trial_id for trial_id, record in zip(trial_ids, records, strict=True) if record is None]
        return [record for record in records if record is not None], corrupt

    def _read_record(self, trial_id: str, files: Mapping[str, int | None]) -> dict[str, Any] | None:
        """Return a trial's record, or None if the trial is corrupt. `files`: path below trials/ -> size in bytes."""
        tables = [f"{trial_id}/{name}.parquet" for name in SCHEMAS]
        try:
            name = f"{trial_id}/trial.json"
            if (files.get(name) or 0) > MAX_JSON_BYTES:
                return None
            record = parsed(self.read_file(f"trials/{name}"))
            present = [name for name in SCHEMAS if f"{trial_id}/{name}.parquet" in files]
            is_complete = (
                is_complete_record(record, present)
                and record["trial_id"] == trial_id
                and all(self._is_complete_table(f"trials/{path}", files[path]) for path in tables if path in files)
            )
        except (ValueError, TypeError, KeyError, RecursionError, FileNotFoundError):
            return None
        return record if is_complete else None

    def _is_complete_table(self, name: str, listed_bytes: int | None) -> bool:
        """Check the footer of a Parquet file, or only its listed size in an object store.

        An object store never shows a partial upload, and each read waits for the network.
        """
        if not self.is_local:
            return listed_bytes is None or listed_bytes >= MIN_PARQUET_BYTES
        with self.filesystem.open_input_file(f"{self.root}/{name}") as file:
            return has_parquet_footer(file)

    def has_file(self, name: str) -> bool:
        return bool(self.filesystem.get_file_info(f"{self.root}/{name}").type == fs.FileType.File)

    def read_file(self, name: str) -> bytes:
        """Return the content of a file in the folder. Raises the file system's errors."""
        with self.filesystem.open_input_file(f"{self.root}/{name}") as file:
            return bytes(file.read())

    def replace_file(self, name: str, content: bytes) -> None:
        """Write a file atomically: a reader sees the complete old or new file. Its parent folder must exist.

        A local file is written elsewhere and renamed. An object store shows an upload when it is complete.
        """
        if self.is_local:
            replace_file(Path(self.root), name, content)
        else:
            self._put(f"{self.root}/{name}", content)

    def _put_study(self, content: bytes, exists: bool) -> bool:
        """Replace study.json, or create it unless another run has done so meanwhile. Return False if it has."""
        if exists or not self.is_local:
            self.replace_file("study.json", content)
            return True
        return create_file(Path(self.root), "study.json", content)

    def _put(self, path: str, content: bytes) -> None:
        with self.filesystem.open_output_stream(path) as file:
            file.write(content)

    def _save_remote(self, trial_id: str, files: Mapping[str, bytes]) -> None:
        folder = f"{self.root}/trials/{trial_id}"
        marker = f"{folder}/trial.json"
        if self.filesystem.get_file_info(marker).type == fs.FileType.File:
            self.filesystem.delete_file(marker)
        if self.filesystem.get_file_info(folder).type == fs.FileType.Directory:
            self.filesystem.delete_dir_contents(folder)
        for parent in dict.fromkeys(f"{folder}/{name}".rpartition("/")[0] for name in files):
            self.filesystem.create_dir(parent, recursive=True)
        for name, content in files.items():  # trial.json comes last
            self._put(f"{folder}/{name}", content)


def refuse_other_study(out: str, stored_name: str, name: str) -> None:
    """Raise StoreError if the folder `out` belongs to study `stored_name` rather than `name`."""
    if stored_name != name:
        raise StoreError(
            f"{out} has results of study {stored_name!r}, not {name!r}; choose another --out, "
            f"or run study {stored_name!r}"
        )


def _local_root(out: str) -> str:
    """Return the absolute path of a local results folder. Raises StoreError if a link in it points outside."""
    root = os.path.abspath(out)
    if encodable(root) != root:  # a working directory may have such a name
        raise StoreError(f"{encodable(root)} is not UTF-8; fix: rename the folder, or choose another --out")
    with store_errors(f"{out} cannot be used"):
        link = symlink_outside(root)
    if link is not None:
        raise StoreError(f"{link} points outside of {out}; replace the link by its target, or choose another --out")
    return root


@contextmanager
def store_errors(context: str) -> Iterator[None]:
    """Convert errors of the file system to a StoreError: `context`, then the error in one line."""
    try:
        yield
    except (OSError, UnicodeError, pa.ArrowException) as error:
        raise StoreError(f"{context}: {one_line(error)}") from error
