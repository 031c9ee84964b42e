"""Pack a results folder into at most seven files, and unpack it again.

Both read back what they wrote before they remove anything. `analysis/read/packed.py` describes the packed format.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from analysis.read.errors import ResultsError
from analysis.read.packed import TRIALS, PackedTrial, read_trials, trial_portions, trials_table
from analysis.read.parquet import ROWS_AT_ONCE
from analysis.read.schema import SCHEMAS
from study.store.durable import is_plain_name, new_file, remove_empty_partial
from study.store.store import Store, StoreError, store_errors
from study.store.tables import as_schema, parquet_bytes

_PACKED_FILES = ("trial.json", "error.log", *(f"{name}.parquet" for name in SCHEMAS))
_ID = pa.field("trial_id", pa.string(), nullable=False)
_BITS = {pa.float64(): pa.int64()}
"""types to compare as another type of the same width, because NaN is not equal to NaN"""

_ENCODINGS = {
    pa.float64(): ("PLAIN", "BYTE_STREAM_SPLIT"),
    **{integer: ("PLAIN", "DELTA_BINARY_PACKED") for integer in (pa.int32(), pa.int64())},
}
"""Parquet's encodings to try instead of a dictionary: measured times rarely repeat, and losses are 32-bit numbers."""

_COMPRESSION: dict[str, Any] = {"compression": "zstd", "compression_level": 22, "write_statistics": ["trial_id"]}
"""Statistics: readers look up the least and largest trial_id of a row group only; those of other texts take space."""


@dataclass(frozen=True)
class Packing:
    """The result of `pack` or `unpack`. left_out: files that a packed folder cannot contain -> size in bytes."""

    out: str
    trials: int
    left_out: Mapping[str, int]

    @property
    def left_out_line(self) -> str | None:
        """A line about the files left out, or None if there are none."""
        if not self.left_out:
            return None
        traces = sum("/traces/" in name for name in self.left_out)
        others = len(self.left_out) - traces
        kinds = [f"{count} {kind}" for count, kind in ((traces, "profiler traces"), (others, "other files")) if count]
        return f"left out: {' and '.join(kinds)}, {sum(self.left_out.values()) / 1e6:.1f} MB"


def pack(directory: str, out: str | None = None, *, drop_traces: bool = False) -> Packing:
    """Pack the results folder `directory` into the new folder `out`, or in place if `out` is None.

    The packed files are read back and compared before anything is removed. Packing in place removes traces only with
    `drop_traces`, and never files that the store did not write. Raises StoreError.
    """
    source = Store.at(directory)
    if source.is_packed:
        raise StoreError(f"{directory} is already packed")
    records, damaged = source.scan()
    if damaged:
        raise StoreError(
            f"{directory}: damaged trials: {', '.join(damaged)}; run the study again, or remove their folders"
        )
    with store_errors(f"{directory} cannot be read"):
        files = _files(source)
        trials = [_packed_trial(source, record, files) for record in records]
    left_out = {name: size for name, size in files.items() if not _is_packed_file(name)}
    if out is None:
        _refuse_to_lose(directory, left_out, drop_traces)
    target = source if out is None else _new_folder(out)
    with store_errors(f"{target.out} cannot be written"):
        for name in SCHEMAS:
            _pack_table(source, target, name, trials)
        table = _trials_table(trials, directory)
        with _output(target, TRIALS) as sink:
            _write(sink, table.schema, [table])
        if not _contains(target, trials):
            target.filesystem.delete_file(f"{target.root}/{TRIALS}")  # otherwise the folder would count as packed
            raise StoreError(f"{target.address(TRIALS)} differs from what was written; nothing was removed")
        if out is not None:
            target.replace_file("study.json", source.read_file("study.json"))
        else:
            _remove_trials(source, records)
        if isinstance(target.filesystem, fs.LocalFileSystem):
            remove_empty_partial(Path(target.root))
    return Packing(target.out, len(trials), left_out)


