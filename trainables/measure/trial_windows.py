"""State shared by the windows of a trial: what they run on, and what they have measured so far."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from trainables.measure.communication import BucketRecorder, record_buckets
from trainables.measure.rows import LabelledStep, phase_row
from trainables.measure.windows import phase_window
from trainables.step.context import RankContext, RankSetup
from trainables.step.process import reset_peak_memory
from trainables.step.timing import Clock, Row, Step, StepMarks
from trainables.trial import Trial

MIN_STEPS = 3
CAPTURED_WARMUP = 3
"""untimed replays of a new CUDA graph; the first one uploads it to the device"""


@dataclass
class TrialWindows:
    """State shared by the windows of a trial, and their results."""

    context: RankContext
    setup: RankSetup
    batches: Iterator[Any]
    delivered: list[torch.Tensor]
    """batches produced so far: per loader process, and by the prefetch thread; empty if there are neither"""

    clock: Clock
    trial: Trial
    """The trial; after the warm-up with the number of steps that its windows have."""

    steps: list[LabelledStep] = field(default_factory=list)
    observations: list[Any] = field(default_factory=list)
    device_peaks: list[int] | None = None
    energies: list[Any] = field(default_factory=list)

    def diagnostic_steps(self, maximum: int) -> int:
        """Return the steps of a diagnostic window: fewer than `maximum` if the trial itself has few steps."""
        return min(maximum, max(MIN_STEPS, self.trial.steps))

    def add(
        self, window: str, window_s: float | None, window_marks: list[StepMarks], row: Callable[[StepMarks, Clock], Row]
    ) -> None:
        for marks in window_marks:
            assert marks.output is not None
            self.steps.append(LabelledStep(window, window_s, marks.output, partial(row, marks, self.clock)))

    def add_columns(self, columns: Mapping[int, Row]) -> None:
        """Add columns to steps that have been added, by their number."""
        for number, added in columns.items():
            step = self.steps[number]
            self.steps[number] = step._replace(read_columns=partial(_joined, step.read_columns, added))

    def wrap_model(self, recorder: BucketRecorder | None = None) -> nn.Module:
        """Wrap the model under the trial's parallel strategy, which broadcasts rank 0's weights."""
        context = self.context
        model = context.strategy.wrap_model(
            context.workload.model, context.trial, context.group, compression=recorder is None
        )
        if recorder is not None:
            record_buckets(model, recorder)
        return model

    def warm_up(self, step: Step) -> Step:
        """Run the untimed steps and return the step as the trial executes it, captured if it is a CUDA graph."""
        step_s = self._warm_up(step, self.trial.settling_steps)
        reset_peak_memory(self.context.devices)  # cuDNN's algorithm search uses workspaces that later steps do not need
        if self.trial.captured:
            step = self.context.capture(step, next(self.batches))
            step_s = self._warm_up(step, CAPTURED_WARMUP)
        if self.trial.window_limit_s:
            self.trial = self.context.broadcast(self.trial.shortened(step_s))
        return step

    def _warm_up(self, step: Step, steps: int) -> float:
        """Run at least two untimed steps and return the mean seconds of one in their second half."""
        _, marks = phase_window(step, self.batches, steps, self.clock, self.context.barrier)
        self.add("warmup", None, marks, phase_row)
        half = steps // 2
        return self.clock.seconds(marks[half - 1].end, marks[-1].end) / (steps - half)


def _joined(read_columns: Callable[[], Row], added: Row) -> Row:
    return read_columns() | added
