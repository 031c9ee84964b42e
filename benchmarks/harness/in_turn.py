"""The study's side of an interleaved comparison: a trial in its own warm group whose windows run in blocks.

The blocks are parts of its plain and phases windows.

Its workload has the trial's own model and images. At the start of each step it checks whether a block ends. The bare
loop runs between blocks, in another process that takes turns (`turns.py`), or in the study's process.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks.harness.bare_loop import timed_s, training
from benchmarks.harness.sides import ddp_options
from benchmarks.harness.turns import LEAD_STEPS, Turns
from trainables.build import build_workload
from trainables.data.loader import device_of
from trainables.measure import windows
from trainables.step.timing import clock_for
from trainables.trial import Trial
from trainables.workload import Workload


def workload_file(folder: Path, steps: int, same_process: bool = False) -> str:
    """Write a workload file for blocks of `steps` steps whose turns are in `folder`. Return it as FILE.py:NAME."""
    text = "from functools import partial\n\nfrom benchmarks.harness.in_turn import in_turn\n\n"
    (folder / "blocks.py").write_text(f"{text}blocks = partial(in_turn, {str(folder)!r}, {steps}, {same_process})\n")
    return f"{folder / 'blocks.py'}:blocks"


def in_turn(folder: str, steps: int, same_process: bool, trial: Trial) -> Workload:
    """Return the trial's own model and resident images as a workload whose steps call `Blocks`."""
    device = device_of(trial)
    workload = build_workload(trial.but(workload=""), device)
    synchronize = clock_for(device).synchronize
    rank = dist.get_rank()

    def others() -> Others:
        if same_process:
            return SameProcess(*_bare(trial, device, steps), Path(folder) / f"bare-{rank}.json")
        return Turns(Path(folder) / "turns", "A", rank)

    # On CPU ranks, a plain window in parts would mix its blocks with those of the phases window. The group of this
    # process serves such trials only.
    windows.PLAIN_PARTS = 1
    blocks = Blocks(Path(folder), rank, steps, trial.settling_steps, trial.steps, synchronize, others)

    return Watched(**vars(workload), at_start=blocks)


@dataclass(frozen=True, kw_only=True)
class Watched(Workload):
    """A workload that reports the start of each step.

    It does so outside autocast, whose weight cache would also serve the bare loop.
    """

    at_start: Callable[[], None]

    def select(self, batch: Any) -> tuple[Any, Any]:
        self.at_start()
        return super().select(batch)


def _bare(trial: Trial, device: torch.device, steps: int) -> tuple[Callable[[], None], Callable[[], float]]:
    """Return a step of the bare loop of the same trial, warmed up, and a function that times a block of steps."""
    group = dist.new_group(backend="nccl" if trial.device == "cuda" else "gloo")
    fields = trial.model_dump(include={"model", "precision", "image_size"})
    step = training(fields | {"batch": trial.batch_per_gpu, "ddp": ddp_options(trial)}, device, group)
    for _ in range(trial.warmup_steps):
        step()
    return step, lambda: timed_s(step, steps, device, group)


class Others(Protocol):
    """The other side, which runs between the blocks of the study."""

    def start(self) -> None:
        """Wait until the study may run a block. Called before each block."""

    def end(self) -> None:
        """Called after a block."""


@dataclass
class SameProcess:
    """The bare loop's blocks in the study's process: two after every other block of the study, which gives A B B A."""

    step: Callable[[], None]
    timed: Callable[[], float]
    file: Path
    ended: int = 0
    seconds: list[float] = field(default_factory=list)

    def start(self) -> None: ...

    def end(self) -> None:
        self.ended += 1
        if self.ended % 2 == 0:
            return
        for _ in range(2):
            for _ in range(LEAD_STEPS):
                self.step()
            self.seconds.append(self.timed())
        self.file.write_text(json.dumps(self.seconds))


@dataclass
class Blocks:
    """Time the blocks of a trial's plain and phases windows. Called at the start of each step."""

    folder: Path
    rank: int
    steps: int
    """Steps per block."""
    settling: int
    """Steps of the trial before its plain window."""
    window: int
    """Steps per window, one more than its blocks have, because the last block ends at the start of a step."""
    synchronize: Callable[[], None]
    make_others: Callable[[], Others]
    """Called at the start of the plain window."""

    others: Others | None = None
    seen: int = 0
    started_s: float = 0.0
    seconds: list[float] = field(default_factory=list)

    def __call__(self) -> None:
        which, at = divmod(self.seen - self.settling, self.window)
        self.seen += 1
        if which not in (0, 1):
            return
        within = at % (LEAD_STEPS + self.steps)
        if within == LEAD_STEPS:
            self.synchronize()
            self.started_s = time.perf_counter()
        if within:
            return
        self.others = self.others or self.make_others()
        if at:
            self.synchronize()
            self.seconds.append(time.perf_counter() - self.started_s)
            self.others.end()
        if at < self.window - 1:
            self.others.start()
        elif which == 1:
            (self.folder / f"ours-{self.rank}.json").write_text(json.dumps(self.seconds))
