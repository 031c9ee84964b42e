"""The command as a process of its system: standard streams that may be closed or full, signals, and errors."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.errors import INTERNAL, INTERRUPTED, NO_CLUSTER, OUTPUT_CLOSED, USAGE, print_to_stderr
from study.orchestrate.processes.guard import end_with_parent
from study.orchestrate.processes.output import ray_output_in
from study.store.redaction import redacted, redacted_line, redacted_log
from trainables.messages import type_and_line
from trainables.scratch import new_log

if TYPE_CHECKING:
    from study.store.store import Store

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals of a batch system that ends a job, of a terminal that closes, and of Ctrl-\\."""


SAME_SIGNAL_S = 2.0
"""Signals with the same number within this time count as one."""

_parent: int | None = None
"""File descriptor of the pipe to this process's parent, None without one."""


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


_handled_at_s: dict[int, float] = {}


def interrupt(number: int, frame: Any) -> None:
    """Treat a signal like Ctrl-C: the run still ends with a report.

    A terminal, or `timeout`, sends a signal to parent and child, and the parent forwards it, so it arrives twice.
    """
    now_s = time.monotonic()
    is_repeated = _parent is not None and now_s - _handled_at_s.get(number, -math.inf) < SAME_SIGNAL_S
    _handled_at_s[number] = now_s
    if not is_repeated:
        raise KeyboardInterrupt


def report_error(error: Exception, arguments: Sequence[str]) -> int:
    """Print an error in one line and return its exit code. The traceback of an internal error goes to a file.

    arguments: the command line. With --debug, the traceback is printed instead.
    """
    if hasattr(error, "format_message"):  # an error of click, which typer bundles or imports depending on its version
        message = redacted(error.format_message().rstrip("."))
        is_for_script = "--script" in arguments and type(error).__name__ in ("NoSuchOption", "UsageError")
        fix = "fix: give the script's own arguments after --" if is_for_script else "see --help"
        print_to_stderr(f"error: {message}{' ' if message.endswith('?') else '; '}{fix}")
        return USAGE
    # only of the class itself: an error that Ray raises from another process also inherits from its cause
    exit_code: int | None = vars(type(error)).get("exit_code")
    if exit_code is not None:
        print_to_stderr(f"error: {redacted(str(error))}")
        return exit_code
    text = "".join(traceback.format_exception(error))
    if "--debug" in arguments:
        print(redacted_log(text), file=sys.stderr)
        return INTERNAL
    log = new_log("error", redacted_log(text))
    print_to_stderr(f"error: internal error: {redacted_line(type_and_line(error))}; traceback in {log}")
    return INTERNAL


@contextlib.contextmanager
def ray_output() -> Iterator[Path]:
    """Send what Ray writes to standard error to a new log until the context ends. Yield its path."""
    log = Path(new_log("ray", ""))
    tell_parent(log=str(log))
    with ray_output_in(log):
        yield log
    if log.exists() and not log.stat().st_size:
        log.unlink()


def move_to_session(log: Path, log_dir: str) -> None:
    """Move a log to those of a Ray session on this host, with which it is removed."""
    if os.path.isdir(log_dir):
        with contextlib.suppress(OSError):  # another file system
            tell_parent(log=str(log.rename(Path(log_dir) / log.name)))


# ------------------------------------------------------------------------------- a parent that outlives Ray's aborts

_LOST_GCS = "Failed to connect to GCS"
"""Ray, src/ray/rpc/gcs/gcs_rpc_client.h"""


