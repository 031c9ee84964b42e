"""A packed results folder: at most six files for a study of any size, which `load` reads like a folder per trial.

    DIR/study.json         as in any results folder
    DIR/trials.parquet     one row per trial: what trial.json and error.log hold, and how many rows each table has
    DIR/NAME.parquet       steps, buckets, sweep and epochs of all trials, with a column trial_id, whole trials per row group

A folder with trials.parquet is packed. That file is written last, so that the others count only once they are complete.
A column of trials.parquet whose values are all of one scalar type has that type. Any other one holds JSON text, and null
if a trial lacks the key. Parquet stores equal texts once, so that an environment that trials share takes no more room.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from analysis.load.errors import RESTORE, ResultsError, line
from analysis.load.schema import SCHEMAS

TRIALS = "trials.parquet"

_NESTED = ("trial", "environment")
"""Keys of trial.json whose mappings have a column per key: `trial.model`, `environment.nodes`."""

_REST = "*"
"""End of the column with all keys that are no plain names, as one JSON mapping."""

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_AS_JSON = {b"encoding": b"json"}
_ROWS = {name: f"rows.{name}" for name in SCHEMAS}
_LOG = "error.log"
_MISSING = object()


@dataclass(frozen=True)
class PackedTrial:
    """record: the content of trial.json. log: that of error.log, None if there is none. rows: rows by table name."""

    record: dict[str, Any]
    log: bytes | None
    rows: Mapping[str, int]


def is_packed(system: pafs.FileSystem, root: str) -> bool:
    return bool(system.get_file_info(f"{root}/{TRIALS}").type == pafs.FileType.File)


def trials_table(trials: Sequence[PackedTrial]) -> pa.Table:
    """Return trials.parquet as a table. `trials_in` is its inverse.

    Raises TypeError if a record's trial or environment is no mapping.
    """
    flat = [_flat(trial.record) for trial in trials]
    columns: dict[str, pa.Array] = {}
    fields: list[pa.Field] = []
    for name in dict.fromkeys(["trial_id", "status", *(key for record in flat for key in record)]):
        values = [record.get(name, _MISSING) for record in flat]
        kind = None if name.endswith(_REST) else _type_of(values)
        if kind is None:
            columns[name] = pa.array([None if v is _MISSING else json.dumps(v) for v in values], pa.string())
            fields.append(pa.field(name, pa.string(), metadata=_AS_JSON))
        else:
            columns[name] = pa.array(values, kind)
            fields.append(pa.field(name, kind))
    for name, column in _ROWS.items():
        columns[column] = pa.array([trial.rows.get(name) for trial in trials], pa.int64())
        fields.append(pa.field(column, pa.int64()))
    columns[_LOG] = pa.array([trial.log for trial in trials], pa.binary())
    fields.append(pa.field(_LOG, pa.binary()))
    return pa.Table.from_arrays(list(columns.values()), schema=pa.schema(fields))


def trials_in(table: pa.Table) -> list[PackedTrial]:
    """Return the trials of a table made by `trials_table`. Raises ValueError with what is wrong with it."""
    if lacking := [name for name in ("trial_id", "status", _LOG, *_ROWS.values()) if name not in table.column_names]:
        raise ValueError(f"lacks {', '.join(lacking)}")
    own = {_LOG, *_ROWS.values()}
    columns = {field.name: _values(field, table[field.name]) for field in table.schema if field.name not in own}
    logs = table[_LOG].to_pylist()
    rows = {name: table[column].to_pylist() for name, column in _ROWS.items()}
    found = []
    for i in range(table.num_rows):
        record = _nested({name: values[i] for name, values in columns.items() if values[i] is not _MISSING})
        counts = {name: count[i] for name, count in rows.items() if count[i] is not None}
        if not all(isinstance(count, int) and count >= 0 for count in counts.values()):
            raise ValueError("a number of rows is no natural number")
        if not (logs[i] is None or isinstance(logs[i], bytes)):
            raise ValueError(f"{_LOG} is not binary")
        found.append(PackedTrial(record, logs[i], counts))
    ids = [trial.record.get("trial_id") for trial in found]
    if not all(isinstance(trial_id, str) for trial_id in ids) or len(set(ids)) < len(ids):
        raise ValueError("a trial_id is missing, or there twice")
    return found


def read_trials(system: pafs.FileSystem, root: str) -> list[PackedTrial]:
    """Read DIR/trials.parquet. Raises ResultsError if it is damaged."""
    import pyarrow.parquet as pq

    path = f"{root}/{TRIALS}"
    try:
        with system.open_input_file(path) as file:
            table = pq.read_table(file)
        return trials_in(table)
    except (pa.ArrowException, OSError) as error:
        raise ResultsError(f"{path}: not readable as Parquet ({line(error)}); {RESTORE}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise ResultsError(f"{path}: not a packed study ({line(error)}); {RESTORE}") from None


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with a key per column."""
    flat: dict[str, Any] = {}
    for key in _NESTED:
        if not isinstance(record.get(key), dict):
            raise TypeError(f"{key} is no mapping")
    parts = {"": {key: value for key, value in record.items() if key not in _NESTED}}
    for prefix, part in (parts | {f"{key}.": record[key] for key in _NESTED}).items():
        plain = {key: value for key, value in part.items() if _PLAIN.fullmatch(key)}
        flat |= {prefix + key: value for key, value in plain.items()}
        if len(plain) < len(part):
            flat[prefix + _REST] = {key: value for key, value in part.items() if key not in plain}
    return flat


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The record of which `_flat` made this."""
    record: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {"": record, **{key: {} for key in _NESTED}}
    for column, value in flat.items():
        group, _, key = column.rpartition(".")
        if group not in parts:
            raise ValueError(f"has an unknown column {column!r}")
        if key == _REST:
            if not isinstance(value, dict):
                raise ValueError(f"{column} is no mapping")
            parts[group].update(value)
        else:
            parts[group][key] = value
    return record | {key: parts[key] for key in _NESTED}


def _type_of(values: Sequence[Any]) -> pa.DataType | None:
    """The type of a column that holds these values exactly; None if only JSON does."""
    kinds = {type(value) for value in values} - {type(None)}
    if len(kinds) > 1 or any(value is _MISSING for value in values):
        return None
    kind = kinds.pop() if kinds else str
    known = [value for value in values if value is not None]
    if kind is bool:
        return pa.bool_()
    if kind is int and all(-(2**63) <= value < 2**63 for value in known):
        return pa.int64()
    if kind is float and all(map(math.isfinite, known)):
        return pa.float64()
    if kind is str and all(value.isascii() or _is_utf8(value) for value in known):
        return pa.string()
    return None


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold
        return False
    return True


def _values(field: pa.Field, column: pa.ChunkedArray) -> list[Any]:
    values = column.to_pylist()
    if (field.metadata or {}).get(b"encoding") != b"json":
        return values
    return [_MISSING if value is None else json.loads(value) for value in values]


def listed_rows(trials: Sequence[PackedTrial], name: str) -> int | None:
    """Rows that a table has in all trials together; None if no trial has the table."""
    counts = [trial.rows[name] for trial in trials if name in trial.rows]
    return sum(counts) if counts else None


def whole_trials(trials: Sequence[PackedTrial], name: str, rows_at_once: int) -> Iterator[list[PackedTrial]]:
    """Yield the trials that have a table, in portions of at least so many rows: the row groups of the packed table."""
    portion: list[PackedTrial] = []
    rows = 0
    for trial in trials:
        if name in trial.rows:
            portion.append(trial)
            rows += trial.rows[name]
            if rows >= rows_at_once:
                yield portion
                portion, rows = [], 0
    if portion:
        yield portion
