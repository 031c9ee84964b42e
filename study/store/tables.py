"""The tables that ranks measure (`analysis/load/schema.py`): their way from the ranks to the store, and their files."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from analysis.load.schema import SCHEMAS

_PARQUET = b"PAR1"
_PARQUET_TAIL_BYTES = 8
LEAST_PARQUET_BYTES = len(_PARQUET) + _PARQUET_TAIL_BYTES


def packed(name: str, rows: Sequence[Mapping[str, Any]]) -> bytes:
    """One rank's rows as an Arrow stream: bytes pass through the cluster as they are, where a table would be built anew."""
    table = pa.Table.from_pylist(list(rows), schema=SCHEMAS[name])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def unpacked(streams: Iterable[bytes]) -> pa.Table:
    """The rows of all ranks, from what each of them packed."""
    return pa.concat_tables([pa.ipc.open_stream(stream).read_all() for stream in streams])


def parquet_bytes(name: str, table: pa.Table) -> bytes:
    """A Parquet file of the schema of that name; raises what `as_schema` does, and ValueError for nulls where it allows none."""
    import pyarrow.parquet as pq  # a third of the store's import time, and planning never writes

    sink = pa.BufferOutputStream()
    pq.write_table(as_schema(name, table), sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def as_schema(name: str, table: pa.Table) -> pa.Table:
    """The table in the schema of that name; columns that it lacks become null.

    Raises ValueError for columns that the schema does not know.
    """
    schema = SCHEMAS[name]
    unknown = set(table.column_names) - set(schema.names)
    if unknown:
        raise ValueError(f"table {name!r} has columns that its schema does not know: {', '.join(sorted(unknown))}")
    columns = [
        table[column.name].cast(column.type)
        if column.name in table.column_names
        else pa.nulls(table.num_rows, column.type)
        for column in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def has_parquet_footer(file: pa.NativeFile) -> bool:
    """Check the end of a Parquet file. The body is not read.

    The last bytes are the length of the footer, as a little-endian 32-bit number, and the name of the format
    (https://parquet.apache.org/docs/file-format).
    """
    size = file.size()
    if size < LEAST_PARQUET_BYTES:
        return False
    file.seek(size - _PARQUET_TAIL_BYTES)
    tail = file.read(_PARQUET_TAIL_BYTES)
    footer_bytes = int.from_bytes(tail[:4], "little")
    return bool(tail[4:] == _PARQUET and footer_bytes <= size - LEAST_PARQUET_BYTES)
