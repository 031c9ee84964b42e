"""Convert the tables that ranks measure (`analysis/read/schema.py`) to Arrow streams and Parquet files."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from analysis.read.schema import SCHEMAS

_PARQUET_MAGIC = b"PAR1"
_PARQUET_TAIL_BYTES = 8
MIN_PARQUET_BYTES = len(_PARQUET_MAGIC) + _PARQUET_TAIL_BYTES


def packed(name: str, rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Serialize one rank's rows as an Arrow stream. Ray passes bytes on unchanged, but would rebuild a table."""
    table = pa.Table.from_pylist(list(rows), schema=SCHEMAS[name])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def unpacked(streams: Iterable[bytes]) -> pa.Table:
    """Concatenate the rows of all ranks from their Arrow streams."""
    return pa.concat_tables([pa.ipc.open_stream(stream).read_all() for stream in streams])


def parquet_bytes(name: str, table: pa.Table) -> bytes:
    """Encode a table as a Parquet file with the schema `name`. Raises ValueError if the table does not match it."""
    import pyarrow.parquet as pq  # a third of the store's import time; planning never writes

    sink = pa.BufferOutputStream()
    pq.write_table(as_schema(name, table), sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def as_schema(name: str, table: pa.Table) -> pa.Table:
    """Cast a table to the schema `name`. Missing columns become null.

    Raises ValueError for columns that are not in the schema.
    """
    schema = SCHEMAS[name]
    unknown = set(table.column_names) - set(schema.names)
    if unknown:
        raise ValueError(f"table {name!r} has columns that are not in its schema: {', '.join(sorted(unknown))}")
    columns = [
        table[column.name].cast(column.type)
        if column.name in table.column_names
        else pa.nulls(table.num_rows, column.type)
        for column in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def has_parquet_footer(file: pa.NativeFile) -> bool:
    """Return True if a file ends like a Parquet file. The body is not read.

    The last bytes are the length of the footer, as a little-endian 32-bit number, and the magic number
    (https://parquet.apache.org/docs/file-format).
    """
    size = file.size()
    if size < MIN_PARQUET_BYTES:
        return False
    file.seek(size - _PARQUET_TAIL_BYTES)
    tail = file.read(_PARQUET_TAIL_BYTES)
    footer_bytes = int.from_bytes(tail[:4], "little")
    return bool(tail[4:] == _PARQUET_MAGIC and footer_bytes <= size - MIN_PARQUET_BYTES)