def unpack(directory: str, out: str | None = None) -> Packing:
    """Unpack the folder `directory` into the new folder `out`, or in place if `out` is None. Raises StoreError."""
    source = Store.at(directory)
    if not source.is_packed:
        raise StoreError(f"{directory} is not packed: it has no {TRIALS}")
    with store_errors(f"{directory} cannot be read"):
        trials = source.packed_trials()
    for trial in trials:
        if not is_plain_name(trial.record["trial_id"]):
            raise StoreError(f"{directory}: trial {trial.record['trial_id']!r} cannot be a folder name")
    target = source if out is None else _new_folder(out)
    with store_errors(f"{target.out} cannot be written"):
        target.filesystem.create_dir(f"{target.root}/trials", recursive=True)
        tables = {name: _PackedTable(source, name, trials) for name in SCHEMAS}
        for trial in trials:
            trial_id = trial.record["trial_id"]
            files = {
                f"{name}.parquet": parquet_bytes(name, table.of(trial_id))
                for name, table in tables.items()
                if name in trial.rows
            }
            if trial.log is not None:
                files["error.log"] = trial.log
            files["trial.json"] = json.dumps(trial.record, indent=1).encode() + b"\n"
            target.save_files(trial_id, files)
            _check_unpacked(target, trial, tables)
        if out is not None:
            target.replace_file("study.json", source.read_file("study.json"))
        else:
            for name in (
                TRIALS,
                *(f"{name}.parquet" for name in SCHEMAS),
            ):  # readers ignore the others without the first
                if source.has_file(name):
                    source.filesystem.delete_file(f"{source.root}/{name}")
    return Packing(target.out, len(trials), {})


class _PackedTable:
    """A packed table. One row group is in memory at a time."""

    def __init__(self, store: Store, name: str, trials: list[PackedTrial]) -> None:
        self._store, self._name = store, name
        self._rows = {trial.record["trial_id"]: trial.rows.get(name, 0) for trial in trials}
        self._groups = self._read()
        self._group: pa.Table | None = None

    def of(self, trial_id: str) -> pa.Table:
        """Return the rows of a trial, without trial_id. Call it in the order of the trials."""
        import pyarrow.compute as pc

        while True:
            if self._group is not None:
                rows = self._group.filter(pc.equal(self._group["trial_id"], trial_id))
                if len(rows) == self._rows[trial_id]:
                    return rows.drop_columns(["trial_id"])
            self._group = next(self._groups, None)
            if self._group is None:
                path = self._store.address(f"{self._name}.parquet")
                raise StoreError(f"{path}: rows of {trial_id} listed in {TRIALS} are missing; restore it from a copy")

    def _read(self) -> Iterator[pa.Table]:
        import pyarrow.parquet as pq

        if not self._store.has_file(f"{self._name}.parquet"):
            return
        with self._store.filesystem.open_input_file(f"{self._store.root}/{self._name}.parquet") as file:
            parquet = pq.ParquetFile(file)
            if "trial_id" not in parquet.schema_arrow.names:
                path = self._store.address(f"{self._name}.parquet")
                raise StoreError(f"{path} has no trial_id; restore it from a copy")
            for group in range(parquet.num_row_groups):
                yield parquet.read_row_group(group)


def _pack_table(source: Store, target: Store, name: str, trials: list[PackedTrial]) -> None:
    """Write the table of all trials, with complete trials per row group, and compare it with the trials' tables."""
    import pyarrow.parquet as pq

    portions = list(trial_portions(trials, name, ROWS_AT_ONCE))
    if not portions:
        return
    schema = pa.schema([_ID, *SCHEMAS[name]])
    with _output(target, f"{name}.parquet") as sink:
        _write(sink, schema, (_with_ids(source, name, portion) for portion in portions))
    with target.filesystem.open_input_file(f"{target.root}/{name}.parquet") as file:
        parquet = pq.ParquetFile(file)
        same = parquet.num_row_groups == len(portions) and all(
            same_table(parquet.read_row_group(i), _with_ids(source, name, portion))
            for i, portion in enumerate(portions)
        )
    if not same:
        raise StoreError(f"{target.address(f'{name}.parquet')} differs from what was written; nothing was removed")


