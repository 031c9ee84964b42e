"""Tables about host and GPU: launching work, and copying batches. They are empty without GPUs."""

from dataclasses import replace

from analysis.compare.bottleneck import issue_ratio
from analysis.measure.measures import (
    BUSY,
    HOST_BOUND_LAUNCH_RATIO,
    LAUNCHED,
    LAUNCHES,
    WAITING_BUSY_SHARE,
    cost_of_waiting_s,
)
from analysis.study import Analysis
from analysis.tables.table import N_COLUMN, Column, Table, axis_columns, blocks
from analysis.text import PHASE_LABELS

_WITHOUT_KERNEL_TIME = (
    " If kernel times were not measured, yes: launching takes at least "
    f"{HOST_BOUND_LAUNCH_RATIO:g} of the step, and without synchronization the GPU is idle at the end of more than "
    "half of the steps."
)

_COPY_SETTINGS = {
    "pin_memory": "batches are in page-locked memory, from which the GPU copies without help from the host.",
    "non_blocking": "the host starts the copy and continues.",
    "copy_ahead": "a thread copies the next batches in a stream concurrent with the step.",
}


def host(analysis: Analysis) -> Table:
    """Tabulate host launch time and GPU kernel time of each part of a step, and whether the step is host-bound."""
    configurations = analysis.configurations
    configurations = configurations[configurations["step_launch_s"].notna()]
    frame = configurations.assign(
        issue_ratio=issue_ratio(configurations),
        busy_percent=100 * configurations["busy_fraction"].astype(float),
        previous_percent=100 * configurations["previous_step_done_share"].astype(float),
    )
    unknown = configurations["busy_s"].isna().any()
    axes = axis_columns(analysis)
    parts = [
        Column(
            launch,
            f"{PHASE_LABELS[name]} (ms)",
            "host time to launch this part / GPU time of its kernels.",
            1e3,
            2,
            paired_with=busy,
        )
        for name, launch, busy in zip(LAUNCHED, LAUNCHES, BUSY, strict=True)
    ]
    return Table(
        "Host and GPU: launching and computing a step",
        (
            *axes,
            *parts,
            Column(
                "step_launch_s",
                "all (ms)",
                "the step including its copy / the kernels of all parts.",
                1e3,
                2,
                paired_with="busy_s",
            ),
            Column(
                "issue_ratio",
                "launch / kernels",
                "ratio for the complete step. Above 1 the host is slower: without launch time, and if nothing else "
                "limits the step, it would be at most this many times as fast.",
                decimals=2,
            ),
            Column("step_s", "step (ms)", "plain step, without instrumentation.", 1e3, 2),
            Column(
                "busy_percent",
                "GPU busy (%)",
                "(kernels + copy of the batch) / plain step. The rest is waiting for the host, for a batch, or for "
                "gradients (exposed communication does not count as busy).",
                decimals=0,
            ),
            Column(
                "previous_percent",
                "GPU idle (%)",
                "steps, without synchronization, at whose end the GPU had already finished the step before.",
                decimals=0,
            ),
            Column(
                "host_bound",
                "host-bound",
                "yes: launching a step takes longer than its kernels, and at least 0.75 of the plain step. "
                "Then a larger batch, compilation or CUDA graphs help, and a faster GPU does not. No if the launch "
                f"ends only with the GPU's work, and the GPU is busy for {WAITING_BUSY_SHARE:g} of the step: the host "
                f"then waits for the GPU.{_WITHOUT_KERNEL_TIME if unknown else ''}",
            ),
            N_COLUMN,
        ),
        frame,
        "Each pair: host time to launch a part on an idle GPU / GPU time of its kernels, run back to back, without "
        "communication. If the left one is larger, the GPU waits for the host.",
        blocks=blocks(axes),
    )


def transfer(analysis: Analysis) -> Table:
    """Tabulate the copy of a batch to the GPU, with and without waiting for it, and its effect on the step time."""
    configurations = analysis.configurations
    configurations = configurations[configurations["host_to_device_bytes"].notna()]
    settings = tuple(name for name in _COPY_SETTINGS if name in configurations)
    axes = [
        replace(column, meaning=_COPY_SETTINGS.get(column.name, ""))
        for column in axis_columns(analysis, last=("world_size", *settings))
    ]
    others = [column.name for column in axes if column.name not in settings]
    # A block compares copy settings; if there is only one, it compares numbers of ranks as in other tables.
    varies = any(name in analysis.axes for name in settings)
    block = tuple(name for name in others if varies or name != "world_size")
    frame = configurations.assign(waiting_s=cost_of_waiting_s(configurations)).sort_values(
        [*others, *settings], kind="stable"
    )
    return Table(
        "Copy of the batch to the GPU",
        (
            *axes,
            Column(
                "host_to_device_bytes",
                "batch (MB)",
                "bytes that a rank copies per step, 0 if they were copied ahead; 1 MB = 10⁶ bytes.",
                1e-6,
                2,
            ),
            Column(
                "host_to_device_bytes_per_s",
                "copy (GB/s)",
                "bytes / copy time without waiting; 1 GB = 10⁹ bytes.",
                1e-9,
                1,
            ),
            Column(
                "host_transfer_s",
                "host in the call (ms)",
                "how long the copy occupies the host: its call, and the wait on the right.",
                1e3,
                2,
                paired_with="synced_host_transfer_s",
            ),
            Column(
                "host_to_device_s",
                "copy (ms)",
                "by the GPU clock, from the end of the step before or the arrival of the batch.",
                1e3,
                2,
                paired_with="synced_host_to_device_s",
            ),
            Column("forward_s", "forward (ms)", "by the GPU clock.", 1e3, 2, paired_with="synced_forward_s"),
            Column(
                "phases_step_s", "step (ms)", "both with the same instrumentation.", 1e3, 2, paired_with="synced_step_s"
            ),
            Column(
                "waiting_s",
                "cost of waiting (ms)",
                "step with waiting - step without, both without their wait for a batch: the time that asynchronous "
                "copies hide, including the lead of the host that waiting gives up.",
                1e3,
                2,
            ),
            N_COLUMN,
        ),
        frame,
        "Each pair: the host continues while the batch is copied / the host waits for the copy. Time that nobody "
        "waits for does not disappear. With pinned memory and non-blocking copies, the host continues at once and "
        "the copy overlaps with launching the forward pass, so waiting costs time. From pageable memory the call "
        "itself copies, whatever non_blocking is: the host time in the call is long on both sides, and waiting costs "
        "almost nothing. If the copy is shorter on the left but the forward pass is longer, the time has moved to "
        "where the data is first needed.",
        blocks=block,
    )
