"""The windows of a training loop: what is installed when, and what is known at the end."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import profile, record_function

from trainables.clock import unix_s
from trainables.measure.collectives import BOUNDARY
from trainables.measure.profiler import activities_of
from trainables.probe.counter import StepCounter, clock_of, device_of
from trainables.probe.flops import OperationCounter, why_not_countable
from trainables.probe.gradients import LastGradient, group_size, reduction_times
from trainables.probe.job import MIN_WARMUP_STEPS, ProbeJob, Row
from trainables.probe.rows import (
    computed_samples,
    evaluation_steps,
    launch_times,
    losses,
    micro_batches,
    part_times,
    reasons_for_nulls,
    tokens_of,
    total,
    usual,
)
from trainables.probe.spans import Instruments, Outermost, StepSpans
from trainables.step.timing import Clock, Mark

WATCHED = ("phases", "issue", "communication")
"""windows in which something is noted at the end of each step"""


class Probe:
    """Observe a training loop in this process, from `install` until `on_end` is called in its last step.

    progress: called with the number of steps after each one. on_end: called within the last step's optimizer call, or
    before the next batch of `iterate`. trace_path: the trace is written to this file (gzipped Chrome trace JSON).
    """

    def __init__(
        self,
        job: ProbeJob,
        trace_path: Path,
        progress: Callable[[int], None],
        on_end: Callable[[], None],
    ) -> None:
        self.job = job
        self.trace_path = trace_path
        self.progress = progress
        self.on_end = on_end
        self.counter = StepCounter(self._on_optimizer, self._on_call, self._on_cycle)
        self.clock: Clock | None = None
        self.device = torch.device("cpu")
        self.number = 0
        """complete steps"""

        self.ended = False
        self.uses_loop = False
        self.started_at: float | None = None
        self.nulls: dict[str, str] = {}
        """reason by quantity that could not be measured"""

        self._windows = list(job.windows)
        self._marks: list[Mark] = []
        self._starts: dict[int, Mark] = {}
        self._call_marks: list[Mark] = []
        self._evaluated: dict[Hashable, set[int]] = defaultdict(set)  # steps by module that `eval` was called of
        self._spans: dict[int, StepSpans] = {}
        self._previous_done: dict[int, bool | None] = {}
        self._modules: list[Outermost] = []
        self._last_gradient = LastGradient()
        self._instruments: Instruments | None = None
        self._operations: OperationCounter | None = None
        self._flops: float | None = None
        self._profiler: Any = None
        self._peaks: Row = {}
        self._restore: list[Callable[[], None]] = []
        self._discovery = 0
        self._labels: list[str] = []
        self._owners: list[str] = []
        """per step the window, or that which a lead-in belongs to"""

        self._changes: list[int] = []
        self._plan()
        self._next_change = self._changes[0]

    # -- what happens when

    def _plan(self) -> None:
        """Number the steps of all windows, and list the ends of steps at which something changes."""
        self._labels = [name for name, steps in self._windows for _ in range(steps)]
        self._owners = list(self._labels)
        for number in range(len(self._labels) - 2, -1, -1):
            if self._labels[number] == "lead_in":
                self._owners[number] = self._owners[number + 1]
        self._discovery = self._windows[0][1] - MIN_WARMUP_STEPS + 2
        changes = {self._discovery, self._discovery + 1, self._discovery + 2, len(self._labels)}
        for number in range(1, len(self._labels)):
            if self._labels[number] != self._labels[number - 1] or self._owners[number] in WATCHED:
                changes.add(number)
        self._changes = sorted(changes)

    @property
    def needed_steps(self) -> int:
        """Steps until all windows are complete; more than planned if the optimizers' cycle took long to recognise."""
        return len(self._labels)

    def install(self) -> None:
        """Start to count steps and evaluations."""
        self.counter.install()
        self._watch_evaluation(nn.Module, "eval")
        self._watch_evaluation(torch.inference_mode, "__enter__")

    def _watch_evaluation(self, owner: Any, name: str) -> None:
        """Note the steps in which a function is called that training steps do not call."""
        original = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            self._evaluated[name if owner is torch.inference_mode else id(args[0])].add(self.number)
            return original(*args, **kwargs)

        called._torchdynamo_disable = True  # type: ignore[attr-defined]
        setattr(owner, name, called)
        self._restore.append(partial(setattr, owner, name, original))

    def _watch_overridden_evaluation(self) -> None:
        """Watch the `eval` of modules with one of their own, such as Hugging Face's, which does not call torch's."""
        classes = {cls for root in self._called_modules() for module in root.modules() for cls in type(module).__mro__}
        for cls in classes - {nn.Module}:
            if "eval" in vars(cls):
                self._watch_evaluation(cls, "eval")

    def _called_modules(self, trained: bool = False) -> list[nn.Module]:
        """Return the modules that the loop calls itself, and that still exist; all, or those with gradients."""
        called = [outermost for outermost in self._modules if outermost.trained or not trained]
        return [module for outermost in called if (module := outermost.module()) is not None]

    def remove(self) -> None:
        """Remove everything that is installed. Not from within an optimizer's call."""
        self._stop_instruments()
        self._stop_operations()
        if self._profiler is not None:  # a process that exits with a live profiler may crash
            self._profiler.stop()
            self._profiler = None
        self.counter.remove()
        while self._restore:
            self._restore.pop()()

    # -- steps

    def iterate(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Return an iterator over `loader` of which each iteration is a step. Ends with the last window."""
        self.uses_loop = True
        for batch in loader:
            yield batch
            self.on_step(None)
            if self.ended:
                return

    def _on_optimizer(self, optimizer: Any) -> None:
        if not self.uses_loop:
            self.on_step(optimizer)

    def _on_call(self, optimizer: Any) -> None:
        if not self.uses_loop:
            self._call_marks.append(self._clock(optimizer).mark())

    def _on_cycle(self, period: int) -> None:
        """Count the steps so far. The current call ends a step itself if their number is a multiple of `period`."""
        if self.uses_loop:
            return
        ends = self._call_marks[period - 1 :: period]
        if len(self._call_marks) % period == 0:
            ends = ends[:-1]
        self._marks, self.number = ends, len(ends)
        self._call_marks = []
        late = self.number + 1 - self._discovery  # the modules are found in a step that starts later
        if late > 0:
            self._windows[0] = ("warmup", self._windows[0][1] + late)
            self._plan()
        self._next_change = next(change for change in self._changes if change > self.number)

    def _clock(self, optimizer: Any) -> Clock:
        """Return the clock of the device that the optimizer's parameters are on."""
        if self.clock is None:
            self.device = device_of(optimizer)
            self.clock = clock_of(self.device)
        return self.clock

    def on_step(self, optimizer: Any) -> None:
        """End a step. Outside the windows with instruments this only reads the clock and counts."""
        clock = self.clock or self._clock(optimizer)
        mark = clock.mark()
        self._marks.append(mark)
        self.number += 1
        self.progress(self.number)
        if self.number == self._next_change:
            self._change(mark)

    def _change(self, mark: Mark) -> None:
        """Change the instruments between two steps, of which the first ended at `mark`."""
        number = self.number
        assert self.clock is not None
        if number - self._discovery in (0, 1, 2):
            self._warm_up(number - self._discovery, mark)
        elif self._instruments is not None:
            self._record_step(mark)
        if number == self.needed_steps:
            self._end()
            return
        self._next_change = next(change for change in self._changes if change > number)
        if self._labels[number] != self._labels[number - 1]:
            self._enter(self._labels[number], self._owners[number])
        if self._owners[number] == "issue":
            self.clock.synchronize()
            self._starts[number] = self.clock.mark()
        if self._profiler is not None and self._labels[number] != "lead_in":
            with record_function(BOUNDARY):
                pass

    def _warm_up(self, phase: int, mark: Mark) -> None:
        """Observe two steps of the warm-up: find the modules that the loop calls, then count operations."""
        assert self.clock is not None
        if phase == 0:
            self._instruments = Instruments(self.clock)
            self._modules = self._instruments.discover()
        elif phase == 1:
            self._record_step(mark)
            self._stop_instruments()
            self._watch_overridden_evaluation()
            self._last_gradient.search(self._called_modules())
            if problem := why_not_countable(self.device):
                self.nulls["step_flops"] = problem
            else:
                self._operations = OperationCounter().start()
        elif phase == 2:
            self._stop_operations()
            self._last_gradient.remove()

    def _enter(self, label: str, window: str) -> None:
        """Install what a window needs, in its lead-in step."""
        assert self.clock is not None
        if label != "lead_in":
            if window == "plain":
                self.counter.keep_only_what_counts()
                self.started_at = unix_s()
            return
        self._stop_instruments()
        if window == "plain" and self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif window in ("phases", "issue"):
            self._instruments = Instruments(self.clock)
            self._instruments.install(self._modules)
            self._last_gradient.watch(self._instruments.on_last_gradient)
            self.counter.observer = self._instruments.optimizer_ended
        elif window == "communication":
            self._read_peaks()
            # Shapes give gloo's bytes and the operations of steps that could not be counted. NCCL's kernels have their
            # sizes without them, and recording them made some traced steps 40 % longer.
            record_shapes = self.device.type != "cuda" or self._flops is None
            self._profiler = profile(activities=activities_of(self.device), record_shapes=record_shapes)
            self._profiler.start()

    def _record_step(self, mark: Mark) -> None:
        assert self._instruments is not None
        assert self.clock is not None
        self._instruments.next_step(mark)
        self._spans[self.number - 1] = self._instruments.steps[-1]
        if self.number >= 2:
            self._previous_done[self.number - 1] = self.clock.passed(self._marks[self.number - 2])

    def _stop_instruments(self) -> None:
        if self._instruments is not None:
            self._instruments.remove()
            self._last_gradient.remove()
            self._instruments = None
            self.counter.observer = None

    def _stop_operations(self) -> None:
        if self._operations is not None:
            self._flops = self._operations.stop()
            if self._flops is None:
                self.nulls["step_flops"] = self._operations.problem or "no matrix product, convolution or attention"
            self._operations = None

    def _read_peaks(self) -> None:
        if self.device.type == "cuda" and not self._peaks:
            self._peaks = {
                "peak_memory_bytes": torch.cuda.max_memory_allocated(self.device),
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(self.device),
            }

    def _end(self) -> None:
        """End the last window, write the trace, and hand over."""
        assert self.clock is not None
        self.ended = True
        self._stop_instruments()
        self._read_peaks()
        self.clock.synchronize()
        if self._profiler is not None:
            with record_function(BOUNDARY):
                pass
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self.trace_path))
            self._profiler = None
        self.on_end()

    # -- results

    def rows(self) -> list[Row]:
        """Return one row per complete step, without `window_s`. Waits for the device."""
        if self.clock is None:
            return []
        self.clock.synchronize()
        peaks = self._peaks or {"peak_memory_bytes": None, "peak_reserved_bytes": None}
        size = self._samples()
        rows = []
        for number, end in enumerate(self._marks):
            window = self._labels[number] if number < len(self._labels) else "lead_in"
            start = self._starts.get(number, self._marks[number - 1] if number else None)
            row: Row = {"step_s": None if start is None else self.clock.seconds(start, end)}
            spans = self._spans.get(number)
            if spans is not None and start is not None and window in ("phases", "issue"):
                row = part_times(spans, start, end, self.clock) | {"previous_step_done": self._previous_done[number]}
                row |= launch_times(spans) if window == "issue" else reduction_times(spans, start, self.clock)
            rows.append({"window": window, "step": number, "samples": size, **row, **peaks})
        return rows

    def _observed(self) -> list[StepSpans]:
        """Return what was seen in the steps without an evaluation pass."""
        evaluated = self.evaluated()
        return [spans for number, spans in self._spans.items() if number not in evaluated]

    def _samples(self) -> int | None:
        """Return the samples per step: from the batches of DataLoaders, otherwise from the model's inputs.

        Some loaders return the batch of all ranks, of which each rank takes its part (Accelerate's `split_batches`).
        """
        observed = self._observed()
        loaded = usual([total(step.loader_samples) for step in observed])
        computed = computed_samples(observed)
        return computed if loaded is None or (computed is not None and loaded == group_size() * computed) else loaded

    def _micro_batches(self, observed: list[StepSpans], batch: int | None) -> int | None:
        """Return the batches per step. A loader may return batches that the model sees in parts, and the reverse."""
        loaded = usual([len(step.loader_samples) for step in observed])
        if loaded and computed_samples(observed) != batch:
            return loaded
        return usual([len(micro_batches(step)) for step in observed])

    def evaluated(self) -> set[int]:
        """Return the steps of this rank that contain an evaluation pass."""
        windows = self._labels[: self.number + 1]
        steps, common = evaluation_steps(self._evaluated, windows)
        if not steps and any(
            id(module) in common for root in self._called_modules(trained=True) for module in root.modules()
        ):
            self.nulls["evaluation"] = "most steps put the model in evaluation mode, so evaluation looks like training"
        return steps

    def evidence(self) -> dict[str, Any]:
        """Return the facts of this rank; see `docs/measuring.md`, "Scripts"."""
        observed = self._observed()
        batch = self._samples()
        tokens = usual([tokens_of(step) for step in observed])
        if self.job.tokens_per_sample is not None and batch is not None:
            tokens = batch * self.job.tokens_per_sample
        self.nulls = reasons_for_nulls(observed, batch, tokens) | self.nulls
        phases = [spans for number, spans in self._spans.items() if self._labels[number] == "phases"]
        peak = self._peaks.get("peak_memory_bytes")
        return {
            "entry": "loop" if self.uses_loop else "script",
            "device": str(self.device),
            "threads": torch.get_num_threads(),
            "steps_run": self.number,
            "steps_needed": self.needed_steps,
            "group_size": group_size(),
            "samples_per_step": batch,
            "tokens_per_step": tokens,
            "micro_batches": self._micro_batches(observed, batch),
            "optimizers": self.counter.names,
            "optimizer_calls_per_step": None if self.uses_loop else self.counter.period,
            "modules": [outermost.name for outermost in self._modules],
            "gradient_bytes": self._last_gradient.gradient_bytes or None,
            "step_flops": self._flops,
            "peak_memory_by_device_bytes": None if peak is None else [peak],
            "losses": losses(phases),
            "evaluation_steps": sorted(self.evaluated()),
            "nulls": self.nulls,
        }