def _with_ids(source: Store, name: str, portion: list[PackedTrial]) -> pa.Table:
    parts = []
    for trial in portion:
        trial_id = trial.record["trial_id"]
        table = _trial_table(source, name, trial_id)
        parts.append(table.add_column(0, _ID, pa.array([trial_id] * len(table), pa.string())))
    return pa.concat_tables(parts)


def _trial_table(store: Store, name: str, trial_id: str) -> pa.Table:
    import pyarrow.parquet as pq

    path = f"{store.root}/trials/{trial_id}/{name}.parquet"
    try:
        with store.filesystem.open_input_file(path) as file:
            return as_schema(name, pq.ParquetFile(file).read())
    except ValueError as error:  # includes pyarrow's errors
        raise StoreError(
            f"{path}: {' '.join(str(error).split())}; remove this trial's folder and run the study again"
        ) from None


def _write(sink: Any, schema: pa.Schema, tables: Any) -> None:
    """Write one row group per table. Each column has the encoding in which it is smallest in the first table."""
    import pyarrow.parquet as pq

    tables = iter(tables)
    first = next(tables)
    encodings = _smallest_encodings(first)
    others = [name for name in schema.names if name not in encodings]
    with pq.ParquetWriter(
        sink, schema, **_COMPRESSION, use_dictionary=others, column_encoding=encodings or None
    ) as writer:
        for table in chain([first], tables):
            writer.write_table(table, row_group_size=max(len(table), 1))


def _smallest_encodings(table: pa.Table) -> dict[str, str]:
    """Return numeric column -> Parquet encoding, of the columns that are smaller in it than in a dictionary."""
    import pyarrow.parquet as pq

    def size_bytes(name: str, **encoding: Any) -> int:
        sink = pa.BufferOutputStream()
        pq.write_table(table.select([name]), sink, **_COMPRESSION, **encoding)
        return sink.tell()

    found = {}
    for field in table.schema:
        if field.type not in _ENCODINGS:  # texts stay in a dictionary
            continue
        sizes = {"": size_bytes(field.name)} | {
            encoding: size_bytes(field.name, use_dictionary=False, column_encoding={field.name: encoding})
            for encoding in _ENCODINGS[field.type]
        }
        if smallest := min(sizes, key=lambda encoding: sizes[encoding]):
            found[field.name] = smallest
    return found


def same_table(one: pa.Table, other: pa.Table) -> bool:
    """Compare two tables bit by bit, so that NaN equals NaN."""
    return bool(
        one.schema.equals(other.schema)
        and all(_bits(one[name]).equals(_bits(other[name])) for name in one.column_names)
    )


def _bits(column: pa.ChunkedArray) -> pa.Array:
    array = pa.concat_arrays([*column.chunks, pa.array([], column.type)])
    return array.view(_BITS.get(array.type, array.type))


def _packed_trial(source: Store, record: dict[str, Any], files: Mapping[str, int]) -> PackedTrial:
    import pyarrow.parquet as pq

    trial_id = record["trial_id"]
    rows = {}
    for name in SCHEMAS:
        if f"{trial_id}/{name}.parquet" in files:
            with source.filesystem.open_input_file(f"{source.root}/trials/{trial_id}/{name}.parquet") as file:
                rows[name] = pq.read_metadata(file).num_rows
    log = source.read_file(f"trials/{trial_id}/error.log") if f"{trial_id}/error.log" in files else None
    return PackedTrial(record, log, rows)


