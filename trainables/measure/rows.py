"""Build the rows of steps.parquet from the marks and outputs of a rank's steps."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from trainables.step.timing import Clock, Row, StepMarks, StepOutput, read_numbers
from trainables.trial import Trial


class LabelledStep(NamedTuple):
    """A step of a window, and the function that reads its further columns from its marks."""

    window: str
    window_s: float | None
    output: StepOutput
    read_columns: Callable[[], Row]


def step_rows(steps: Sequence[LabelledStep], trial: Trial, rank: int, peaks: Mapping[str, int | None]) -> list[Row]:
    """Return one row per step, numbered in execution order. Reads all marks, so the device must have passed them.

    `peaks`: columns of peak memory over all windows, in bytes. The loss is None if it is not finite.
    """
    losses = read_numbers([step.output.loss for step in steps])
    scales: list[Any] = read_numbers([step.output.loss_scale for step in steps if step.output.loss_scale is not None])
    return [
        {
            "rank": rank,
            "window": step.window,
            "step": number,
            "samples": trial.samples_per_step,
            "window_s": step.window_s,
            "loss": loss if math.isfinite(loss) else None,
            **({"loss_scale": scale} if scale is not None else {}),
            **peaks,
            **step.read_columns(),
        }
        for number, (step, loss, scale) in enumerate(zip(steps, losses, scales or [None] * len(losses), strict=True))
    ]


def busy_row(marks: StepMarks, clock: Clock) -> Row:
    """Return the columns of a step of `busy_window`: seconds of device work per part after the copy."""
    row: Row = {}
    unknown = {name for name, _, end in marks.busy if end is None}
    for name, start, end in marks.busy:
        if name not in unknown | {"host_to_device"}:
            row[f"{name}_s"] = row.get(f"{name}_s", 0.0) + clock.seconds(start, end)
    return row


def step_row(marks: StepMarks, clock: Clock) -> Row:
    """Return the columns of a step of `step_window`."""
    return {"step_s": clock.seconds(marks.start, marks.end)}


def communication_row(marks: StepMarks, clock: Clock) -> Row:
    """Return the columns of a step of `step_window` with a mark of its last local gradient."""
    return step_row(marks, clock) | {"last_gradient_s": clock.seconds(marks.start, marks.last_gradient)}


def phase_row(marks: StepMarks, clock: Clock) -> Row:
    """Return the columns of a step of `phase_window`."""
    row = _part_times(marks, clock)
    row["host_load_s"] = marks.host_load_s
    row["host_transfer_s"] = marks.host_transfer_s
    row["previous_step_done"] = marks.previous_step_done
    return row


def issue_row(marks: StepMarks, clock: Clock) -> Row:
    """Return the columns of a step of `issue_window`: device times as in `phase_row`, and `*_launch_s` of the host.

    For a CUDA graph, also the times of the parts inside it, which add up to `graph_s`.
    """
    row = _part_times(marks, clock)
    for (name, _), (first_s, second_s) in zip(marks.parts, pairwise(marks.host_stamps_s), strict=True):
        if name != "host_to_device":
            row[f"{name}_launch_s"] = row.get(f"{name}_launch_s", 0.0) + second_s - first_s
    row["step_launch_s"] = marks.host_stamps_s[-1] - marks.host_stamps_s[0]
    return row | marks.graph_parts


def _part_times(marks: StepMarks, clock: Clock) -> Row:
    """Return the seconds of each part, which add up to `step_s`, and the bytes copied (None if there is no copy)."""
    assert marks.output is not None
    row: Row = {"host_to_device_bytes": marks.output.host_to_device_bytes}
    ends = [mark for _, mark in marks.parts[1:]] + [marks.end]
    for (name, start), end in zip(marks.parts, ends, strict=True):
        row[f"{name}_s"] = row.get(f"{name}_s", 0.0) + clock.seconds(start, end)
    row["step_s"] = clock.seconds(marks.start, marks.end)
    return row
