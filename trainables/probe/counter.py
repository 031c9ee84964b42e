"""Count training steps from torch's optimizer hooks: the only instrument of the plain window."""

import gc
import sys
from collections.abc import Callable, Hashable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from trainables.step.timing import Clock, CudaClock, clock_for

MOST_CALLS = 24
"""Calls after which a cycle is recognised although some optimizers have not been called."""

NO_BACKWARD_PASS = -1
"""torch's number of the backward pass that this thread executes, if it executes none"""

DEEPSPEED_ENGINE = "deepspeed.runtime.engine"
"""module of DeepSpeed's training loop"""


def period(calls: Sequence[Hashable], optimizers: int) -> int | None:
    """Return the calls per training step, or None if more calls are needed.

    calls: the optimizer of each call so far. optimizers: how many exist. With one optimizer each call is a step. With
    several, a step is the shortest sequence that repeats: (D, G), (D, D, G). It must have been seen twice, with every
    optimizer in it, unless `MOST_CALLS` calls have not shown all of them. Falls back to 1 after twice as many calls
    without a repetition, or twice as many as optimizers exist, because each may have a parameter of its own.
    """
    if optimizers <= 1:
        return 1
    if len(set(calls)) < optimizers and len(calls) < MOST_CALLS:
        return None
    for length in range(1, len(calls) // 2 + 1):
        if all(calls[index] == calls[index - length] for index in range(length, len(calls))):
            return length
    return 1 if len(calls) >= 2 * max(MOST_CALLS, optimizers) else None


class StepCounter:
    """Calls `on_step` at the end of each training step, inside the call of the step's last optimizer.

    on_call: called before the cycle of several optimizers is known, at each optimizer call. on_cycle: called once with
    the calls per step, in the call that makes the cycle known, before `on_step`; the calls so far are whole steps or
    the first ones of a step.

    All calls within a backward pass, by hooks that update a parameter as soon as its gradient is ready, count as one
    call at the end of the pass: torch's modes cannot be changed before, and on GPUs the hooks run in other threads.

    DeepSpeed's optimizers call torch's once per parameter group; the steps of its engine are counted instead.
    """

    def __init__(
        self,
        on_step: Callable[[Any], None],
        on_call: Callable[[Any], None],
        on_cycle: Callable[[int], None],
    ) -> None:
        self.on_step = on_step
        self.on_call = on_call
        self.on_cycle = on_cycle
        self.period: int | None = None
        self.position = 0
        self.total = 0
        self.names: list[str] = []
        """classes of the optimizers, in the order of their first calls"""

        self.observer: Callable[[], None] | None = None
        """called after each optimizer call, before `on_step`; torch's hooks cannot be changed from within a hook"""

        self._calls: list[Hashable] = []
        self._seen: dict[Hashable, Any] = {}
        self._within_backward: dict[int, Any] = {}
        """optimizers that the current backward pass has called"""

        self._updates_within_backward = False
        self._unwatch: Callable[[], None] | None = None
        self._optimizers = 0
        self._counts_engine = False
        self._restore: list[Callable[[], None]] = []

    def install(self) -> None:
        """Register the hook of all optimizers, and count steps that a GradScaler skips."""
        hook: Any = self._after_call
        self._restore.append(register_optimizer_step_post_hook(hook).remove)
        self._watch_backward_passes()
        original = torch.amp.GradScaler.step

        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self.total
            result = original(scaler, optimizer, *args, **kwargs)
            if self.total == before:  # the gradients were not finite
                self._after_call(optimizer, (), {})
            return result

        torch.amp.GradScaler.step = step  # type: ignore[method-assign, assignment]
        self._restore.append(lambda: setattr(torch.amp.GradScaler, "step", original))

    def _watch_backward_passes(self) -> None:
        """End the call of the optimizers that a backward pass has called when it has ended."""
        original = torch.autograd._engine_run_backward

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self._within_backward and not _is_within_backward():
                optimizers = list(self._within_backward.values())
                self._within_backward.clear()
                self._end_call(optimizers[-1], original, len(optimizers))
            return result

        run_backward._torchdynamo_disable = True  # type: ignore[attr-defined]
        torch.autograd._engine_run_backward = run_backward
        self._unwatch = lambda: setattr(torch.autograd, "_engine_run_backward", original)

    def keep_only_what_counts(self) -> None:
        """Stop watching backward passes if none has called an optimizer so far. Steps then have nothing but the hook.

        To be called while nothing else that wraps torch's functions is installed.
        """
        if not self._updates_within_backward:
            self._stop_watching()

    def _stop_watching(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None

    def remove(self) -> None:
        """Remove everything that `install` installed."""
        self._stop_watching()
        while self._restore:
            self._restore.pop()()

    def _after_call(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._counts_engine or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return
        self.total += 1
        if _is_within_backward():
            self._updates_within_backward = True
            self._within_backward[id(optimizer)] = optimizer
        else:
            self._end_call(optimizer, id(optimizer))

    # torch.compile must not trace the hook of a compiled optimizer step
    _after_call._torchdynamo_disable = True  # type: ignore[attr-defined]

    def _end_call(self, optimizer: Any, caller: Hashable, optimizers: int = 1) -> None:
        """Count a call of one optimizer, or the calls of several by `caller`."""
        if self.observer is not None:
            self.observer()
        if self.period is None:
            self._learn(optimizer, caller, optimizers)
            return
        self.position += 1
        if self.position == self.period:
            self.position = 0
            self.on_step(optimizer)

    def _learn(self, optimizer: Any, caller: Hashable, optimizers: int) -> None:
        if not self._calls:
            self._optimizers = max(1, _live_optimizers() + 1 - optimizers)
            if self._follow_deepspeed():
                return
        if caller not in self._seen:
            self._seen[caller] = optimizer
            self.names.append(type(optimizer).__name__)
        self._calls.append(caller)
        self.on_call(optimizer)
        self.period = period(self._calls, max(self._optimizers, len(self._seen)))
        if self.period is not None:
            self.position = len(self._calls) % self.period
            self._seen.clear()
            self.on_cycle(self.period)
            if self.position == 0:
                self.on_step(optimizer)

    def _follow_deepspeed(self) -> bool:
        """Count the steps of DeepSpeed's engine from now on, if the optimizer is called by one.

        That its module is imported means nothing: accelerate imports it if it is installed.
        """
        engine: Any = getattr(sys.modules.get(DEEPSPEED_ENGINE), "DeepSpeedEngine", None)
        if engine is None or not _is_called_by(DEEPSPEED_ENGINE):
            return False
        self._counts_engine = True
        self.names.append("DeepSpeedEngine")
        self.period = 1
        self.on_cycle(1)
        original = engine._take_model_step

        def take_model_step(this: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(this, *args, **kwargs)
            self.total += 1
            self.on_step(this.optimizer)
            return result

        engine._take_model_step = take_model_step
        self._restore.append(lambda: setattr(engine, "_take_model_step", original))
        return True


def _is_within_backward() -> bool:
    """Return True in a hook of the backward pass, on whichever thread it runs."""
    return torch._C._current_graph_task_id() != NO_BACKWARD_PASS


def _is_called_by(module: str) -> bool:
    """Return True if code of a module is being executed."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False


def _live_optimizers() -> int:
    """Return the number of optimizers that call the hook. Wrappers such as Accelerate's do not."""
    return sum(
        bool(getattr(type(value).step, "hooked", False)) and bool(getattr(value, "param_groups", None))
        for value in gc.get_objects()
        if issubclass(type(value), Optimizer)
    )


def device_of(optimizer: Any) -> torch.device:
    """Return the GPU of an optimizer's parameters; without any, the current GPU if CUDA is in use; else the CPU."""
    for group in getattr(optimizer, "param_groups", None) or ():
        for parameter in group["params"]:
            if parameter.device.type == "cuda":
                return torch.device("cuda", parameter.device.index)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def clock_of(device: torch.device) -> Clock:
    """Return the clock of a device, which need not be the current one."""
    is_other = device.type == "cuda" and device.index != torch.cuda.current_device()
    return _StreamClock(device) if is_other else clock_for(device)


class _StreamClock(CudaClock):
    """Marks of a GPU that is not the current one."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
