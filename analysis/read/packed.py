"""The packed form of a results folder: at most seven files for a study of any size. `load` reads both forms.

    DIR/study.json         as in any results folder
    DIR/trials.parquet     one row per trial: its trial.json, its error.log, and the number of rows of each table
    DIR/NAME.parquet       steps, buckets, collectives, sweep or epochs of all trials, with a column trial_id; no row
                           group splits a trial

A folder with trials.parquet is packed. That file is written last, so its presence means that the others are complete.
A column of trials.parquet whose values share one scalar type has that type. All other columns hold JSON text, and null
if a trial lacks the key. Parquet stores equal texts once, so an environment shared by many trials takes no extra space.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from analysis.read.errors import RESTORE, ResultsError, line
from analysis.read.schema import SCHEMAS
from analysis.read.validate.json_file import parsed

TRIALS = "trials.parquet"

MAX_TRIALS, MAX_BYTES = 2**20, 2**29
"""Largest trials.parquet that is read: its rows, and its bytes before compression."""

MAX_CELLS, MAX_TEXT_BYTES = 2**25, 2**30
"""Rows times columns of trials.parquet, and the text of all rows, of which the file holds equal ones once."""

_NESTED = ("trial", "environment")
"""Keys of trial.json whose mappings become one column per key: `trial.model`, `environment.nodes`."""

_REST = "*"
"""Last part of the name of the column with all keys that are not identifiers, as one JSON mapping."""

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_AS_JSON = {b"encoding": b"json"}
_ROWS = {name: f"rows.{name}" for name in SCHEMAS}
_ADDED = {_ROWS["collectives"]}
"""columns that folders packed by earlier versions lack"""

_LOG = "error.log"
_MISSING = object()


@dataclass(frozen=True)
class PackedTrial:
    """One packed trial.

    record: content of trial.json. log: content of error.log; None without one. rows: number of rows by table name.
    """

    record: dict[str, Any]
    log: bytes | None
    rows: Mapping[str, int]


def is_packed(system: pafs.FileSystem, root: str) -> bool:
    return bool(system.get_file_info(f"{root}/{TRIALS}").type == pafs.FileType.File)


def trials_table(trials: Sequence[PackedTrial]) -> pa.Table:
    """Return trials.parquet as a table. `trials_from_table` is its inverse.

    Raises TypeError if a record's trial or environment is not a mapping.
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


def trials_from_table(table: pa.Table) -> list[PackedTrial]:
    """Return the trials of a table made by `trials_table`. Raises ValueError if the table is damaged."""
    required = ("trial_id", "status", _LOG, *(column for column in _ROWS.values() if column not in _ADDED))
    if missing := [name for name in required if name not in table.column_names]:
        raise ValueError(f"missing columns {', '.join(missing)}")
    not_in_record = {_LOG, *_ROWS.values()}
    columns = {
        field.name: _values(field, table[field.name]) for field in table.schema if field.name not in not_in_record
    }
    logs = _plain_values(table[_LOG])
    rows = {name: table[column].to_pylist() for name, column in _ROWS.items() if column in table.column_names}
    trials = []
    for i in range(table.num_rows):
        record = _nested({name: values[i] for name, values in columns.items() if values[i] is not _MISSING})
        counts = {name: count[i] for name, count in rows.items() if count[i] is not None}
        if not all(isinstance(count, int) and count >= 0 for count in counts.values()):
            raise ValueError("a row count is not a non-negative integer")
        if not (logs[i] is None or isinstance(logs[i], bytes)):
            raise ValueError(f"{_LOG} is not binary")
        trials.append(PackedTrial(record, logs[i], counts))
    ids = [trial.record.get("trial_id") for trial in trials]
    if not all(isinstance(trial_id, str) for trial_id in ids) or len(set(ids)) < len(ids):
        raise ValueError("a trial_id is missing or duplicated")
    return trials


