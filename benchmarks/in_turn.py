"""The study's side of `turns.py`: a trial whose plain and phases window run in blocks, in its own warm worker group.

Its workload is the trial's own model and images; at the begin of each step it sees whether a turn ends.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.turns import LEAD_STEPS, Turns
from trainables.data.resident import device_of
from trainables.timing import clock_for
from trainables.trial import Trial
from trainables.workload import Workload, build_workload


def workload_file(folder: Path, steps: int) -> str:
    """A workload FILE.py:NAME for blocks of so many steps, whose turns are in this folder; it is written there."""
    text = "from functools import partial\n\nfrom benchmarks.in_turn import in_turn\n\n"
    (folder / "blocks.py").write_text(f"{text}blocks = partial(in_turn, {str(folder)!r}, {steps})\n")
    return f"{folder / 'blocks.py'}:blocks"


def in_turn(folder: str, steps: int, trial: Trial) -> Workload:
    """The workload of the trial's own model and resident images, whose steps pass through `Blocks`."""
    device = device_of(trial)
    workload = build_workload(trial.but(workload=""), device)
    synchronize = clock_for(device).synchronize
    blocks = Blocks(Path(folder), dist.get_rank(), steps, trial.settling_steps, trial.steps, synchronize)

    def prepare(images: torch.Tensor) -> torch.Tensor:
        blocks()
        return workload.prepare(images)

    return replace(workload, prepare=prepare)


@dataclass
class Blocks:
    """Called at the begin of each step of a trial, times the blocks of its plain and its phases window."""

    folder: Path
    rank: int
    steps: int
    """of a block"""
    settling: int
    """steps of the trial before its plain window"""
    window: int
    """steps of each of the two windows, one more than their blocks have: the last block ends at the begin of a step"""
    synchronize: Callable[[], None]
    turns: Turns | None = None
    seen: int = 0
    begin_s: float = 0.0
    seconds: list[float] = field(default_factory=list)

    def __call__(self) -> None:
        which, at = divmod(self.seen - self.settling, self.window)
        self.seen += 1
        if which not in (0, 1):
            return
        within = at % (LEAD_STEPS + self.steps)
        if within == LEAD_STEPS:
            self.synchronize()
            self.begin_s = time.perf_counter()
        if within:
            return
        self.turns = self.turns or Turns(self.folder / "turns", "A", self.rank)
        if at:
            self.synchronize()
            self.seconds.append(time.perf_counter() - self.begin_s)
            self.turns.end()
        if at < self.window - 1:
            self.turns.begin()
        elif which == 1:
            (self.folder / f"ours-{self.rank}.json").write_text(json.dumps(self.seconds))
