"""The format of a results folder: schema version, statuses, phases, and the columns of its Parquet tables.

Ranks measure these columns, the store writes them, and the analysis reads them. Columns in seconds end in `_s`. Values
that were not measured are null.
"""

from collections.abc import Mapping

import pyarrow as pa

SCHEMA_VERSION = 3
"""Version of study.json, trial.json and the tables."""

STATUSES = ("done", "out_of_memory", "failed", "timeout", "infeasible", "pruned")
"""Possible outcomes of a trial."""

TOO_LARGE = ("out_of_memory", "pruned")
"""Outcomes of trials that exceed the memory; pruned ones did not run, since a smaller one ran out of it."""

PHASES = (
    "load_wait_s", "host_to_device_s", "scatter_s", "replicate_s", "forward_s", "gather_s", "loss_s", "backward_s",
    "reduce_s", "graph_s", "after_backward_s", "optimizer_s", "other_s",
)  # fmt: skip
"""Parts of a step in order; the parts that a step has add up to step_s.

The backward pass contains DDP's overlapped all-reduce. `scatter_s`, `replicate_s` and `gather_s` exist if one process
drives several GPUs, `reduce_s` if gradients are reduced after the backward pass, `graph_s` if everything after the copy
is one CUDA graph, and `after_backward_s` if a user's workload has such a function, for example to clip gradients.
`other_s` is what a user's script does outside of these parts."""

_LAUNCHES = tuple(f"{name.removesuffix('_s')}_launch_s" for name in PHASES[2:-1])

STEPS_SCHEMA = pa.schema(
    [
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("window", pa.string(), nullable=False),
        pa.field("step", pa.int32(), nullable=False),
        ("samples", pa.int32()),
        ("window_s", pa.float64()),
        ("block_s", pa.float64()),
        ("loss", pa.float64()),
        *((name, pa.float64()) for name in PHASES),
        ("step_s", pa.float64()),
        ("host_to_device_bytes", pa.int64()),
        ("host_load_s", pa.float64()),
        ("host_transfer_s", pa.float64()),
        ("previous_step_done", pa.bool_()),
        *((name, pa.float64()) for name in _LAUNCHES),
        ("step_launch_s", pa.float64()),
        ("loss_scale", pa.float64()),
        ("last_gradient_s", pa.float64()),
        ("collectives_s", pa.float64()),
        ("exposed_collectives_s", pa.float64()),
        ("kernels_s", pa.float64()),
        ("peak_memory_bytes", pa.int64()),
        ("peak_reserved_bytes", pa.int64()),
        ("epoch", pa.int32()),
        ("learning_rate", pa.float64()),
    ]
)
"""One row per rank, window and step.

`samples` is null if a user's own code does not show it. `last_gradient_s` counts from the start of the step. `block_s`
is the duration of the block of steps that contains the step, if the window could end early. Training to an accuracy is
one window "train" of rank 0; only that window has `epoch` and `learning_rate`. Of a traced step, `collectives_s` is the
time with a collective in progress, `exposed_collectives_s` its part without computation, and `kernels_s` the time with
computation on the GPU."""

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
"""One row per rank, window, step and gradient bucket, in the order in which the rank passed buckets to the all-reduce.

Seconds count from the start of that rank's step; `step` and `window` refer to the steps table."""

COLLECTIVES_SCHEMA = pa.schema(
    [
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("window", pa.string(), nullable=False),
        pa.field("step", pa.int32(), nullable=False),
        pa.field("operation", pa.string(), nullable=False),
        ("group", pa.string()),
        ("group_size", pa.int32()),
        ("bytes", pa.int64()),
        pa.field("collective", pa.int32(), nullable=False),
        pa.field("start_s", pa.float64(), nullable=False),
        pa.field("end_s", pa.float64(), nullable=False),
        pa.field("hidden_s", pa.float64(), nullable=False),
    ]
)
"""One row per rank, window, step and collective, from a profiler trace: of a user's script, or of a strategy that
communicates not only in DDP's buckets.

`collective` numbers those of a step with equal operation, group and bytes, in the order of issue, so that rows of ranks
match. `group`: name of the process group; null for gloo, whose traces lack it. `bytes`: the larger of input and output
on this rank. Seconds count from the start of that rank's step. `hidden_s`: part of [start, end] in which the device, or
under gloo the host, also computed."""

SWEEP_SCHEMA = pa.schema(
    [
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("repetition", pa.int32(), nullable=False),
        pa.field("seconds", pa.float64(), nullable=False),
    ]
)
"""One row per rank, message size and repetition: mean seconds per all-reduce of `bytes`, over several back to back."""

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
"""One row per epoch, over all ranks.

`step`, `samples` and `train_s` count from the start of training, without validation. `validation_s` is of this epoch.
Accuracies are shares in 0..1."""

SCHEMAS: Mapping[str, pa.Schema] = {
    "steps": STEPS_SCHEMA,
    "buckets": BUCKETS_SCHEMA,
    "collectives": COLLECTIVES_SCHEMA,
    "sweep": SWEEP_SCHEMA,
    "epochs": EPOCHS_SCHEMA,
}
"""Schema by table name. The folder of a trial holds each table as NAME.parquet."""

REQUIRED: Mapping[str, tuple[str, ...]] = {
    "steps": ("rank", "window", "step", "samples", "window_s"),
    "buckets": tuple(BUCKETS_SCHEMA.names),
    "collectives": tuple(COLLECTIVES_SCHEMA.names),
    "sweep": tuple(SWEEP_SCHEMA.names),
    "epochs": ("epoch", "step", "samples", "train_s", "validation_top1"),
}
"""Columns by table name without which the analysis refuses a file; it reads any other missing column as null."""

_NOT_READ = (
    "block_s", "scatter_launch_s", "replicate_launch_s", "gather_launch_s", "reduce_launch_s", "graph_launch_s",
    "epoch", "learning_rate",
)  # fmt: skip


def frame_schema(name: str) -> pa.Schema:
    """Return the columns that the analysis reads from a table: `trial_id`, then those of its schema.

    Unused columns of the steps are left out, because a large study has gigabytes of steps.
    """
    columns = [column for column in SCHEMAS[name] if name != "steps" or column.name not in _NOT_READ]
    return pa.schema([("trial_id", pa.string()), *((column.name, column.type) for column in columns)])
