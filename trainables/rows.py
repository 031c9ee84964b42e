"""The rows of steps.parquet, from what the steps of a trial left behind on one rank."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trainables.timing import Row, Stepped
from trainables.trial import Trial

Labelled = tuple[str, float | None, Stepped, Callable[[], Row]]
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


def read_numbers(values: list[torch.Tensor]) -> list[float]:
    """Numbers from the device, in one copy."""
    return torch.stack([value.double().reshape(()) for value in values]).cpu().tolist() if values else []
