"""Tables of what lies between host and GPU: issuing work, and copying batches. Without a GPU there are none."""

from dataclasses import replace

from analysis.compare.bottleneck import issue_ratio
from analysis.measure.measures import BUSY, HOST_BOUND_LAUNCH_RATIO, LAUNCHED, LAUNCHES
from analysis.study import Analysis
from analysis.tables.table import N_COLUMN, Column, Table, axis_columns, blocks
from analysis.text import PHASE_LABELS

_WITHOUT_KERNEL_TIME = (
    " Where the kernels' own time was not measured, yes says that issuing takes at least "
    f"{HOST_BOUND_LAUNCH_RATIO:g} of the step on an idle GPU, and that in free running more than half of the steps found it idle."
)

_HOW_COPIED = {
    "pin_memory": "batches lie in page-locked memory, from which the GPU copies without the host's help.",
    "non_blocking": "the host asks for the copy and goes on.",
    "copy_ahead": "a thread copies batches to come, in a stream beside the step.",
}


def host(analysis: Analysis) -> Table:
    """Host time to issue each part of a step beside the GPU time of its kernels, and whether the host limits the step."""
    found = analysis.configurations
    found = found[found["step_launch_s"].notna()]
    frame = found.assign(
        issue_ratio=issue_ratio(found),
        busy_percent=100 * found["busy_fraction"].astype(float),
        previous_percent=100 * found["previous_step_done_share"].astype(float),
    )
    unknown = found["busy_s"].isna().any()
    axes = axis_columns(analysis)
    parts = [
        Column(
            launch,
            f"{PHASE_LABELS[name]} (ms)",
            "the host's time to issue this part / the GPU's for its kernels.",
            1e3,
            2,
            beside=busy,
        )
        for name, launch, busy in zip(LAUNCHED, LAUNCHES, BUSY, strict=True)
    ]
    return Table(
        "Host and GPU: issuing a step, computing it",
        (
            *axes,
            *parts,
            Column("step_launch_s", "all (ms)", "the step with its copy, and the kernels of all parts.", 1e3, 2, beside="busy_s"),
            Column(
                "issue_ratio",
                "issue / kernels",
                "of all. Above 1 the host is the slower of the two: without its part, a step that nothing else holds back "
                "would be so many times as fast, at most.",
                decimals=2,
                optional=True,
            ),
            Column("step_s", "step (ms)", "the plain step, without instruments.", 1e3, 2),
            Column(
                "busy_percent",
                "GPU busy (%)",
                "(kernels + copy of the batch) / plain step. The rest is waiting: for the host, for a batch, or for gradients "
                "(communication that no computation hides is no part of it).",
                decimals=0,
                optional=True,
            ),
            Column(
                "previous_percent",
                "found idle (%)",
                "steps in free running at whose end the GPU had already finished the step before.",
                decimals=0,
            ),
            Column(
                "host_bound",
                "host-bound",
                "yes: the host needs longer to issue a step than the GPU for its kernels, and for at least 0.75 of the plain step. "
                f"Then a larger batch, compilation or CUDA graphs help, and a faster GPU does not.{_WITHOUT_KERNEL_TIME if unknown else ''}",
            ),
            N_COLUMN,
        ),
        frame,
        "Each pair: milliseconds that the host needs to issue a part onto an idle GPU / that the GPU needs for its kernels, run back "
        "to back, without communication. Where the left one is larger, the GPU waits for the host.",
        blocks=blocks(axes),
    )  # fmt: skip


def transfer(analysis: Analysis) -> Table:
    """The copy of a batch to the GPU, not waited for and waited for: where its time shows in the step."""
    found = analysis.configurations
    found = found[found["host_to_device_bytes"].notna()]
    waiting_s = found["synced_step_s"].astype(float) - found["phases_step_s"].astype(float)
    how = tuple(name for name in _HOW_COPIED if name in found)
    axes = [
        replace(column, meaning=_HOW_COPIED.get(column.name, ""))
        for column in axis_columns(analysis, last=("world_size", *how))
    ]
    others = [column.name for column in axes if column.name not in how]
    # A block compares the ways to copy; where there is one way only, it compares numbers of ranks, as elsewhere.
    several = any(name in analysis.axes for name in how)
    block = tuple(name for name in others if several or name != "world_size")
    frame = found.assign(waiting_s=waiting_s).sort_values([*others, *how], kind="stable")
    return Table(
        "Copy of the batch to the GPU",
        (
            *axes,
            Column("host_to_device_bytes", "batch (MB)", "bytes that a rank copies in a step, 0 where they were copied ahead of it; 1 MB = 10⁶ bytes.", 1e-6, 2),
            Column(
                "host_to_device_bytes_per_s", "copy (GB/s)", "bytes / time of the copy, not waited for; 1 GB = 10⁹ bytes.", 1e-9, 1
            ),
            Column(
                "host_transfer_s",
                "host in the call (ms)",
                "how long the copy keeps the host: its call, and the wait where it waits.",
                1e3,
                2,
                beside="synced_host_transfer_s",
                optional=True,
            ),
            Column(
                "host_to_device_s",
                "copy (ms)",
                "on the GPU's own clock, from where the step before ended or the batch was there.",
                1e3,
                2,
                beside="synced_host_to_device_s",
            ),
            Column("forward_s", "forward (ms)", "on the GPU's own clock.", 1e3, 2, beside="synced_forward_s"),
            Column("phases_step_s", "step (ms)", "both with the same instruments.", 1e3, 2, beside="synced_step_s"),
            Column(
                "waiting_s",
                "waiting costs (ms)",
                "step where the host waits - step where it does not: what asynchronous copies hide, with the lead of the host "
                "that waiting gives away.",
                1e3,
                2,
                optional=True,
            ),
            N_COLUMN,
        ),
        frame,
        "Each pair: the host goes on while the batch is copied / the host waits until it is copied. Time that nobody waits for does "
        "not vanish. Pinned and non-blocking, the host goes on at once, and the copy runs while it issues the forward pass: waiting "
        "then costs time. From pageable memory the call itself copies, whatever non_blocking says: host in the call is long on both "
        "sides, and waiting costs next to nothing. A copy that is shorter on the left with a forward pass that is longer there has "
        "moved its time to where the data is first needed.",
        blocks=block,
    )  # fmt: skip
