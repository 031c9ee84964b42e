"""Compiled modules for all processes of a study, where the installation does not have them."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trainables.scratch import private_folder, user_folder


def keep_bytecode(packages: Sequence[str] = ("ray", "torch")) -> None:
    """Let this process and those of Ray keep compiled modules if they would compile a package at every start.

    So it is after an installation without compilation, if Python may not write next to the modules. The imports of a
    rank then take about twice as long (`benchmarks.cost.imports`). `study.scaling clean` removes the files.
    """
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        cached = Path(importlib.util.cache_from_source(spec.origin))
        if not cached.exists() and (sys.dont_write_bytecode or not os.access(Path(spec.origin).parent, os.W_OK)):
            with suppress(OSError):  # then each process compiles, as before
                folder = str(private_folder(user_folder() / "bytecode"))
                os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
                sys.dont_write_bytecode = False
                sys.pycache_prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", folder)
            return
