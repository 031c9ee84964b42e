"""Progress of a run on stderr: a live display on a terminal, plain lines in a log, nothing if quiet."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from analysis.cause import cause
from analysis.duration import duration
from study.cli.inputs import results_folder
from study.errors import fitted, lines_of
from study.orchestrate.activity import GROUP_STARTING, Activity
from study.orchestrate.protocol import Event
from study.plan.estimate import Expected
from study.plan.remaining import RemainingTime
from study.plan.trials import varying_fields
from trainables.scratch import log_folder
from trainables.trial import Trial

if TYPE_CHECKING:
    from study.orchestrate.cluster import Cluster
    from study.store.store import Store

STARTING, ENDING = "starting Ray Tune", "ending the worker group"
NEXT_TRIAL = "next trial"
CHECKING = "checking your code on the first rank"
MOST_WITH_DECIMALS = 100
"""samples/s from which whole numbers are exact enough"""

LINE_EVERY_S = 30.0
"""time between two lines about the same trial in a log"""

SHOWN_ENDED = 3
"""ended trials that the live display shows"""

REFRESH_PER_S = 2

LONG_WAIT_S = 1.5
"""A log gets a line about each wait that lasts longer."""


def stderr_console(quiet: bool) -> Console:
    return Console(stderr=True, markup=False, emoji=False, highlight=False, quiet=quiet)


@contextlib.contextmanager
def waiting(text: str, quiet: bool = False, console: Console | None = None) -> Iterator[None]:
    """Show what the program waits for: with the time on a terminal, as one line in a log if the wait is long."""
    console = console or stderr_console(quiet)
    if not console.is_terminal or quiet:
        timer = threading.Timer(LONG_WAIT_S, console.print, [text], {"soft_wrap": True})
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        return
    started_at_s = time.monotonic()

    def render() -> Text:
        return Text(f"{text}, {duration(time.monotonic() - started_at_s)}", no_wrap=True, overflow="ellipsis")

    with _live(console, render):
        yield


@contextlib.contextmanager
def reading(directory: str | None, quiet: bool, text: str = "reading results") -> Iterator[str]:
    """Show `text` while a results folder is read, see `results_folder`. Yield its path."""
    folder = results_folder(directory, quiet)
    with waiting(text, quiet):
        yield folder


def _live(console: Console, render: Callable[[], Text]) -> Live:
    return Live(
        console=console,
        get_renderable=render,
        refresh_per_second=REFRESH_PER_S,
        transient=True,
        redirect_stdout=False,
    )


class Progress:
    """Show the progress of a run of `trials` from its events and from what its trials are doing. A context manager.

    A trial is described by the fields in which the `planned` trials differ (default: those to run). `expected` are
    the estimated times of the run, if known. Lines about trials that did not end well stay on the screen.
    """

    def __init__(
        self,
        study_name: str,
        trials: Sequence[Trial],
        *,
        quiet: bool,
        console: Console | None = None,
        planned: Sequence[Trial] = (),
        expected: Expected | None = None,
        ending: str = ENDING,
    ) -> None:
        self.study_name = study_name
        self.ending = ending
        self.varying = varying_fields(planned or trials)
        self.total = len(trials)
        self.remaining = RemainingTime(trials, expected)
        self.doing = STARTING
        self.running: dict[str, str] = {}
        self.activity: dict[str, str] = {}
        self.line_at_s: dict[str, float] = {}
        self.ended: list[str] = []
        self.failed = 0
        self.causes: set[str] = set()
        self.started_at_s = time.monotonic()
        self.console = console or stderr_console(quiet)
        self.live = _live(self.console, self.render)

    def __enter__(self) -> Self:
        if self.console.is_terminal and not self.console.quiet:
            self.live.start()
        self._log(STARTING)
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
            self.doing = GROUP_STARTING
            self.remaining.group_starting()
            self._log(GROUP_STARTING)
        elif event.kind == "trial_started" and event.trial:
            trial_id = event.trial.trial_id
            self.running[trial_id], self.doing = self._describe(event.trial), NEXT_TRIAL
            self.line_at_s.setdefault(trial_id, time.monotonic())
        elif event.kind == "epoch_ended" and event.trial:
            trial_id = event.trial.trial_id
            self.running[trial_id] = f"{self._describe(event.trial)}: {_epoch_and_accuracy(event.trial, event.summary)}"
            self._log_repeatedly(trial_id)
        elif event.kind == "trial_ended" and event.trial:
            self.remaining.ended(event.trial)
            self.running.pop(event.trial.trial_id, None)
            self.activity.pop(event.trial.trial_id, None)
            self._show_end(event, event.trial)
            if not self.remaining.trials:
                self._log(self.ending)

    def on_activity(self, activity: Activity) -> None:
        """Update the display with what the running trials are doing."""
        self.activity = dict(activity)
        if activity and self.doing == STARTING:
            self.doing = NEXT_TRIAL  # Tune has started
        for trial_id in activity:
            self._log_repeatedly(trial_id)

    def _describe(self, trial: Trial) -> str:
        return describe(trial, self.varying)

    def _doing(self, trial_id: str) -> str:
        """Return a running trial with its current window; a training trial shows its epoch instead."""
        label, activity = self.running[trial_id], self.activity.get(trial_id)
        return f"{label}: {activity}" if activity and ": epoch " not in label else label

    def _between_trials(self) -> str:
        if not self.remaining.trials:
            return self.ending
        return CHECKING if GROUP_STARTING not in self.activity.values() and self.activity else self.doing

    def _log(self, line: str) -> None:
        if not self.live.is_started:
            self.console.print(line, soft_wrap=True)

    def _log_repeatedly(self, trial_id: str) -> None:
        """Print a line about a trial that has had none for a while."""
        now_s = time.monotonic()
        if trial_id in self.running and now_s - self.line_at_s.get(trial_id, now_s) >= LINE_EVERY_S:
            self.line_at_s[trial_id] = now_s
            self._log(self._doing(trial_id))

    def _show_end(self, event: Event, trial: Trial) -> None:
        label = self._describe(trial)
        if trial.epochs and "epoch" in event.summary:
            label += f", {_epoch_and_accuracy(trial, event.summary)}"
        rate = event.summary.get("throughput_samples_per_s")
        label += f": {rate:,.{0 if rate >= MOST_WITH_DECIMALS else 2}f} samples/s" if rate is not None else ""
        self.ended.append(f"{event.status.replace('_', ' ')}: {label}")
        self.failed += event.status in ("failed", "timeout")
        self._log(f"[{self._counts()}{self._times()}] {self.ended[-1]}")
        if event.reason and event.status != "done" and cause(event.reason) not in self.causes:
            self.causes.add(cause(event.reason))
            log = f"; log: {event.log}" if event.log else ""
            kind = "error" if event.status in ("failed", "timeout") else "warning"
            line = f"{kind}: {self.ended[-1]}: {lines_of(event.reason)}{log}"
            self.console.print(fitted(line, self.console.width) if self.live.is_started else line, soft_wrap=True)

    def render(self) -> Text:
        """Return the live display: a bar with counts and times, the running trials, and those that ended last."""
        done = self.total - len(self.remaining.trials)
        filled = 16 * done // self.total if self.total else 16
        heading = f"{self.study_name} {'━' * filled}{'╌' * (16 - filled)} {self._counts()}{self._times()}"
        text = Text(heading, style="bold", no_wrap=True, overflow="ellipsis")
        # other threads change these while this one draws
        running = [self._in_width(self._doing(trial_id)) for trial_id in list(self.running) if trial_id in self.running]
        if not running:
            running = [self._between_trials()]
        ended = [self._in_width(line) for line in self.ended[-SHOWN_ENDED:][::-1]]
        lines = [f"▸ {line}" for line in running] + [f"  {line}" for line in ended]
        return text.append("".join(f"\n{line}" for line in lines), style="not bold")

    def _in_width(self, line: str) -> str:
        """Return a line about a trial; what it is doing, or its result, is on a line of its own if it would be cut."""
        label, colon, news = line.rpartition(": ")
        return f"{label}:\n    {news}" if colon and len(f"▸ {line}") > self.console.width else line

    def _counts(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.total - len(self.remaining.trials)}/{self.total}{failed}"

    def _times(self) -> str:
        elapsed = f", {duration(time.monotonic() - self.started_at_s)}"
        left_s = self.remaining.left_s()
        if left_s is None or not self.remaining.trials:
            return elapsed
        return f"{elapsed}, about {duration(left_s)} left"


def run_shown(
    progress: Progress, blocks: Sequence[Sequence[Trial]], store: "Store", cluster: "Cluster", **options: Any
) -> bool:
    """Run trials and show their progress. Return True if Ctrl-C or a signal interrupted them.

    options: of `study.orchestrate.tune.run_trials`. Tune's own output goes to files, since stdout is for results.
    """
    logs = cluster.log_dir if os.path.isdir(cluster.log_dir) else log_folder()
    with (
        open(os.path.join(logs, "tune.out"), "a") as file,
        contextlib.redirect_stdout(file),
        progress,
    ):
        from study.orchestrate.tune import run_trials  # takes seconds, which the display shows

        on_activity = None if progress.console.quiet else progress.on_activity
        return run_trials(
            progress.study_name, blocks, store, cluster, on_event=progress.on_event, on_activity=on_activity, **options
        )


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
