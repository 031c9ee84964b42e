"""Send what Ray prints to a file. Users see the study's own lines, one of which names the file."""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

THREADS_OF_RAY = "ray_"
"""How the names of Ray's threads in this process start."""


class _WithoutRay:
    """Standard output, except that what Ray's threads print there, such as the death of a server, goes to a file."""

    def __init__(self, stream: Any, file: TextIO):
        self.stream = stream
        self.file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        is_ray = threading.current_thread().name.startswith(THREADS_OF_RAY)
        return int((self.file if is_ray else self.stream).write(text))


@contextlib.contextmanager
def ray_output_in(path: Path) -> Iterator[None]:
    """Append to a file what Ray prints until the context ends.

    This is what Python or native code writes to standard error, and what Ray's threads write to standard output.
    sys.stderr still writes to standard error.
    """
    logger = logging.getLogger("ray")
    handlers, propagates = list(logger.handlers), logger.propagate
    with open(path, "a", buffering=1, errors="backslashreplace") as file, contextlib.ExitStack() as stack:
        logger.handlers, logger.propagate = [logging.StreamHandler(file)], False
        stack.callback(setattr, logger, "handlers", handlers)
        stack.callback(setattr, logger, "propagate", propagates)
        for name, child in logging.Logger.manager.loggerDict.items():
            if name.startswith("ray.") and isinstance(child, logging.Logger) and child.handlers:
                stack.callback(setattr, child, "handlers", child.handlers)
                child.handlers = [logging.StreamHandler(file)]
        stack.enter_context(_native_stderr_in(file.fileno()))
        stack.enter_context(contextlib.redirect_stdout(_WithoutRay(sys.stdout, file)))
        yield


@contextlib.contextmanager
def _native_stderr_in(descriptor: int) -> Iterator[None]:
    """Let file descriptor 2 be another file, and sys.stderr the old one, if it is the process's own."""
    stream = getattr(sys.stderr, "stream", sys.stderr)
    if stream is not sys.__stderr__ or stream is None:  # as in a test, whose stderr is no file
        yield
        return
    sys.stderr.flush()
    old = os.dup(2)
    os.dup2(descriptor, 2)
    before = sys.stderr
    terminal = open(old, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115  closes `old` below
    try:
        if hasattr(before, "stream"):
            before.stream = terminal
        else:
            sys.stderr = terminal
        yield
    finally:
        with contextlib.suppress(OSError):
            terminal.flush()
        os.dup2(old, 2)
        if hasattr(before, "stream"):
            before.stream = stream
        sys.stderr = before
        with contextlib.suppress(OSError):
            terminal.close()
