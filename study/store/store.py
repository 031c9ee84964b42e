"""The results folder: one folder a trial, its `trial.json` last. What is in it is the truth about what has been run.

    DIR/study.json                       name, question, configuration, versions, command
    DIR/trials/<trial_id>/               of these files there are those that the trial brought, and trial.json
        steps.parquet                    a row per rank, window and step
        buckets.parquet                  a row per rank, window, step and gradient bucket
        sweep.parquet                    a row per rank, message size and repetition of the all-reduce sweep
        epochs.parquet                   a row per epoch of a training to an accuracy
        traces/rank<R>.json.gz           a rank's profiler trace, in Chrome's format
        error.log                        tracebacks of the ranks
        trial.json                       the trial's fields, status, reason, environment
    DIR/checkpoints/<trial_id>/          of a training to an accuracy that has not ended (`study/store/checkpoints.py`)
    DIR/trials.parquet, steps.parquet, ...  instead of trials/, if the folder is packed (`study/store/packing.py`)
    DIR/.partial/                        what is being written; that of killed writers is cleared when DIR is opened

`analysis/load/schema.py` has the columns. DIR is a path, or any URI that `pyarrow.fs` knows (s3://, gs://, hdfs://, file://).
"""

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from pyarrow import fs

from analysis.load.errors import ResultsError
from analysis.load.links import leads_outside
from analysis.load.packed import PackedTrial, is_packed, read_trials
from analysis.load.schema import SCHEMA_VERSION, SCHEMAS, STATUSES
from study.errors import USAGE, one_line
from study.options import recorded_fields
from study.store.durable import clear_partial, is_plain_name, replace_file, replace_folder
from study.store.records import is_whole_record, statuses_of
from study.store.redaction import redacted
from study.store.tables import LEAST_PARQUET_BYTES, has_parquet_footer, parquet_bytes
from trainables.trial import Trial