def _trials_table(trials: list[PackedTrial], directory: str) -> pa.Table:
    try:
        return trials_table(trials)
    except (ValueError, TypeError) as error:
        raise StoreError(f"{directory}: a trial.json is malformed: {error}") from None


def _contains(store: Store, trials: list[PackedTrial]) -> bool:
    """Read trials.parquet back. Return True if it contains exactly these trials."""
    try:
        packed_trials = read_trials(store.filesystem, store.root)
    except ResultsError:
        return False
    return [_exact(trial) for trial in packed_trials] == [_exact(trial) for trial in trials]


def _exact(trial: PackedTrial) -> tuple[str, bytes | None, dict[str, int]]:
    """Return a trial with its record as JSON text, where 1 differs from 1.0 and NaN equals NaN."""
    return json.dumps(trial.record, sort_keys=True), trial.log, dict(trial.rows)


def _files(store: Store) -> dict[str, int]:
    """Return path below trials/ -> size in bytes, for the files of trials with a trial.json."""
    base = f"{store.root}/trials"
    entries = store.filesystem.get_file_info(fs.FileSelector(base, allow_not_found=True, recursive=True))
    start = base.strip("/") + "/"
    files = {e.path.strip("/").removeprefix(start): e.size or 0 for e in entries if e.type == fs.FileType.File}
    return {name: size for name, size in files.items() if f"{name.partition('/')[0]}/trial.json" in files}


def _is_packed_file(name: str) -> bool:
    return name.partition("/")[2] in _PACKED_FILES


def _refuse_to_lose(directory: str, left_out: Mapping[str, int], drop_traces: bool) -> None:
    others = [name for name in left_out if "/traces/" not in name]
    if others:
        raise StoreError(f"{directory}/trials/{others[0]}: cannot be packed; move the file away, or give DIR2")
    if left_out and not drop_traces:
        raise StoreError(
            f"{directory}: packing in place would remove {len(left_out)} profiler traces "
            f"({sum(left_out.values()) / 1e6:.1f} MB); give DIR2 to keep this folder, or --drop-traces"
        )


def _new_folder(out: str) -> Store:
    """Create a results folder. Raises StoreError if it exists and is not empty."""
    if Store.existing(out) is not None:
        raise StoreError(f"{out} already contains a study; choose another DIR2")
    store = Store.locate(out)
    with store_errors(f"{out} cannot be created"):
        store.filesystem.create_dir(store.root, recursive=True)
    return store


@contextmanager
def _output(store: Store, name: str) -> Iterator[Any]:
    """Open a file of a results folder for writing. Local readers see it when it is complete."""
    if store.is_local:
        with new_file(Path(store.root), name) as sink:
            yield sink
    else:
        with store.filesystem.open_output_stream(f"{store.root}/{name}") as sink:
            yield sink


def _remove_trials(store: Store, records: list[dict[str, Any]]) -> None:
    for record in records:
        store.filesystem.delete_dir(f"{store.root}/trials/{record['trial_id']}")
    remaining = store.filesystem.get_file_info(fs.FileSelector(f"{store.root}/trials", allow_not_found=True))
    if not remaining and store.filesystem.get_file_info(f"{store.root}/trials").type == fs.FileType.Directory:
        store.filesystem.delete_dir(f"{store.root}/trials")


def _check_unpacked(target: Store, trial: PackedTrial, tables: Mapping[str, _PackedTable]) -> None:
    trial_id = trial.record["trial_id"]
    record = json.loads(target.read_file(f"trials/{trial_id}/trial.json"))
    same = json.dumps(record, sort_keys=True) == json.dumps(trial.record, sort_keys=True) and all(
        same_table(_trial_table(target, name, trial_id), as_schema(name, tables[name].of(trial_id)))
        for name in trial.rows
    )
    if not same:
        raise StoreError(f"{target.trial_folder(trial_id)} differs from the packed trial; nothing was removed")
