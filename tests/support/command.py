"""The command as users run it, in a process of its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent


class Command:
    """`python -m study.scaling ...` in a new process group. stderr goes to a file that can be read while it runs."""

    def __init__(self, arguments: list[str], folder: Path, name: str = "command", **variables: str):
        self.log = folder / f"{name}.err"
        with self.log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "study.scaling", *arguments],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
                env=os.environ | {"COLUMNS": "100", "STEPPING": str(folder)} | variables,
            )

    def wait(self, timeout_s: float = 600) -> tuple[int, str, str]:
        """Wait for the end. Return exit code, stdout and stderr. A command that hangs is killed."""
        try:
            stdout, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            self.process.kill()  # its child ends with it, and so does a local Ray
            raise AssertionError(f"not ended within {timeout_s:g} s:\n{self.log.read_text()}") from error
        return self.process.returncode, stdout, self.log.read_text()

    def family(self) -> list[psutil.Process]:
        """Return the descendants of the command, including Ray's processes and the ranks."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait_for(self, done: int, out: Path, timeout_s: float = 600, line: str = "cluster: ") -> None:
        """Wait until this command prints a line and `done` trials are saved, also by ranks of a killed command."""
        deadline_s = time.monotonic() + timeout_s
        while line not in self.log.read_text() or len(finished(out)) < done:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline_s, self.log.read_text()
            time.sleep(0.1)


def finished(out: Path) -> dict[str, dict[str, object]]:
    """Return trial id -> record in a results folder."""
    return {path.parent.name: json.loads(path.read_text()) for path in out.glob("trials/*/trial.json")}
