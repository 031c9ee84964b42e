"""The rows of steps.parquet, from what the steps of a trial left behind on one rank."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from trainables.step.timing import Clock, Row, StepMarks, StepOutput, read_numbers
from trainables.trial import Trial

Labelled = tuple[str, float | None, StepOutput, Callable[[], Row]]
"""window, its seconds, what a step gave, and what reads the step's other columns from its marks"""


def step_rows(labelled: Sequence[Labelled], trial: Trial, rank: int, peaks: Mapping[str, int | None]) -> list[Row]:
    """A row a step: its marks are read now, and steps are numbered in the order in which they ran. `peaks`: the peak memory of
    all windows, by column, in bytes. Loss: null where it is not finite."""
    losses = read_numbers([given.loss for _, _, given, _ in labelled])
    scales: list[Any] = read_numbers([given.loss_scale for _, _, given, _ in labelled if given.loss_scale is not None])
    return [
        {
            "rank": rank,
            "window": window,
            "step": number,
            "samples": trial.samples_per_step,
            "window_s": window_s,
            "loss": loss if math.isfinite(loss) else None,
            **({"loss_scale": scale} if scale is not None else {}),
            **peaks,
            **read(),
        }
        for number, ((window, window_s, _, read), loss, scale) in enumerate(
            zip(labelled, losses, scales or [None] * len(losses), strict=True)
        )
    ]


def busy_row(taken: StepMarks, clock: Clock) -> Row:
    """The columns of one step of `busy_window`: seconds of device work in each part after the copy."""
    row: Row = {}
    unknown = {name for name, _, end in taken.busy if end is None}
    for name, begin, end in taken.busy:
        if name not in unknown | {"host_to_device"}:
            row[f"{name}_s"] = row.get(f"{name}_s", 0.0) + clock.seconds(begin, end)
    return row


def step_row(taken: StepMarks, clock: Clock) -> Row:
    """The columns of one step of `step_window`."""
    return {"step_s": clock.seconds(taken.begin, taken.end)}


def account_row(taken: StepMarks, clock: Clock) -> Row:
    """The columns of one step of `step_window` that knows when its last local gradient was there."""
    return step_row(taken, clock) | {"last_gradient_s": clock.seconds(taken.begin, taken.last_gradient)}


def phase_row(taken: StepMarks, clock: Clock) -> Row:
    """The columns of one step of `phase_window`. Call it when the device has passed all marks."""
    row = _spans(taken, clock)
    row["host_load_s"] = taken.host_load_s
    row["host_transfer_s"] = taken.host_transfer_s
    row["previous_step_done"] = taken.previous_step_done
    return row


def issue_row(taken: StepMarks, clock: Clock) -> Row:
    """The columns of one step of `issue_window`: device spans as in `phase_row`, and `*_launch_s` of the host.

    Of a CUDA graph, also the spans of the parts inside it, which together are `graph_s`.
    """
    row = _spans(taken, clock)
    for (name, _), (first_s, second_s) in zip(taken.parts, pairwise(taken.host_stamps_s), strict=True):
        if name != "host_to_device":
            row[f"{name}_launch_s"] = row.get(f"{name}_launch_s", 0.0) + second_s - first_s
    row["step_launch_s"] = taken.host_stamps_s[-1] - taken.host_stamps_s[0]
    return row | taken.graph_parts


def _spans(taken: StepMarks, clock: Clock) -> Row:
    """Seconds of each part, which add up to `step_s`. Where nothing was copied there is no copy to time: it is null."""
    assert taken.given is not None
    row: Row = {"host_to_device_bytes": taken.given.host_to_device_bytes}
    ends = [mark for _, mark in taken.parts[1:]] + [taken.end]
    for (name, begin), end in zip(taken.parts, ends, strict=True):
        row[f"{name}_s"] = row.get(f"{name}_s", 0.0) + clock.seconds(begin, end)
    row["step_s"] = clock.seconds(taken.begin, taken.end)
    return row
