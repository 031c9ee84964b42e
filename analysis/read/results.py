"""Read a results folder, packed or with a folder per trial, into data frames.

The frames have one row per trial, one row per rank, window and step, and the measurements of communication. The folder
may be a local path or any URI that `pyarrow.fs` supports, such as `s3://bucket/study`.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs
from pandas.api.types import union_categoricals
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from analysis.read.errors import RESTORE, RUN_AGAIN, ResultsError, line
from analysis.read.fields import Fields, fields_of
from analysis.read.links import symlink_outside
from analysis.read.own_code import COMMAND_COLUMN, finish_columns, is_own_code, trial_columns
from analysis.read.packed import TRIALS, PackedTrial, is_packed, read_trials, total_rows
from analysis.read.parquet import dataset_of, frame_of, portions, read_portion
from analysis.read.reduce import windows
from analysis.read.schema import REQUIRED, SCHEMA_VERSION, frame_schema
from analysis.read.step_losses import step_losses
from analysis.read.step_shape import step_shapes

OUTCOME_COLUMNS = (
    "trial_id", "status", "reason", "worker_group", "started_at", "duration_s", "device_name", "hosts", "environment",
    "log", "trace_paths", COMMAND_COLUMN,
)  # fmt: skip
"""Columns of `Results.trials` that describe the outcome of a trial. All other columns are fields of the trial."""

_TRACE = re.compile(r"(.*)/traces/rank(\d+)\.json\.gz")


@dataclass(frozen=True)
class Results:
    """The measurements of a study.

    study: content of study.json. fields: its description of the fields of trials.
    trials: one row per trial, with the trial's fields and `OUTCOME_COLUMNS`.
    steps, buckets, sweep, epochs, collectives: columns of `schema.frame_schema(name)`. Trials without such a file have
    no rows.
    windows, shapes, losses: reduced from all steps by `reduce.windows`, `step_shape.step_shapes` and
    `step_losses.step_losses`. `load_reduced` computes them while reading and keeps only steps with a `last_gradient_s`.
    """

    study: dict[str, Any]
    trials: pd.DataFrame
    steps: pd.DataFrame
    buckets: pd.DataFrame
    sweep: pd.DataFrame
    read_windows: pd.DataFrame | None = None
    read_shapes: pd.DataFrame | None = None
    read_losses: pd.DataFrame | None = None
    epochs: pd.DataFrame = field(default_factory=lambda: frame_of(None, frame_schema("epochs")))
    collectives: pd.DataFrame = field(default_factory=lambda: frame_of(None, frame_schema("collectives")))

    @cached_property
    def fields(self) -> Fields:
        return fields_of(self.study)

    @cached_property
    def windows(self) -> pd.DataFrame:
        return windows(self.steps) if self.read_windows is None else self.read_windows

    @cached_property
    def shapes(self) -> pd.DataFrame:
        return step_shapes(self.steps) if self.read_shapes is None else self.read_shapes

    @cached_property
    def losses(self) -> pd.DataFrame:
        return step_losses(self.steps) if self.read_losses is None else self.read_losses


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Fields(_Part):
    """Fields of a trial that the analysis requires. All other fields are passed through."""

    world_size: PositiveInt
    nodes: PositiveInt
    batch_per_gpu: PositiveInt
    device: str

    __pydantic_extra__: dict[str, str | int | float | bool | None]


class _Node(_Part):
    node_id: str | None = None
    gpus: list[dict[str, Any]] | None = None


class _Rank(_Part):
    node_id: str | None = None
    gpu_uuid: str | None = None


class _Environment(_Part):
    nodes: list[_Node] = []
    ranks: list[_Rank] = []
    versions: dict[str, Any] | None = None
    variables: dict[str, Any] | None = None
    git: dict[str, Any] | None = None


class _TrialFile(BaseModel):
    """The part of trial.json that the analysis reads."""

    model_config = ConfigDict(extra="ignore")

    schema_version: int
    trial_id: str
    trial: _Fields
    status: str
    reason: str | None = None
    worker_group: str | None = None
    started_at: float | None = None
    duration_s: float | None = None
    environment: _Environment
    log: str | None = None


def filesystem(directory: str | os.PathLike[str]) -> tuple[pafs.FileSystem, str]:
    """Return the file system of a path or URI, and the path in it. Raises ResultsError if the address is invalid."""
    text = os.fspath(directory)
    if not text.strip():
        raise ResultsError(f"{text!r} is not a path; give a folder or a URI")
    if "://" not in text:
        return pafs.LocalFileSystem(), os.path.abspath(text)
    try:
        return pafs.FileSystem.from_uri(text)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ResultsError(
            f"{text}: no file system supports this address ({line(error)}); give a folder or a URI"
        ) from None


def nothing_timed(trials: pd.DataFrame) -> str:
    """Return why these trials have no step times, and the fix."""
    done = int((trials["status"] == "done").sum())
    if not done:
        return "no trial is done; run the study first"
    subject = f"all {done} done trials train" if done > 1 else "the only done trial trains"
    return f"{subject} to an accuracy, so no step is timed; give the folder of a timed study, such as `run default`"


def load(directory: str | os.PathLike[str]) -> Results:
    """Read study.json and all finished trials below `directory`.

    Trial folders without trial.json are incomplete and skipped. Raises ResultsError if study.json is missing or a file
    is corrupt.
    """
    folder = _open(directory)
    steps, buckets, sweep = (folder.frame(name) for name in ("steps", "buckets", "sweep"))
    epochs, collectives = folder.frame("epochs"), folder.frame("collectives")
    return Results(folder.study, folder.trials, steps, buckets, sweep, epochs=epochs, collectives=collectives)


def load_reduced(directory: str | os.PathLike[str]) -> Results:
    """Read what a report needs: as `load`, but keep only the steps with a `last_gradient_s`.

    Steps are read and reduced in portions of `parquet.ROWS_AT_ONCE` rows, so a study may be larger than memory.
    """
    folder = _open(directory)
    steps = folder.dataset("steps", _REDUCED_SCHEMA)
    with ThreadPoolExecutor(_READERS) as pool:
        parts = list(pool.map(_reduced, portions(steps))) or [_reduced([])]
    gradient_steps, window_rows, shapes, losses = (_joined(frames) for frames in zip(*parts, strict=True))
    tables = {name: folder.frame(name) for name in ("buckets", "sweep", "epochs", "collectives")}
    return Results(
        folder.study,
        folder.trials,
        gradient_steps,
        read_windows=window_rows,
        read_shapes=shapes,
        read_losses=losses,
        **tables,
    )


def _reduced(files: Sequence[ds.Fragment]) -> tuple[pd.DataFrame, ...]:
    """Return the steps with a `last_gradient_s`, the windows, shapes and losses of the trials in these files."""
    steps = read_portion(files, _REDUCED_SCHEMA) if files else _REDUCED_SCHEMA.empty_table().to_pandas()
    gradient_steps = steps.loc[steps["last_gradient_s"].notna(), [*_STEP, "step_s", "last_gradient_s"]]
    gradient_steps = gradient_steps.astype({"trial_id": "str", "window": "str"})
    return gradient_steps, windows(steps), step_shapes(steps), step_losses(steps)


def _joined(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate frames of different trials. A categorical trial_id stays categorical."""
    if isinstance(frames[0]["trial_id"].dtype, pd.CategoricalDtype):
        categories = union_categoricals([frame["trial_id"] for frame in frames]).categories
        frames = [frame.assign(trial_id=frame["trial_id"].cat.set_categories(categories)) for frame in frames]
    return pd.concat(frames, ignore_index=True)