def read_trials(system: pafs.FileSystem, root: str) -> list[PackedTrial]:
    """Read DIR/trials.parquet. Raises ResultsError if it is damaged."""
    import pyarrow.parquet as pq

    path = f"{root}/{TRIALS}"
    try:
        with system.open_input_file(path) as file:
            metadata = pq.read_metadata(file)
            size_bytes = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
            if metadata.num_rows > MAX_TRIALS or size_bytes > MAX_BYTES:
                raise ResultsError(
                    f"{path}: declares {metadata.num_rows} trials of {size_bytes} bytes; at most {MAX_TRIALS} and "
                    f"{MAX_BYTES} are read; {RESTORE}"
                )
            if metadata.num_rows * metadata.num_columns > MAX_CELLS:
                raise ResultsError(
                    f"{path}: declares {metadata.num_rows} trials with {metadata.num_columns} columns; at most "
                    f"{MAX_CELLS} values are read; {RESTORE}"
                )
            texts = [column.name for column in metadata.schema.to_arrow_schema() if _is_text(_value_type(column.type))]
            table = pq.read_table(file, read_dictionary=texts)  # equal texts are in memory once
            text_bytes = sum(_text_bytes(table[name]) for name in texts)
            if text_bytes > MAX_TEXT_BYTES:
                raise ResultsError(
                    f"{path}: has {text_bytes} bytes of text in {table.num_rows} trials; at most {MAX_TEXT_BYTES} are "
                    f"read; {RESTORE}"
                )
        return trials_from_table(table)
    except (pa.ArrowException, OSError) as error:
        raise ResultsError(f"{path}: not readable as Parquet ({line(error)}); {RESTORE}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise ResultsError(f"{path}: not a packed study ({line(error)}); {RESTORE}") from None


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record as one value per column of trials.parquet."""
    flat: dict[str, Any] = {}
    for key in _NESTED:
        if not isinstance(record.get(key), dict):
            raise TypeError(f"{key} is not a mapping")
    parts = {"": {key: value for key, value in record.items() if key not in _NESTED}}
    for prefix, part in (parts | {f"{key}.": record[key] for key in _NESTED}).items():
        plain = {key: value for key, value in part.items() if _PLAIN.fullmatch(key)}
        flat |= {prefix + key: value for key, value in plain.items()}
        if len(plain) < len(part):
            flat[prefix + _REST] = {key: value for key, value in part.items() if key not in plain}
    return flat


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `_flat`."""
    record: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {"": record, **{key: {} for key in _NESTED}}
    for column, value in flat.items():
        group, _, key = column.rpartition(".")
        if group not in parts:
            raise ValueError(f"has an unknown column {column!r}")
        if key == _REST:
            if not isinstance(value, dict):
                raise ValueError(f"{column} is not a mapping")
            parts[group].update(value)
        else:
            parts[group][key] = value
    return record | {key: parts[key] for key in _NESTED}


def _type_of(values: Sequence[Any]) -> pa.DataType | None:
    """Return the column type that represents these values exactly. None if only JSON does."""
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
    except UnicodeEncodeError:  # a lone surrogate, which JSON can represent
        return False
    return True


def _values(field: pa.Field, column: pa.ChunkedArray) -> list[Any]:
    if (field.metadata or {}).get(b"encoding") != b"json":
        return _plain_values(column)
    return _plain_values(column, lambda value: _MISSING if value is None else parsed(value))


def _plain_values(column: pa.ChunkedArray, convert: Callable[[Any], Any] = lambda value: value) -> list[Any]:
    """Return the converted values of a column. Equal texts are converted once and share one object."""
    encoded = column if pa.types.is_dictionary(column.type) or not _is_text(column.type) else column.dictionary_encode()
    if not pa.types.is_dictionary(encoded.type):
        return [convert(value) for value in encoded.to_pylist()]
    result: list[Any] = []
    for chunk in encoded.chunks:
        values = [*map(convert, chunk.dictionary.to_pylist()), convert(None)]
        result += [values[-1 if index is None else index] for index in chunk.indices.to_pylist()]
    return result


def _text_bytes(column: pa.ChunkedArray) -> int:
    """Return the bytes of the texts of all rows of a dictionary-encoded column."""
    lengths = (pc.take(pc.binary_length(chunk.dictionary), chunk.indices) for chunk in column.chunks)
    return sum(pc.sum(pc.cast(length, pa.int64())).as_py() or 0 for length in lengths)


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def total_rows(trials: Sequence[PackedTrial], name: str) -> int | None:
    """Return the number of rows of a table over all trials. None if no trial has the table."""
    counts = [trial.rows[name] for trial in trials if name in trial.rows]
    return sum(counts) if counts else None


def trial_portions(trials: Sequence[PackedTrial], name: str, rows_at_once: int) -> Iterator[list[PackedTrial]]:
    """Yield the trials that have a table in portions of at least `rows_at_once` rows, one portion per row group."""
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
