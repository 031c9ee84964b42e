"""Progress of a run on stderr: a live display on a terminal, plain lines in a log, nothing if quiet."""

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from study.orchestrate.protocol import Event
from study.plan.trials import varying_fields
from trainables.trial import Trial

EPOCH_LINES_EVERY_S = 30.0
"""time between two lines about the same training in a log"""


class Progress:
    """Show the progress of a run of `trials` from its events. A context manager.

    A trial is described by the fields in which the `planned` trials differ (default: those to run).

    The time left is the mean time per ended trial, including starts of worker groups, times the remaining trials. Lines
    about trials that failed or ran out of memory stay on the screen.
    """

    def __init__(
        self,
        study_name: str,
        trials: Sequence[Trial],
        *,
        quiet: bool,
        console: Console | None = None,
        planned: Sequence[Trial] = (),
    ) -> None:
        self.study_name = study_name
        self.varying = varying_fields(planned or trials)
        self.left = len(trials)
        self.ended = 0
        self.activity = "starting"
        self.running: dict[str, str] = {}
        self.last_epoch_line_at_s: dict[str, float] = {}
        self.throughput: float | None = None
        self.started_at_s = time.monotonic()
        self.console = console or Console(stderr=True, markup=False, emoji=False, highlight=False, quiet=quiet)
        self.live = Live(
            console=self.console,
            get_renderable=self.render,
            refresh_per_second=4,
            transient=True,
            redirect_stdout=False,
        )

    def __enter__(self) -> Self:
        if self.console.is_terminal and not self.console.quiet:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.live.stop()

    def __getstate__(self) -> dict[str, object]:
        return {}  # Tune pickles its callbacks and their listeners, and a console cannot be pickled

    def on_event(self, event: Event) -> None:
        """Update the display with an event."""
        if event.kind == "group_starting":
            self.activity = "starting a worker group"
        elif event.kind == "trial_started" and event.trial:
            self.running[event.trial.trial_id], self.activity = self._describe(event.trial), "next trial"
        elif event.kind == "epoch_ended" and event.trial:
            self._show_epoch(event.trial, event.summary)
        elif event.kind == "trial_ended" and event.trial:
            self.ended += 1
            self.left -= 1
            self.running.pop(event.trial.trial_id, None)
            self.throughput = event.summary.get("throughput_samples_per_s", self.throughput)
            self._show_end(event, event.trial)
        if not self.live.is_started and event.kind == "group_starting":
            self.console.print(self.activity)

    def _describe(self, trial: Trial) -> str:
        return describe(trial, self.varying)

    def _show_epoch(self, trial: Trial, row: Mapping[str, Any]) -> None:
        now_s = time.monotonic()
        line = self.running[trial.trial_id] = f"{self._describe(trial)}: {_epoch_and_accuracy(trial, row)}"
        last_line_at_s = self.last_epoch_line_at_s.setdefault(trial.trial_id, self.started_at_s)
        if not self.live.is_started and now_s - last_line_at_s >= EPOCH_LINES_EVERY_S:
            self.last_epoch_line_at_s[trial.trial_id] = now_s
            self.console.print(line, soft_wrap=True)

    def _show_end(self, event: Event, trial: Trial) -> None:
        line = f"{event.status.replace('_', ' ')}: {self._describe(trial)}"
        if event.reason:
            line += f": {event.reason}"
        if event.log:
            line += f"; log: {event.log}"
        if self.live.is_started:
            if event.status != "done":
                self.console.print(line, soft_wrap=True)
            return
        if trial.epochs and "epoch" in event.summary:
            line += f", {_epoch_and_accuracy(trial, event.summary)}"
        rate = event.summary.get("throughput_samples_per_s")
        line += f", {rate:,.0f} samples/s" if rate is not None else ""
        self.console.print(f"[{self.ended}/{self.ended + self.left}{self._time_left()}] {line}", soft_wrap=True)

    def render(self) -> Text:
        """Return the live display: a bar with counts, time left and the last throughput, then the running trials."""
        total = self.ended + self.left
        filled = 20 * self.ended // total if total else 20
        bar = f"{self.study_name} {'━' * filled}{'╌' * (20 - filled)} {self.ended}/{total}{self._time_left()}"
        if self.throughput is not None:
            bar += f", last {self.throughput:,.0f} samples/s"
        text = Text(bar, style="bold", no_wrap=True, overflow="ellipsis")
        return text.append("".join(f"\n{line}" for line in self.running.values() or [self.activity]), style="not bold")

    def _time_left(self) -> str:
        if not self.ended or not self.left:
            return ""
        left_s = (time.monotonic() - self.started_at_s) / self.ended * self.left
        return f", about {duration(left_s)} left"


_NAMES = ("model", "workload", "script", "train_function")

_LABELS: Mapping[str, Callable[[Trial], str]] = {
    "precision": lambda trial: trial.precision,
    "batch_per_gpu": lambda trial: f"batch {trial.batch_per_gpu}",
    "script_flags": lambda trial: trial.script_flags,
    "script_env": lambda trial: trial.script_env,
    "function_config": lambda trial: trial.function_config.strip("{}").replace('"', ""),
    "loader_workers": lambda trial: f"{trial.loader_workers} worker{'' if trial.loader_workers == 1 else 's'}",
}
"""Short forms of some fields; all others are shown as name and value."""


def describe(trial: Trial, varying: Sequence[str]) -> str:
    """Return network, ranks, the fields that vary within the plan, and the repeat, on one line."""
    ranks = (
        f"{trial.world_size} {'GPU' if trial.device == 'cuda' else 'CPU rank'}{'' if trial.world_size == 1 else 's'}"
    )
    parts = [trial.code_name, ranks]
    batch_fields = ("batch_per_gpu", "accumulation_steps") if trial.epochs else ()
    if trial.epochs and {"world_size", *batch_fields} & set(varying):
        parts.append(f"global batch {trial.global_batch}")
    for name in varying:
        if name not in (*_NAMES, "device", "world_size", *batch_fields):
            value = getattr(trial, name)
            text = "yes" if value is True else "no" if value is False else value
            parts.append(_LABELS[name](trial) if name in _LABELS else f"{name} {text}")
    parts.append(f"seed {trial.seed}" if trial.epochs else f"repeat {trial.repeat + 1}")
    return ", ".join(filter(None, parts))


def _epoch_and_accuracy(trial: Trial, row: Mapping[str, Any]) -> str:
    accuracy = row.get("validation_top1")
    return f"epoch {row['epoch']}/{trial.epochs}" + ("" if accuracy is None else f", accuracy {accuracy:.1%}")


def duration(seconds: float) -> str:
    """Format seconds for people: 42 s, 3 min, 1 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
