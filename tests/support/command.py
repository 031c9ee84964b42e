"""The command as users run it, in a process of its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent


TOO_BUSY = "The current node timed out during startup"
"""Ray gives a node 30 s to start, which a host that runs other tests can exceed."""

MOST_STARTS = 3
"""Times that a command is started if the host is too busy for Ray."""


class Command:
    """`python -m study.scaling ...` in a new process group. stderr goes to a file that can be read while it runs."""

    def __init__(self, arguments: list[str], folder: Path, name: str = "command", **variables: str):
        self.arguments = arguments
        self.log = folder / f"{name}.err"
        self.variables = os.environ | {"COLUMNS": "100", "STEPPING": str(folder)} | variables
        self.starts = 0
        self.process = self._started()

    def _started(self) -> "subprocess.Popen[str]":
        self.starts += 1
        with self.log.open("w") as stderr:
            return subprocess.Popen(
                [sys.executable, "-m", "study.scaling", *self.arguments],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
                env=self.variables,
            )

    def _is_restarted(self) -> bool:
        """Start the command again if it has ended because the host was too busy for Ray."""
        is_too_busy = self.process.poll() is not None and TOO_BUSY in self.log.read_text()
        if not is_too_busy or self.starts == MOST_STARTS:
            return False
        assert self.process.stdout
        self.process.stdout.close()
        self.process = self._started()
        return True

    def wait(self, timeout_s: float = 600) -> tuple[int, str, str]:
        """Wait for the end. Return exit code, stdout and stderr. A command that hangs is killed."""
        try:
            stdout, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            self.process.kill()  # its child ends with it, and so does a local Ray
            raise AssertionError(f"not ended within {timeout_s:g} s:\n{self.log.read_text()}") from error
        if self._is_restarted():
            return self.wait(timeout_s)
        return self.process.returncode, stdout, self.log.read_text()

    def family(self) -> list[psutil.Process]:
        """Return the descendants of the command, including Ray's processes and the ranks."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait_for(self, done: int, out: Path, timeout_s: float = 600, line: str = "cluster: ") -> None:
        """Wait until this command prints a line and `done` trials are saved, also by ranks of a killed command."""
        deadline_s = time.monotonic() + timeout_s
        while line not in self.log.read_text() or len(finished(out)) < done:
            assert self.process.poll() is None or self._is_restarted(), self.log.read_text()
            assert time.monotonic() < deadline_s, self.log.read_text()
            time.sleep(0.1)


def finished(out: Path) -> dict[str, dict[str, object]]:
    """Return trial id -> record in a results folder."""
    return {path.parent.name: json.loads(path.read_text()) for path in out.glob("trials/*/trial.json")}
