"""A process that has imported the modules of a rank, from which ranks and their loader processes are forked.

Starting Python and importing torch takes 5 to 20 s. The server does it once. It runs no other code, uses no device and
has a single thread, so a process that is forked from it is as new as one after its imports.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

PROJECT_ROOT = str(Path(__file__).resolve().parent.parent.parent.parent)
LOADER_MODULES = ["torch", "pyarrow.dataset", "trainables.batch"]
"""Modules that every loader process needs for its first batch. Preloading them saves seconds per start."""

RANK_MODULES = [*LOADER_MODULES, "torch._dynamo", "study.orchestrate.rank"]
"""Modules that a rank would otherwise import in its first trial. Creating a DDP wrapper imports torch._dynamo."""


def _server() -> multiprocessing.forkserver.ForkServer:
    """Return the object that Python's functions use. Those of the module would start another server after `share`."""
    return multiprocessing.forkserver._forkserver


def start_forkserver(modules: Sequence[str]) -> None:
    """Start the fork server of this process, with torch and `modules` imported for a fast start.

    Nothing happens if there is one. A forked process imports `__main__` again. In a Ray worker this is Ray's start
    script and takes seconds. Removing its file name prevents the import.
    """
    vars(sys.modules["__main__"]).pop("__file__", None)
    # the server is a new interpreter, which finds this project only through its environment
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [PROJECT_ROOT, os.environ.get("PYTHONPATH")]))
    _server().set_forkserver_preload([*LOADER_MODULES, *modules])
    _server().ensure_running()


def await_forkserver() -> None:
    """Wait until the fork server has imported its modules, so that processes start without delay."""
    process = multiprocessing.get_context("forkserver").Process(target=int)
    process.start()
    process.join()


@dataclass(frozen=True)
class ServerOfParent:
    """The fork server of a process, for one that is forked from it.

    Python (3.11 to 3.13) has no public way to share a server: a forked process that starts processes itself would start
    another server, whose imports take seconds.
    """

    pid: int
    values: dict[str, Any]

    @classmethod
    def running(cls) -> Self:
        """Return the server of this process, after starting it if necessary."""
        _server().ensure_running()
        values = vars(_server())
        names = ("_forkserver_address", "_forkserver_authkey")
        return cls(values["_forkserver_pid"], {name: values[name] for name in names if name in values})

    def share(self) -> None:
        """Let this process, which was forked from the server, start its own processes from it."""
        vars(_server()).update(self.values | {"ensure_running": lambda: None})
