"""The command as a process of its system: standard streams that may be closed or full, signals, and errors."""

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from study.errors import INTERNAL, OUTPUT_CLOSED, USAGE, lines_of
from study.store.redaction import redacted, redacted_line, redacted_log
from trainables.messages import type_and_line
from trainables.scratch import new_log

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals of a batch system that ends a job, of a terminal that closes, and of Ctrl-\\."""


class OutputClosed(Exception):
    """Whoever read standard output has ended, such as `head`. There is nobody to tell."""

    exit_code = OUTPUT_CLOSED


class OutputError(Exception):
    """Standard output cannot be written."""

    exit_code = USAGE


class _Stream:
    """A text stream whose errors do not end a study."""

    def __init__(self, stream: Any):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Progress(_Stream):
    """Standard error. What cannot be written is lost."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()


class _Results(_Stream):
    """Standard output. Raises OutputClosed or OutputError, which libraries do not take for errors of their own."""

    def write(self, text: str) -> int:
        with self._errors():
            return int(self.stream.write(text))

    def flush(self) -> None:
        with self._errors():
            self.stream.flush()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._discard()
            if isinstance(error, BrokenPipeError):
                raise OutputClosed from error
            raise OutputError(f"standard output cannot be written: {error.strerror}; fix: send it elsewhere") from error

    def _discard(self) -> None:
        """Send what is still buffered nowhere, so that the end of the process does not fail on it again."""
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self.stream.fileno())


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Protect this process from its standard streams until the context ends."""
    before = sys.stdout, sys.stderr
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        if stream is None:  # closed by the shell: without a file, the next one that opens would get its number
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), number)
    streams = [stream or open(os.devnull, "w") for stream in before]  # noqa: SIM115  closed with the process
    for stream in streams:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = _Results(streams[0]), _Progress(streams[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@contextlib.contextmanager
def on_ending_signals(handler: Any) -> Iterator[None]:
    """Handle the signals that end a process with this handler until the context ends, unless they are ignored.

    Ray replaces the handler of SIGTERM when it connects, so enter it again afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    previous = {number: signal.getsignal(number) for number in ENDING}
    changed = {number: before for number, before in previous.items() if before != signal.SIG_IGN}  # as by nohup
    for number in changed:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in changed.items():
            signal.signal(number, before or signal.SIG_DFL)  # None if the handler was not set from Python


def interrupt(number: int, frame: Any) -> None:
    """Treat a signal like Ctrl-C: the run still ends with a report."""
    raise KeyboardInterrupt


def report_error(error: Exception, debug: bool) -> int:
    """Print an error in one line and return its exit code. The traceback of an internal error goes to a file."""
    if hasattr(error, "format_message"):  # an error of click, which typer bundles or imports depending on its version
        print(f"error: {redacted(error.format_message().rstrip('.'))}; see --help", file=sys.stderr)
        return USAGE
    # only of the class itself: an error that Ray raises from another process also inherits from its cause
    exit_code: int | None = vars(type(error)).get("exit_code")
    if exit_code is not None:
        print(f"error: {lines_of(redacted(str(error)))}", file=sys.stderr)
        return exit_code
    text = "".join(traceback.format_exception(error))
    if debug:
        print(redacted_log(text), file=sys.stderr)
        return INTERNAL
    log = new_log("error", redacted_log(text))
    first_line = lines_of(redacted_line(type_and_line(error)))
    print(f"error: internal error: {first_line}; traceback in {log}", file=sys.stderr)
    return INTERNAL


_REPORT = (
    "import sys; from analysis.report.report import write_report; "
    "print(write_report(sys.argv[1], partial=True).path); sys.exit(int(sys.argv[2]))"
)


def report_in_new_process(out: str, exit_code: int) -> None:
    """Replace this process, which Ray is about to abort, by one that writes a partial report and returns this code."""
    from study.orchestrate.local_ray import kill_local

    kill_local()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    for name in os.listdir("/dev/fd"):  # else the new process would count as one that writes Ray's logs
        with contextlib.suppress(OSError):
            os.set_inheritable(int(name), int(name) <= 2)
    for number in ENDING:  # what is ignored stays so in the new process
        signal.signal(number, signal.SIG_IGN)
    os.execve(sys.executable, [sys.executable, "-c", _REPORT, out, str(exit_code)], os.environ | {"PYTHONPATH": path})