_READERS = 2
_STEP = ("trial_id", "rank", "window", "step")
_REDUCED_SCHEMA = pa.schema([column for column in frame_schema("steps") if column.name != "host_load_s"])
"""Columns of steps from which windows, shapes, losses and the communication breakdown are computed."""


@dataclass(frozen=True)
class _Folder:
    """A results folder whose JSON has been read: the trials, and the locations of their tables."""

    system: pafs.FileSystem
    root: str
    study: dict[str, Any]
    trials: pd.DataFrame
    folders: Sequence[str]
    paths: Collection[str]
    packed: Sequence[PackedTrial] | None = None

    def dataset(self, name: str, schema: pa.Schema) -> ds.Dataset | None:
        """Open a table of all trials. None if no trial has it. Raises ResultsError if a file is damaged."""
        if self.packed is not None:
            return self._packed_dataset(name, schema, total_rows(self.packed, name))
        present = [path for folder in self.folders if (path := f"{folder}/{name}.parquet") in self.paths]
        return dataset_of(self.system, f"{self.root}/trials", present, schema, REQUIRED[name]) if present else None

    def _packed_dataset(self, name: str, schema: pa.Schema, rows: int | None) -> ds.Dataset | None:
        path = f"{self.root}/{name}.parquet"
        if rows is None:
            return None
        if self.system.get_file_info(path).type != pafs.FileType.File:
            raise ResultsError(f"{path}: missing, though {TRIALS} lists {rows} rows; {RESTORE}")
        dataset = dataset_of(self.system, None, [path], schema, REQUIRED[name])
        if (actual := dataset.count_rows()) != rows:
            raise ResultsError(f"{path}: holds {actual} rows, though {TRIALS} lists {rows}; {RESTORE}")
        return dataset

    def frame(self, name: str) -> pd.DataFrame:
        """Read a table of all trials, with the columns of its frame schema."""
        schema = frame_schema(name)
        return frame_of(self.dataset(name, schema), schema)


