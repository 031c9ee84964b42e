"""Read a results folder, packed or with a folder per trial, into data frames.

The frames have one row per trial, one row per rank, window and step, and the measurements of communication. The folder
may be a local path or any URI that `pyarrow.fs` supports, such as `s3://bucket/study`.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd
import pyarrow as pa
from pandas.api.types import union_categoricals

from analysis.read.errors import ResultsError
from analysis.read.fields import Fields, fields_of
from analysis.read.own_code import COMMAND_COLUMN, finish_columns, trial_columns
from analysis.read.parquet import categorised, plain_frame
from analysis.read.reduce import windows
from analysis.read.schema import SCHEMAS, frame_schema
from analysis.read.step_losses import step_losses
from analysis.read.step_shape import step_shapes
from analysis.read.validate.folder import Folder, filesystem, open_folder
from analysis.read.validate.records import TrialFile

__all__ = ["Results", "ResultsError", "device_name", "filesystem", "host_names", "load", "load_reduced"]

_LOG = logging.getLogger(__name__)

OUTCOME_COLUMNS = (
    "trial_id", "status", "reason", "worker_group", "started_at", "duration_s", "device_name", "hosts", "environment",
    "log", "trace_paths", COMMAND_COLUMN,
)  # fmt: skip
"""Columns of `Results.trials` that describe the outcome of a trial. All other columns are fields of the trial."""


@dataclass(frozen=True)
class Results:
    """The measurements of a study.

    study: content of study.json. fields: its description of the fields of trials.
    trials: one row per trial, with the trial's fields and `OUTCOME_COLUMNS`.
    steps, buckets, sweep, epochs, collectives: columns of `schema.frame_schema(name)`. Trials without such a file have
    no rows.
    windows, shapes, losses: reduced from all steps by `reduce.windows`, `step_shape.step_shapes` and
    `step_losses.step_losses`. `load_reduced` computes them while reading and keeps only steps with a `last_gradient_s`.
    damaged: one line per damaged trial, which is in none of the frames.
    path: that of study.json, for messages.
    """

    study: dict[str, Any]
    trials: pd.DataFrame
    steps: pd.DataFrame
    buckets: pd.DataFrame
    sweep: pd.DataFrame
    read_windows: pd.DataFrame | None = None
    read_shapes: pd.DataFrame | None = None
    read_losses: pd.DataFrame | None = None
    epochs: pd.DataFrame = field(default_factory=lambda: plain_frame([], frame_schema("epochs")))
    collectives: pd.DataFrame = field(default_factory=lambda: plain_frame([], frame_schema("collectives")))
    damaged: tuple[str, ...] = ()
    path: str = "study.json"

    @cached_property
    def fields(self) -> Fields:
        return fields_of(self.study, self.path)

    @cached_property
    def windows(self) -> pd.DataFrame:
        return windows(self.steps) if self.read_windows is None else self.read_windows

    @cached_property
    def shapes(self) -> pd.DataFrame:
        return step_shapes(self.steps) if self.read_shapes is None else self.read_shapes

    @cached_property
    def losses(self) -> pd.DataFrame:
        return step_losses(self.steps) if self.read_losses is None else self.read_losses


UNCOUNTED = "no done trial shows how many samples a step has"
COUNTABLE = "draw batches from a torch DataLoader, or give the model tensors [samples, ...]"
"""Why trials of a script have no throughput, and the fix."""


def nothing_timed(trials: pd.DataFrame) -> str:
    """Return why these trials have no step times, and the fix."""
    done = int((trials["status"] == "done").sum())
    if not done:
        return "no trial is done; run the study first"
    if "epochs" not in trials:  # of a script or train function
        return f"{UNCOUNTED}; fix: {COUNTABLE}"
    subject = f"all {done} done trials train" if done > 1 else "the only done trial trains"
    return f"{subject} to an accuracy, so no step is timed; give the folder of a timed study, such as `run default`"


def load(directory: str | os.PathLike[str]) -> Results:
    """Read study.json and all finished trials below `directory`.

    Trial folders without trial.json are incomplete and skipped. Damaged trials are left out, with a warning each.
    Raises ResultsError if study.json is missing or damaged.
    """
    folder = open_folder(directory)
    return _results(folder, {name: folder.frame(name) for name in SCHEMAS})


def load_reduced(directory: str | os.PathLike[str]) -> Results:
    """Read what a report needs: as `load`, but keep only the steps with a `last_gradient_s`.

    Steps are read and reduced in portions of `parquet.ROWS_AT_ONCE` rows, so a study may be larger than memory.
    """
    folder = open_folder(directory)
    with ThreadPoolExecutor(_READERS) as pool:
        checked = pool.map(lambda files: folder.checked("steps", files, _REDUCED_SCHEMA), folder.portions("steps"))
        parts = [_reduced(frame) for _, frame in checked] or [_reduced(categorised(_REDUCED_SCHEMA.empty_table()))]
    gradient_steps, window_rows, shapes, losses = (_joined(frames) for frames in zip(*parts, strict=True))
    frames = {"steps": gradient_steps} | {name: folder.frame(name) for name in SCHEMAS if name != "steps"}
    return _results(folder, frames | {"read_windows": window_rows, "read_shapes": shapes, "read_losses": losses})


def _results(folder: Folder, frames: Mapping[str, pd.DataFrame]) -> Results:
    """Return the results without the trials that turned out to be damaged, and warn of each."""
    for damaged in folder.damaged.values():
        _LOG.warning("warning: left out: %s", damaged)
    if folder.damaged:
        bad = list(folder.damaged)
        frames = {name: frame[~frame["trial_id"].isin(bad)].reset_index(drop=True) for name, frame in frames.items()}
    good = [file for trial_id, file in folder.files.items() if trial_id not in folder.damaged]
    path = f"{folder.root}/study.json"
    trials = _trials(good, [folder.traces.get(file.trial_id, ()) for file in good], folder.study, path)
    return Results(folder.study, trials, damaged=tuple(folder.damaged.values()), path=path, **frames)


def _reduced(steps: pd.DataFrame) -> tuple[pd.DataFrame, ...]:
    """Return the steps with a `last_gradient_s`, the windows, shapes and losses of these steps."""
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


def _trials(
    files: Sequence[TrialFile], trace_paths: Sequence[tuple[str, ...]], study: Mapping[str, Any], path: str
) -> pd.DataFrame:
    rows = []
    declared = fields_of(study, path) if any(file.is_own_code for file in files) else Fields({})
    for file, traces in zip(files, trace_paths, strict=True):
        outcome = file.model_dump(exclude={"trial", "schema_version", "environment"})
        environment = {"nodes": [], "ranks": []} | file.environment.model_dump(exclude_unset=True)
        outcome["environment"] = environment
        hardware = {"device_name": device_name(environment), "hosts": host_names(environment)}
        fields = trial_columns(file.trial.model_dump(exclude_unset=True), environment["ranks"], declared)
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