class StoreError(Exception):
    """A results folder cannot be used. One line: which folder, what is wrong, what to do."""

    exit_code = USAGE


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What came of a trial. `log` is the text of all ranks' tracebacks.

    `steps`, `buckets`, `sweep` and `epochs` have the columns of `analysis.load.schema`; None where nothing of the kind was
    measured. `traces` holds the profiler's trace of a rank as gzip'd JSON. `started_at` is in seconds since 1970 (UTC).
    `worker_group` names the warm worker group that ran it; it and `environment` are empty where nothing ran.
    """

    trial: Trial
    status: str
    reason: str = ""
    steps: pa.Table | None = None
    buckets: pa.Table | None = None
    sweep: pa.Table | None = None
    epochs: pa.Table | None = None
    traces: Mapping[int, bytes] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    worker_group: str = ""
    started_at: float
    duration_s: float
    log: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r} is not known; allowed: {', '.join(STATUSES)}")
        if self.status == "done" and self.steps is None:
            raise ValueError("a trial with status 'done' has steps")


@dataclass(frozen=True)
class Store:
    """A results folder. Make one with `Store.open` to write or `Store.at` to read.

    Every method raises StoreError where the folder cannot be read or written.
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
        """Makes the results folder of study `name`, or opens it again: trials are kept, study.json is renewed.

        With `filesystem`, `out` is a path in it. Refuses another study's folder, a folder of something else, and one
        that is corrupt or was written by a newer version.
        """
        store = cls.located(out, filesystem)
        with explained(f"{out} cannot be used"):
            existing = store._read_study()
            if existing is None:
                store._refuse_other_things()
            else:
                refuse_other_study(out, existing["name"], name)
                if store.is_packed:
                    raise StoreError(
                        f"{out} is packed, so that no trial can be added to it: "
                        f"python -m study.scaling unpack {out}, then run the study again"
                    )
            study = {
                "schema_version": SCHEMA_VERSION,
                "name": name,
                "question": question,
                "configuration": dict(configuration),
                "versions": dict(versions),
                "command": command,
                "fields": recorded_fields(),
                **({"notes": existing["notes"]} if existing and "notes" in existing else {}),
            }
            store.filesystem.create_dir(f"{store.root}/trials", recursive=True)
            store.replace_file("study.json", _json_bytes(redacted(study)))
            if store.is_local:
                clear_partial(Path(store.root))
        return store

    @classmethod
    def existing(cls, out: str) -> Self | None:
        """The results that are in `out`; None where nothing is there yet. Changes nothing, and refuses what `open` would."""
        store = cls.located(out, None)
        with explained(f"{out} cannot be used"):
            if store._read_study() is not None:
                return store
            store._refuse_other_things()
        return None

    @classmethod
    def at(cls, out: str, filesystem: fs.FileSystem | None = None) -> Self:
        """The results that are in `out`; changes nothing."""
        store = cls.located(out, filesystem)
        with explained(f"{out} cannot be used"):
            if store._read_study() is None:
                raise StoreError(f"{out} holds no results: there is no study.json in it; give the folder of a study")
        return store

    def study(self) -> dict[str, Any]:
        """The content of study.json."""
        with explained(f"{self.out} cannot be read"):
            study = self._read_study()
        if study is None:
            raise StoreError(f"{self.out} holds no results: its study.json is gone")
        return study

    def records(self) -> list[dict[str, Any]]:
        """The content of every whole trial.json, in the order of trial ids."""
        return self.scan()[0]

    def statuses(self) -> dict[str, str]:
        """Status by trial id. Trials that are half-written or corrupt are missing from it, and so will run again."""
        return statuses_of(self.records())

    def corrupt(self) -> list[str]:
        """Ids of trials whose folder is damaged: trial.json unreadable, or tables of a done trial missing or cut short."""
        return self.scan()[1]

    @property
    def is_packed(self) -> bool:
        """Whether all trials are in a few files (`study/store/packing.py`). No trial can be added to such a folder."""
        return is_packed(self.filesystem, self.root)

    def packed_trials(self) -> list[PackedTrial]:
        """The trials of a packed folder."""
        try:
            with explained(f"{self.out} cannot be read"):
                return read_trials(self.filesystem, self.root)
        except ResultsError as error:
            raise StoreError(str(error)) from error

    def trial_folder(self, trial_id: str) -> str:
        """Where a trial's files are, as a person would name it."""
        return f"{self.out.rstrip('/')}/trials/{trial_id}"

    def save(self, result: TrialResult) -> None:
        """Keeps a trial's result in place of an earlier one. If this is killed, there is all of it or nothing.

        A local folder is written beside and renamed. Elsewhere a rename is no single step: there trial.json, without
        which nothing counts, is removed first and written last.
        """
        trial_id = result.trial.trial_id
        if not is_plain_name(trial_id):
            raise StoreError(
                f"trial {trial_id!r} cannot be a folder's name: a workload's name may hold letters, digits and _"
            )
        tables = {name: table for name in SCHEMAS if (table := getattr(result, name)) is not None}
        files = {f"{name}.parquet": parquet_bytes(name, table) for name, table in tables.items()}
        files |= {f"traces/rank{rank}.json.gz": trace for rank, trace in result.traces.items()}
        if result.log:
            files["error.log"] = redacted(result.log).encode(errors="backslashreplace")
        files["trial.json"] = _json_bytes(redacted(_record(result)))
        with explained(f"trial {trial_id} cannot be saved in {self.out}"):
            self.save_files(trial_id, files)

    def save_files(self, trial_id: str, files: Mapping[str, bytes]) -> None:
        """Makes a trial's folder hold exactly these files, of which trial.json is the last."""
        if self.is_local:
            replace_folder(Path(self.root), trial_id, files)
        else:
            self._save_remote(trial_id, files)

    @classmethod
    def located(cls, out: str, filesystem: fs.FileSystem | None = None) -> Self:
        """The place `out`, whatever is there."""
        if filesystem is not None:
            return cls(out, filesystem, out.strip("/"))
        if not out.strip():
            raise StoreError(f"{out!r} is not a path: give a folder or a URI")
        if "://" not in out:
            return cls(out, fs.LocalFileSystem(), _without_ways_out(out))
        try:
            filesystem, root = fs.FileSystem.from_uri(out)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise StoreError(f"{out} is no place for results ({one_line(error)}): give a folder or a URI") from error
        return cls(out, filesystem, root.rstrip("/"))

    @property
    def is_local(self) -> bool:
        return isinstance(self.filesystem, fs.LocalFileSystem)

    def _read_study(self) -> dict[str, Any] | None:
        """The checked content of study.json; None where there is none."""
        if self.filesystem.get_file_info(f"{self.root}/study.json").type != fs.FileType.File:
            return None
        try:
            study = json.loads(self.read_file("study.json"))
            if not (isinstance(study["name"], str) and isinstance(study["schema_version"], int)):
                raise TypeError("its name or schema_version is of the wrong kind")
        except (ValueError, TypeError, KeyError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else one_line(error)
            raise StoreError(
                f"{self.out}/study.json is corrupt ({what}): restore it from a copy, or choose another --out"
            ) from error
        if (version := study["schema_version"]) != SCHEMA_VERSION:
            age, fix = ("a newer", "update the tool, or ") if version > SCHEMA_VERSION else ("an older", "")
            raise StoreError(
                f"{self.out} was written by {age} version of this tool (schema {version}, this one knows "
                f"{SCHEMA_VERSION}): {fix}choose another --out"
            )
        return dict(study)

    def _refuse_other_things(self) -> None:
        """Hidden entries do not count: a writer killed at the start leaves .partial."""
        info = self.filesystem.get_file_info(self.root)
        if info.type == fs.FileType.File:
            raise StoreError(f"{self.out} is a file: --out needs a folder")
        entries = self.filesystem.get_file_info(fs.FileSelector(self.root, allow_not_found=True))
        if any(not entry.base_name.startswith(".") for entry in entries):
            raise StoreError(
                f"{self.out} is not empty and has no study.json, so it is no results folder: choose another --out"
            )

    def scan(self) -> tuple[list[dict[str, Any]], list[str]]:
        """The records of whole trials, and the ids of corrupt ones."""
        if self.is_packed:
            packed = self.packed_trials()
            whole = {trial.record["trial_id"]: is_whole_record(trial.record, trial.rows) for trial in packed}
            return (
                [trial.record for trial in packed if whole[trial.record["trial_id"]]],
                [trial_id for trial_id, is_whole in whole.items() if not is_whole],
            )
        with explained(f"{self.out} cannot be read"):
            selector = fs.FileSelector(f"{self.root}/trials", allow_not_found=True, recursive=True)
            base = selector.base_dir.strip("/") + "/"
            entries = self.filesystem.get_file_info(selector)
            files = {e.path.strip("/").removeprefix(base): e.size for e in entries if e.type == fs.FileType.File}
            marked = sorted(folder for folder, _, name in (f.partition("/") for f in files) if name == "trial.json")
            with ThreadPoolExecutor(16) as readers:  # each read of an object store waits for the network
                read = list(readers.map(lambda trial_id: self._read_record(trial_id, files), marked))
        records = [record for record in read if record is not None]
        corrupt = [trial_id for trial_id, record in zip(marked, read, strict=True) if record is None]
        return records, corrupt

    def _read_record(self, trial_id: str, files: Mapping[str, int | None]) -> dict[str, Any] | None:
        """A trial's record, or None where it is corrupt. `files`: bytes of each that there is, by its path in trials/."""
        tables = [f"{trial_id}/{name}.parquet" for name in SCHEMAS]
        try:
            record = json.loads(self.read_file(f"trials/{trial_id}/trial.json"))
            present = [name for name in SCHEMAS if f"{trial_id}/{name}.parquet" in files]
            whole = (
                is_whole_record(record, present)
                and record["trial_id"] == trial_id
                and all(self._is_whole(f"trials/{path}", files[path]) for path in tables if path in files)
            )
        except (ValueError, TypeError, KeyError, FileNotFoundError):
            return None
        return record if whole else None

    def _is_whole(self, name: str, listed_bytes: int | None) -> bool:
        """Check the footer of a Parquet file, or only its listed size in an object store.

        An object store shows no half upload, and each look into a file waits for the network.
        """
        if not self.is_local:
            return listed_bytes is None or listed_bytes >= LEAST_PARQUET_BYTES
        with self.filesystem.open_input_file(f"{self.root}/{name}") as file:
            return has_parquet_footer(file)

    def has_file(self, name: str) -> bool:
        return bool(self.filesystem.get_file_info(f"{self.root}/{name}").type == fs.FileType.File)

    def read_file(self, name: str) -> bytes:
        """The content of a file of the folder. Raises what the file system does."""
        with self.filesystem.open_input_file(f"{self.root}/{name}") as file:
            return bytes(file.read())

    def replace_file(self, name: str, content: bytes) -> None:
        """Writes a file of the folder, in a place that is there, so that a reader sees the old or the new one, whole.

        A local file is written beside and renamed; an object store shows an upload once it is complete.
        """
        if self.is_local:
            replace_file(Path(self.root), name, content)
        else:
            self._put(f"{self.root}/{name}", content)

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
        for place in dict.fromkeys(f"{folder}/{name}".rpartition("/")[0] for name in files):
            self.filesystem.create_dir(place, recursive=True)
        for name, content in files.items():  # trial.json is the last one
            self._put(f"{folder}/{name}", content)


def refuse_other_study(out: str, found: str, name: str) -> None:
    """Raises StoreError where the folder `out` of study `found` was asked for study `name`."""
    if found != name:
        raise StoreError(
            f"{out} holds results of study {found!r}, not {name!r}: choose another --out, or run study {found!r}"
        )


def _without_ways_out(out: str) -> str:
    """The absolute path of a local results folder in which no link leads outside."""
    root = os.path.abspath(out)
    with explained(f"{out} cannot be used"):
        link = leads_outside(root)
    if link is not None:
        raise StoreError(
            f"{link} leads outside of {out}: replace the link by what it points to, or choose another --out"
        )
    return root


def _record(result: TrialResult) -> dict[str, Any]:
    """The content of trial.json."""
    return {
        "schema_version": SCHEMA_VERSION,
        "trial_id": result.trial.trial_id,
        "trial": result.trial.model_dump(),
        "status": result.status,
        "reason": result.reason,
        "worker_group": result.worker_group,
        "started_at": result.started_at,
        "duration_s": result.duration_s,
        "environment": dict(result.environment),
        "log": "error.log" if result.log else None,
    }


def _json_bytes(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode() + b"\n"


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns what a file system raises into one line."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"{what}: {one_line(error)}") from error