def supervised(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Call `command` in a child process and return its exit code. Call this before any thread starts.

    Ray ends a process whose cluster is lost, without an exception. This process then prints one line, writes a partial
    report and returns a documented exit code. What it knows is what the child has sent to it with `tell_parent`.
    """
    global _parent
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    receiving, sending = os.pipe()
    parent = os.getpid()
    forwarded = (signal.SIGINT, *ENDING)
    # a signal to both must not end this process before it forwards signals: its child would be killed
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
    child = os.fork()
    if child == 0:
        os.close(receiving)
        _parent = sending
        _end_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return _exit_code_of(command, arguments)
    os.close(sending)

    signals: list[int] = []

    def forward(number: int, frame: Any) -> None:
        signals.append(number)  # without a lock: another signal can arrive in here
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in forwarded:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _, status = os.waitpid(child, 0)
    os.set_blocking(receiving, False)
    with open(receiving, "rb") as file:
        facts: dict[str, Any] = {}
        for line in (file.read() or b"").splitlines():
            facts |= json.loads(line)
    if "exit_code" in facts:
        return int(facts["exit_code"])
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in forwarded:
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(parent, os.WTERMSIG(status))
    with standard_streams():
        return _end_for_child(facts, status, was_asked=bool(signals))


def collect_evidence(command: Sequence[str], store: "Store") -> None:
    """Run the module that measures what no trial of a study gives, and store its numbers, see `Study.evidence`.

    Does nothing without a module, or if the results have the numbers. Without them the report says what is missing.
    """
    if not command or "evidence" in store.study():
        return
    print("collecting evidence that no trial gives, on CPU ranks of this host", file=sys.stderr)
    module, *options = command
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "evidence.json")
        started = [sys.executable, "-m", module, str(file), *options]
        done = subprocess.run(started, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return store.set_entry("evidence", json.loads(file.read_text()))
    reason = redacted_line((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
    print_to_stderr(f"warning: no evidence: {reason}; run the same command again")


def tell_parent(**facts: Any) -> None:
    """Send facts to the parent: `out`, `command`, `log`, the code of a report that it shall write, or `exit_code`."""
    if _parent is not None:
        with contextlib.suppress(OSError):  # the parent has been killed
            os.write(_parent, json.dumps(facts).encode() + b"\n")


def leave_report_to_parent(exit_code: int) -> None:
    """End this process, which Ray is about to abort. Its parent writes a partial report and returns this code.

    Does nothing without a parent.
    """
    from study.orchestrate.local_ray import kill_local

    if _parent is None:
        return
    kill_local()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    tell_parent(reported_error=exit_code)
    os._exit(exit_code)


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends. Let Ctrl-C arrive once."""
    end_with_parent(parent)
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def _exit_code_of(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Call a command, tell the parent its exit code and return it."""
    try:
        exit_code = command(arguments)
    except BaseException as error:
        code = getattr(error, "code", 1)
        tell_parent(exit_code=code if isinstance(code, int) else int(bool(code)))
        raise
    tell_parent(exit_code=exit_code)
    return exit_code


def _end_for_child(facts: Mapping[str, Any], status: int, was_asked: bool) -> int:
    """Print why the child ended, unless it has, and write a partial report. Return the exit code.

    was_asked: a signal has asked both to end. If all processes of a job get it, Ray's servers may end first.
    """
    from study.cli.progress import stderr_console

    exit_code = facts.get("reported_error")
    if exit_code is None:
        stderr_console(quiet=False).show_cursor()  # hidden by a live display
        again = f"; resume with: {facts['command']}" if "command" in facts else ""
        if was_asked:
            line, exit_code = f"warning: interrupted{again}", INTERRUPTED
        else:
            cause, fix, exit_code = _cause(status, facts.get("log", ""))
            saved = "; finished trials are saved" if "out" in facts else ""
            log = f"; log: {facts['log']}" if "log" in facts else ""
            line = f"error: {cause}{saved}{log}; fix: {fix}{again}"
        print_to_stderr(line)
    if "out" in facts:
        from analysis.report.report import write_report

        try:
            print(write_report(facts["out"], partial=True).path)
        except Exception as error:  # noqa: BLE001  one line whatever it is
            print_to_stderr(f"error: no report: {redacted_line(str(error))}")
    sys.stdout.flush()
    return int(exit_code)


def _cause(status: int, log: str) -> tuple[str, str, int]:
    """Return why a child has ended before its time, the fix and the exit code. `log` is a file with Ray's output."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number == signal.SIGKILL:
        return "the study's process was killed", "free memory on this host, if that was full", INTERNAL
    if number not in (0, signal.SIGABRT):
        return f"the study's process was ended by {signal.Signals(number).name}", "see the log", INTERNAL
    with contextlib.suppress(OSError):
        if _LOST_GCS in Path(log).read_text(errors="replace"):
            return "the head of the cluster (its GCS) no longer answers", "check the head and restart it", NO_CLUSTER
    return "Ray has ended the study's process, because one of its servers has died", "see the log", NO_CLUSTER