def _open(directory: str | os.PathLike[str]) -> _Folder:
    system, root = filesystem(directory)
    try:
        if isinstance(system, pafs.LocalFileSystem) and (link := symlink_outside(root)):
            raise ResultsError(f"{link}: leads outside of {root}; replace the link with a copy of its target")
        study = _read_study(system, root)
        if is_packed(system, root):
            return _open_packed(system, root, study)
        listing = system.get_file_info(pafs.FileSelector(f"{root}/trials", recursive=True, allow_not_found=True))
    except (OSError, pa.ArrowException) as error:
        raise ResultsError(f"{root}: cannot be read ({line(error)})") from None
    paths = {info.path for info in listing if info.type == pafs.FileType.File}
    markers = sorted(path for path in paths if path.endswith("/trial.json"))
    with ThreadPoolExecutor(16) as pool:  # remote stores have a high latency but serve many requests at once
        files = list(pool.map(lambda path: _read_trial(system, path), markers))
    folders = [marker.removesuffix("/trial.json") for marker in markers]
    for file, folder in zip(files, folders, strict=True):
        if file.status == "done" and f"{folder}/steps.parquet" not in paths:
            raise ResultsError(f"{folder}/steps.parquet: missing, though trial.json has status done; {RUN_AGAIN}")
    address = os.fspath(directory)
    traces = _trace_paths(paths, lambda path: address.replace(root, path, 1) if "://" in address else path)
    return _Folder(
        system, root, study, _trials(files, [traces.get(folder, ()) for folder in folders], study), folders, paths
    )


def _open_packed(system: pafs.FileSystem, root: str, study: dict[str, Any]) -> _Folder:
    packed = read_trials(system, root)
    path = f"{root}/{TRIALS}"
    files = []
    for trial in packed:
        where = f"{path}: {trial.record['trial_id']}"
        _refuse_other_version(trial.record, where)
        file = _validated(trial.record, where, RESTORE)
        if file.status == "done" and "steps" not in trial.rows:
            raise ResultsError(f"{where}: status is done, but there are no steps; {RESTORE}")
        files.append(file)
    return _Folder(system, root, study, _trials(files, [()] * len(files), study), (), (), packed)


