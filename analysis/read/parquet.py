"""Read the Parquet tables of a results folder in portions, with limits that are checked before anything is read."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as pafs

from analysis.read.errors import RESTORE, RUN_AGAIN, ResultsError, line, printable
from analysis.read.validate.tables import MAX_BYTES_PER_ROW, MAX_OVERHEAD_BYTES, MAX_TEXT

ROWS_AT_ONCE = 250_000
"""Rows of steps that one reader holds in memory: 22 columns of 8 bytes, and as much again while they are reduced."""


@dataclass(frozen=True)
class TableFile:
    """One Parquet file, or one row group of a packed file.

    trial_id: None if the file holds several trials, with a column trial_id. most_rows: rows that it may have.
    """

    fragment: ds.ParquetFileFragment
    trial_id: str | None
    most_rows: int

    @property
    def fix(self) -> str:
        return RESTORE if self.trial_id is None else RUN_AGAIN

    def refuse(self, reason: str) -> NoReturn:
        """Raise ResultsError with the name of the file, the reason and the fix."""
        raise ResultsError(f"{printable(self.fragment.path)}: {reason}; {self.fix}")

    def rows(self) -> int:
        """Return the number of rows that the file declares. Raises ResultsError if it is damaged."""
        try:
            return int(self.fragment.count_rows())
        except (pa.ArrowException, OSError) as error:
            self.refuse(f"not readable as Parquet ({line(error)})")


def table_file(
    system: pafs.FileSystem, path: str, schema: pa.Schema, required: Sequence[str], trial_id: str | None, most_rows: int
) -> TableFile:
    """Open a file. Raises ResultsError if it is damaged, lacks a required column, or declares to be too large."""
    texts = [column.name for column in schema if pa.types.is_string(column.type)]
    file = TableFile(_format(tuple(texts)).make_fragment(path, system), trial_id, most_rows)
    try:
        present = file.fragment.physical_schema.names
        groups = [file.fragment.metadata.row_group(i) for i in range(file.fragment.metadata.num_row_groups)]
    except (pa.ArrowException, OSError) as error:
        file.refuse(f"not readable as Parquet ({line(error)})")
    if missing := [name for name in required if name not in present]:
        file.refuse(f"missing columns {', '.join(missing)}")
    if repeated := [name for name in schema.names if present.count(name) > 1]:
        file.refuse(f"has several columns {repeated[0]}")
    rows, size_bytes = sum(group.num_rows for group in groups), sum(group.total_byte_size for group in groups)
    if rows > most_rows:
        file.refuse(f"declares {rows} rows; this trial has at most {most_rows}")
    if size_bytes > rows * MAX_BYTES_PER_ROW + MAX_OVERHEAD_BYTES:
        file.refuse(f"declares {size_bytes} bytes before compression, too many for {rows} rows")
    return file


def _format(texts: tuple[str, ...]) -> ds.ParquetFileFormat:
    """Return the format that reads texts as categories, so that a long text is in memory only once."""
    return ds.ParquetFileFormat(dictionary_columns=set(texts))


def _encoded(schema: pa.Schema) -> pa.Schema:
    text = pa.dictionary(pa.int32(), pa.string())
    return pa.schema([(column.name, text if pa.types.is_string(column.type) else column.type) for column in schema])


def portions(files: Iterable[TableFile]) -> Iterator[list[TableFile]]:
    """Yield groups of files of about `ROWS_AT_ONCE` rows. No group splits a trial."""
    portion: list[TableFile] = []
    rows = 0
    for file in files:
        portion.append(file)
        rows += file.rows()
        if rows >= ROWS_AT_ONCE:
            yield portion
            portion, rows = [], 0
    if portion:
        yield portion


def read_portion(files: Sequence[TableFile], schema: pa.Schema) -> tuple[pa.Table, dict[str, str]]:
    """Read these files, with texts as categories. Also return what is wrong with unreadable files, by trial id.

    Raises ResultsError if a packed file is damaged.
    """
    tables: list[pa.Table] = [_encoded(schema).empty_table()]
    damaged: dict[str, str] = {}
    for file in files:
        try:
            tables.append(_read(file, _encoded(schema)))
        except ResultsError as error:
            if file.trial_id is None:
                raise
            damaged[file.trial_id] = str(error)
    return pa.concat_tables(tables).unify_dictionaries(), damaged


def _read(file: TableFile, schema: pa.Schema) -> pa.Table:
    """Read one file and add the trial id. Raises ResultsError if it is damaged or larger than it declares."""
    try:
        table = file.fragment.scanner(schema=schema, use_threads=False).head(file.most_rows + 1)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        file.refuse(f"not readable as Parquet ({line(error)})")
    if len(table) > file.most_rows:
        file.refuse(f"has more than {file.most_rows} rows, the most of this trial")
    if file.trial_id is not None:
        name = pa.DictionaryArray.from_arrays(np.zeros(len(table), dtype=np.int32), [file.trial_id])
        table = table.set_column(table.schema.get_field_index("trial_id"), "trial_id", name)
    for column in schema:
        if pa.types.is_dictionary(column.type):
            lengths = [pc.max(pc.binary_length(chunk.dictionary)).as_py() for chunk in table[column.name].chunks]
            if max((length for length in lengths if length), default=0) > MAX_TEXT:
                file.refuse(f"{column.name} has a text of more than {MAX_TEXT} characters")
    return table.cast(schema)


def categorised(table: pa.Table) -> pd.DataFrame:
    """Return columns that are fast to group by: texts are categories, booleans are numbers."""
    for i, column in enumerate(table.schema):
        if pa.types.is_boolean(column.type):
            table = table.set_column(i, column.name, table[i].cast(pa.int8()))
    return table.to_pandas(split_blocks=True)


def plain_frame(tables: Sequence[pa.Table], schema: pa.Schema) -> pd.DataFrame:
    """Return the rows of these tables with texts as strings."""
    return pa.concat_tables([_encoded(schema).empty_table(), *tables]).cast(schema).to_pandas(split_blocks=True)


def row_groups(file: TableFile) -> Iterator[TableFile]:
    """Yield the row groups of a packed file. Raises ResultsError if they split a trial."""
    last = ""
    for group in file.fragment.split_by_row_group():
        part = TableFile(group, None, file.most_rows)
        ids = (group.row_groups[0].statistics or {}).get("trial_id")
        if part.rows() and (ids is None or ids["min"] <= last):
            file.refuse("row groups split a trial or are out of order")
        last = ids["max"] if ids else last
        yield part
