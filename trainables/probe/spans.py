"""Time the parts of someone else's training step, by wrapping the entry points of torch that every loop passes.

The wrappers are installed for one window and removed after it. Only the outermost of nested parts is timed: a copy
inside a model's forward pass belongs to the forward pass.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from trainables.clock import perf_counter
from trainables.probe.batches import samples, samples_of_inputs, tokens
from trainables.step.timing import Clock, Mark

OPTIMIZER = "optimizer"

REDUCTIONS = ("all_reduce", "reduce_scatter_tensor", "all_reduce_coalesced", "reduce")
"""functions of torch.distributed with which scripts average gradients themselves"""


@dataclass
class Span:
    """A part of a step: its marks on the device's clock and its host times."""

    name: str
    start: Mark
    start_s: float
    end: Mark = None
    end_s: float = 0.0


class ForwardPass(NamedTuple):
    """A forward pass with gradients of a module that the loop calls itself, and what its inputs show."""

    module: int
    """id of the `Outermost`"""
    samples: int | None
    tokens: int | None


@dataclass
class StepSpans:
    """What the wrappers saw in one step."""

    spans: list[Span] = field(default_factory=list)
    copied_bytes: int = 0
    loader_samples: list[int | None] = field(default_factory=list)
    """per batch that a DataLoader returned"""
    forward_passes: list[ForwardPass] = field(default_factory=list)
    last_gradient: Mark = None
    losses: list[torch.Tensor] = field(default_factory=list)
    """per backward pass the number that it starts from, on the device, before a gradient scaler has multiplied it"""


@dataclass(frozen=True)
class Outermost:
    """A module that the training loop calls itself. `trained`: it has parameters with gradients."""

    module: Callable[[], nn.Module | None]
    name: str
    trained: bool


@dataclass
class _Call:
    """A module that is being called, and the modules that it has called so far."""

    module: nn.Module
    called: list[nn.Module] = field(default_factory=list)


