"""The tables that ranks measure: their columns, their way from the ranks to the store, their files."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

STEPS_SCHEMA = pa.schema(
    [
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("window", pa.string(), nullable=False),
        pa.field("step", pa.int32(), nullable=False),
        pa.field("samples", pa.int32(), nullable=False),
        ("window_s", pa.float64()),
        ("block_s", pa.float64()),
        ("loss", pa.float64()),
        ("load_wait_s", pa.float64()),
        ("host_to_device_s", pa.float64()),
        ("scatter_s", pa.float64()),
        ("replicate_s", pa.float64()),
        ("forward_s", pa.float64()),
        ("gather_s", pa.float64()),
        ("loss_s", pa.float64()),
        ("backward_s", pa.float64()),
        ("reduce_s", pa.float64()),
        ("graph_s", pa.float64()),
        ("optimizer_s", pa.float64()),
        ("step_s", pa.float64()),
        ("host_to_device_bytes", pa.int64()),
        ("host_load_s", pa.float64()),
        ("host_transfer_s", pa.float64()),
        ("previous_step_done", pa.bool_()),
        ("forward_launch_s", pa.float64()),
        ("loss_launch_s", pa.float64()),
        ("backward_launch_s", pa.float64()),
        *((f"{name}_launch_s", pa.float64()) for name in ("scatter", "replicate", "gather", "reduce", "graph")),
        ("optimizer_launch_s", pa.float64()),
        ("step_launch_s", pa.float64()),
        ("loss_scale", pa.float64()),
        ("last_gradient_s", pa.float64()),
        ("peak_memory_bytes", pa.int64()),
        ("peak_reserved_bytes", pa.int64()),
        ("epoch", pa.int32()),
        ("learning_rate", pa.float64()),
    ]
)
"""A row for each rank, window and step. What was not measured is null. `last_gradient_s` counts from the step's begin;
`block_s` is the span of the block of steps that a step is of, where a window could end early. Training to an accuracy is
one window "train" of rank 0, which alone has `epoch` and `learning_rate`."""

BUCKETS_SCHEMA = pa.schema(
    [
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("window", pa.string(), nullable=False),
        pa.field("step", pa.int32(), nullable=False),
        pa.field("bucket", pa.int32(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("ready_s", pa.float64(), nullable=False),
        pa.field("end_s", pa.float64(), nullable=False),
    ]
)
"""A row for each gradient bucket, in the order in which the rank handed them over. Seconds count from the begin of the
rank's own step; `step` and `window` are those of the steps."""

SWEEP_SCHEMA = pa.schema(
    [
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("repetition", pa.int32(), nullable=False),
        pa.field("seconds", pa.float64(), nullable=False),
    ]
)
"""A row for each repetition: seconds of one all-reduce of so many bytes, the mean of some that ran back to back."""

EPOCHS_SCHEMA = pa.schema(
    [
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
        pa.field("samples", pa.int64(), nullable=False),
        *(
            (name, pa.float64())
            for name in (
                "train_s", "validation_s", "train_loss", "train_top1", "train_top5", "validation_loss",
                "validation_top1", "validation_top5", "learning_rate", "noise_trace", "noise_norm2",
            )
        ),
        ("non_finite_steps", pa.int64()),
    ]
)  # fmt: skip
"""A row for each epoch, from all ranks together. `step`, `samples` and `train_s` count from the begin of training, without
validation; `validation_s` is this epoch's; shares lie in 0..1."""

SCHEMAS: Mapping[str, pa.Schema] = {
    "steps": STEPS_SCHEMA,
    "buckets": BUCKETS_SCHEMA,
    "sweep": SWEEP_SCHEMA,
    "epochs": EPOCHS_SCHEMA,
}
"""schema by the table's name; a trial's folder holds each as NAME.parquet"""


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
    """A Parquet file of the schema of that name; columns that `table` lacks become null.

    Raises ValueError for columns that the schema does not know, and for nulls where it allows none.
    """
    import pyarrow.parquet as pq  # a third of the store's import time, and planning never writes

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
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays(columns, schema=schema), sink, compression="zstd")
    return sink.getvalue().to_pybytes()