def _trace_paths(paths: Collection[str], address: Callable[[str], str]) -> dict[str, tuple[str, ...]]:
    """Return the profiler traces by trial folder, in rank order, as addresses that `filesystem` accepts."""
    ranked: dict[str, list[tuple[int, str]]] = {}
    for path in paths:
        if match := _TRACE.fullmatch(path):
            ranked.setdefault(match[1], []).append((int(match[2]), address(path)))
    return {folder: tuple(path for _, path in sorted(traces)) for folder, traces in ranked.items()}


def _read_json(system: pafs.FileSystem, path: str, fix: str) -> dict[str, Any]:
    """Read a JSON mapping of the supported schema version. Raises ResultsError, with `fix` if it is damaged."""
    try:
        with system.open_input_stream(path) as stream:
            value = json.loads(stream.read())
    except (ValueError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path}: not valid JSON ({line(error)}); {fix}") from None
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read ({line(error)})") from None
    if not isinstance(value, dict):
        raise ResultsError(f"{path}: must be a mapping, got {type(value).__name__}; {fix}")
    _refuse_other_version(value, path)
    return value


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
    return _read_json(system, path, "restore it from a copy, or run the study into another folder")


def _read_trial(system: pafs.FileSystem, path: str) -> _TrialFile:
    file = _validated(_read_json(system, path, RUN_AGAIN), path, RUN_AGAIN)
    folder = path.split("/")[-2]
    if file.trial_id != folder:
        raise ResultsError(
            f"{path}: trial_id is {file.trial_id!r}, but its folder is {folder!r}; rename or remove the folder"
        )
    return file


def _validated(record: Mapping[str, Any], where: str, fix: str) -> _TrialFile:
    try:
        return _TrialFile.model_validate(record)
    except ValidationError as error:
        problem = error.errors()[0]
        field_name = ".".join(str(part) for part in problem["loc"])
        raise ResultsError(f"{where}: {field_name}: {problem['msg']}; {fix}") from None


def _trials(
    files: Sequence[_TrialFile], trace_paths: Sequence[tuple[str, ...]], study: Mapping[str, Any]
) -> pd.DataFrame:
    rows = []
    declared = fields_of(study) if any(is_own_code(file.trial.model_dump()) for file in files) else Fields({})
    for file, traces in zip(files, trace_paths, strict=True):
        outcome = file.model_dump(exclude={"trial", "schema_version"})
        environment = outcome["environment"]
        hardware = {"device_name": device_name(environment), "hosts": host_names(environment)}
        fields = trial_columns(file.trial.model_dump(), environment["ranks"], declared)
        rows.append(fields | outcome | hardware | {"trace_paths": traces})
    if not rows:
        return pd.DataFrame(columns=list(OUTCOME_COLUMNS))
    frame = finish_columns(pd.DataFrame(rows))
    return frame[[*OUTCOME_COLUMNS, *(name for name in frame.columns if name not in OUTCOME_COLUMNS)]]


def device_name(environment: dict[str, Any]) -> str | None:
    """Return the device of the ranks: GPU names, or CPU models for ranks without a GPU; several joined by " + "."""
    nodes = {node.get("node_id"): node for node in environment.get("nodes", [])}
    gpus = {gpu.get("uuid"): gpu.get("name") for node in nodes.values() for gpu in node.get("gpus") or []}
    names = {
        gpus.get(uuid) or rank.get("device")
        if (uuid := rank.get("gpu_uuid"))
        else nodes.get(rank.get("node_id"), {}).get("cpu_model")
        for rank in environment.get("ranks", [])
    }
    return " + ".join(sorted(str(name) for name in names if name)) or None


def host_names(environment: dict[str, Any]) -> str | None:
    """Return the hosts that ran a rank, sorted and joined by commas."""
    used = {rank.get("node_id") for rank in environment.get("ranks", [])}
    hosts = {
        str(node["host"]) for node in environment.get("nodes", []) if node.get("host") and node.get("node_id") in used
    }
    return ", ".join(sorted(hosts)) or None