class Instruments:
    """The wrappers of a window. `steps` receives one entry per step; `next_step` starts a new one."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.steps: list[StepSpans] = []
        self.thread = threading.get_ident()
        self._current = StepSpans()
        self._unscaled: dict[int, torch.Tensor] = {}
        self._open: Span | None = None
        self._interrupts_optimizer = False
        self._restore: list[Callable[[], None]] = []

    def next_step(self, mark: Mark) -> None:
        """End the current step at `mark` and start the next one."""
        if self._open is not None:  # this is called within the optimizer's call
            self._open.end, self._open.end_s = mark, perf_counter()
            self._current.spans.append(self._open)
            self._open = None
        self.steps.append(self._current)
        self._current = StepSpans()
        self._unscaled.clear()

    def install(self, modules: Iterable[Outermost]) -> None:
        """Time loaders, copies, the given modules, backward passes, reductions and optimizers."""
        self._wrap_loaders()
        self._wrap_copies()
        self._patch(torch.amp.GradScaler, "scale", self._note_scale)
        self._patch(torch.autograd, "_engine_run_backward", self._note_loss)
        self._patch(torch.autograd, "_engine_run_backward", self._timed("backward"))
        for name in REDUCTIONS:
            for module in (dist, dist.distributed_c10d):
                self._patch(module, name, self._timed("reduce"))
        for outermost in modules:
            self._wrap_module(outermost)
        self._restore.append(register_optimizer_step_pre_hook(self._optimizer_starts).remove)

    def discover(self) -> list[Outermost]:
        """Install wrappers that find the modules which the loop calls itself. The list fills until `remove`.

        A module within whose call a backward pass or an optimizer step starts contains the loop, as Lightning's does
        with manual optimization. The modules that it calls are found instead.
        """
        self._wrap_loaders()
        found: dict[int, Outermost] = {}
        calls: list[_Call] = []
        original = nn.Module.__call__

        def find(module: nn.Module) -> Outermost:
            if id(module) not in found:
                trained = any(parameter.requires_grad for parameter in module.parameters())
                found[id(module)] = Outermost(_reference(module), type(module).__name__, trained)
                modules.append(found[id(module)])
            return found[id(module)]

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or threading.get_ident() != self.thread:
                return original(module, *args, **kwargs)
            if calls:
                calls[-1].called.append(module)
            calls.append(_Call(module))
            try:
                if self._open is not None:
                    return original(module, *args, **kwargs)
                return self._forward(find(module), original, (module, *args), kwargs)
            finally:
                calls.pop()

        def enter_containers(*_: Any) -> None:
            """Replace the modules that are being called by those that they have called so far."""
            if threading.get_ident() != self.thread or not calls:
                return
            self._open = None
            for outer in calls:
                if (container := found.get(id(outer.module))) in modules:
                    modules.remove(container)
            containers = {id(outer.module) for outer in calls}
            for outer in calls:
                for module in outer.called:
                    if id(module) not in containers:
                        find(module)
                outer.called.clear()

        def wrap_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(backward)
            def entered(*args: Any, **kwargs: Any) -> Any:
                enter_containers()
                return backward(*args, **kwargs)

            return entered

        modules: list[Outermost] = []
        self._set(nn.Module, "__call__", call)
        self._patch(torch.autograd, "_engine_run_backward", wrap_backward)
        self._restore.append(register_optimizer_step_pre_hook(enter_containers).remove)
        return modules

    def remove(self) -> None:
        """Remove all wrappers."""
        while self._restore:
            self._restore.pop()()

    def on_last_gradient(self) -> None:
        """Note that the last gradient is ready; again for each backward pass. Called in autograd's thread."""
        self._current.last_gradient = self.clock.mark()

    # -- spans

    def _is_outermost(self) -> bool:
        """Return True if no part is open that the next one would be nested in."""
        return self._open is None or self._open.name == OPTIMIZER

    def _start(self, name: str) -> Span | None:
        """Start a part, unless it is nested in another or runs in another thread.

        Parts inside an optimizer's call (a closure, as Lightning's) interrupt the optimizer.
        """
        if threading.get_ident() != self.thread:
            return None
        if self._open is not None:
            if self._open.name != OPTIMIZER or name == OPTIMIZER:
                return None
            self._end(self._open)
            self._interrupts_optimizer = True
        self._open = Span(name, self.clock.mark(), perf_counter())
        return self._open

    def _end(self, span: Span | None) -> None:
        if span is None or span is not self._open:  # not timed, or the call of a module that contains the loop
            return
        span.end, span.end_s = self.clock.mark(), perf_counter()
        self._current.spans.append(span)
        self._open = None
        if self._interrupts_optimizer and span.name != OPTIMIZER:
            self._interrupts_optimizer = False
            self._open = Span(OPTIMIZER, span.end, span.end_s)

    def _timed(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def timed(*args: Any, **kwargs: Any) -> Any:
                span = self._start(name)
                try:
                    return original(*args, **kwargs)
                finally:
                    self._end(span)

            return timed

        return wrap

    def _optimizer_starts(self, *_: Any) -> None:
        self._start(OPTIMIZER)

    def optimizer_ended(self) -> None:
        """End the part of an optimizer's call."""
        if self._open is not None and self._open.name == OPTIMIZER:
            self._end(self._open)

    _optimizer_starts._torchdynamo_disable = True  # type: ignore[attr-defined] # not part of a compiled optimizer step

    def _forward(self, outermost: Outermost, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module that the loop calls itself."""
        step = self._current
        learning = torch.is_grad_enabled()
        if self._is_outermost():
            inputs = (list(args[1:] if args and args[0] is outermost.module() else args), kwargs)
            if outermost.trained and learning:
                size = samples_of_inputs([*inputs[0], *inputs[1].values()])
                step.forward_passes.append(ForwardPass(id(outermost), size, tokens(inputs)))
        span = self._start("forward" if outermost.trained else "loss" if learning else "other")
        try:
            return original(*args, **kwargs)
        finally:
            self._end(span)

    # -- wrappers

    def _set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a class or module until `remove`."""
        own = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._restore.append(lambda: delattr(owner, name) if own is _ABSENT else setattr(owner, name, own))

    def _patch(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        if hasattr(owner, name):
            self._set(owner, name, wrap(getattr(owner, name)))

    def _wrap_loaders(self) -> None:
        def wrap_next(original: Callable[..., Any]) -> Callable[..., Any]:
            timed = self._timed("load_wait")(original)

            @functools.wraps(original)
            def next_batch(iterator: Any) -> Any:
                nested = not self._is_outermost()
                batch = timed(iterator)
                if not nested and threading.get_ident() == self.thread:
                    size = samples(batch)
                    self._current.loader_samples.append(batch_size_of(iterator) if size is None else size)
                return batch

            return next_batch

        for iterator in _with_subclasses(_BaseDataLoaderIter):
            if "__next__" in vars(iterator):
                self._patch(iterator, "__next__", wrap_next)
        self._patch(DataLoader, "__iter__", self._timed("load_wait"))

    def _wrap_copies(self) -> None:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            timed = self._timed("host_to_device")(original)

            @functools.wraps(original)
            def copy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                if tensor.is_cuda or not self._is_outermost() or not _copies_to_gpu(args, kwargs):
                    return original(tensor, *args, **kwargs)
                self._current.copied_bytes += tensor.nbytes
                return timed(tensor, *args, **kwargs)

            return copy

        if torch.cuda.is_initialized():
            self._patch(torch.Tensor, "to", wrap)
            self._patch(torch.Tensor, "cuda", wrap)

    def _note_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if isinstance(outputs, torch.Tensor) and outputs.numel() == 1:
                self._unscaled[id(scaled)] = outputs.detach().clone()
            return scaled

        return scale

    def _note_loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Copy the number from which a backward pass starts; it is read when the loop has ended.

        A copy, because a CUDA graph or torch.compile may write the next loss to the same memory. Reading a distributed
        tensor would communicate.
        """

        @functools.wraps(original)
        def backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
            is_pass = kwargs.get("accumulate_grad", False) and threading.get_ident() == self.thread
            if is_pass and len(roots) == 1 and roots[0].numel() == 1 and not hasattr(roots[0], "full_tensor"):
                unscaled = self._unscaled.get(id(roots[0]))
                self._current.losses.append(roots[0].detach().clone() if unscaled is None else unscaled)
            return original(roots, *args, **kwargs)

        return backward

    def _wrap_module(self, outermost: Outermost) -> None:
        """Wrap the call of one module. `_call_impl` contains its hooks, and under compilation the compiled code."""
        module = outermost.module()
        if module is None:
            return
        own = vars(module).get("_compiled_call_impl", _ABSENT)
        original = module._compiled_call_impl or module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._forward(outermost, original, args, kwargs)

        object.__setattr__(module, "_compiled_call_impl", call)

        def restore() -> None:
            vars(module).pop("_compiled_call_impl", None)
            if own is not _ABSENT:
                object.__setattr__(module, "_compiled_call_impl", own)

        self._restore.append(restore)


_ABSENT = object()


def _copies_to_gpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if these arguments of `Tensor.to` name a GPU; `Tensor.cuda` needs none."""
    target = args[0] if args else kwargs.get("device", kwargs.get("other", "cuda" if not kwargs else None))
    if isinstance(target, torch.Tensor):
        return target.is_cuda
    if isinstance(target, torch.dtype):
        return False
    return isinstance(target, int) or (target is None and "dtype" not in kwargs) or str(target).startswith("cuda")


def _reference(module: nn.Module) -> Callable[[], nn.Module | None]:
    """Return a reference that does not keep the module alive, if possible."""
    try:
        return weakref.ref(module)
    except TypeError:
        return lambda: module


def _with_subclasses(cls: type) -> list[type]:
    children: list[type] = cls.__subclasses__()
    return [cls, *(found for child in children for found in _with_subclasses(child))]


def batch_size_of(iterator: Any) -> int | None:
    """Return the batch size of a loader; None if it does not state any."""
    size = getattr(getattr(iterator, "_index_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None
